"""How near the model of time comes to speeds that others have published (benchmarks/published.yaml).

    python benchmarks/published.py            one line a source
    python benchmarks/published.py --rows     a line a row, those held out marked

Each source has one factor of computation, from its row of calibration; constants are the same for all.
"""

import argparse
import dataclasses
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from lomdm_dist.config import Config
from lomdm_dist.machine import GPUS, Device
from lomdm_dist.study.roofline import Shape, step_seconds
from lomdm_dist.study.traffic import traffic

ROWS = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class Row:
    """A published speed, tokens/s a GPU. `use`: calibration, development or held out; `beyond`: what sets it apart."""

    source: str
    number: int
    use: str
    beyond: str
    facts: dict
    speed: float

    @property
    def name(self) -> str:
        facts = self.facts
        return f"{facts['model']}, {facts['length']:,} x {facts['micro_batch']} x {facts['accumulation']}"

    @property
    def one_node(self) -> bool:
        return self.facts["gpus"] <= device(self).a_node


class Counted:
    """Parameters of a published shape, with what the model of time asks of lomdm_dist.study.memory.Parameters."""

    def __init__(self, shape: Shape, tied: bool):
        self.a_block = sum(width_in * width_out for width_in, width_out in shape.products(1))
        self.outside = (1 if tied else 2) * shape.vocab * shape.width
        self.total = shape.blocks * self.a_block + self.outside

    def of_rank(self, ranks: int) -> float:
        return self.total / ranks

    def of_block(self, ranks: int) -> float:
        return self.a_block / ranks

    def outside_blocks(self, ranks: int) -> float:
        return self.outside / ranks


@cache
def rows() -> list[Row]:
    """All, in the order of the file."""
    found = []
    for name, source in yaml.safe_load(ROWS.read_text())["sources"].items():
        others = 0
        for number, values in enumerate(source["rows"], start=1):
            facts = source["all"] | dict(zip(source["columns"], values, strict=True))
            facts["shape"] = source["models"][facts["model"]]
            use = "calibration"
            if number != source["calibration"]:
                others += 1
                use = "development" if others % 3 else "held out"
            found.append(Row(name, number, use, source.get("beyond", ""), facts, facts.pop("speed")))
    return found


def device(row: Row) -> Device:
    facts = row.facts
    return dataclasses.replace(
        GPUS[facts["gpu"]], **{key: facts[key] for key in ("bandwidth", "network", "a_node") if key in facts}
    )


def predicted(row: Row, compute_scale: float = 1.0) -> float:
    """Tokens/s a GPU. The row is an `ar` config of ours with the published shape and parameters in place."""
    facts, model = row.facts, row.facts["shape"]
    width, data = model["width"], facts["gpus"] // facts["tensor_parallel"]
    length, micro = facts["length"], facts["micro_batch"]
    config = Config.model_validate(
        {
            "model": {
                "vocab_size": model["vocab"],
                "mask_id": 0,
                "length": length,
                "width": width,
                "blocks": model["blocks"],
                "heads": width // 128,
            },
            "objective": {"name": "ar"},
            "data": {"train": "none", "valid": "none"},
            "train": {
                "run": "none",
                "steps": 1,
                "precision": "bf16",
                "global_batch": data * micro * facts["accumulation"],
                "micro_batch": micro,
                "recompute": facts["recompute"],
            },
            "parallel": {
                key: facts[key]
                for key in ("engine", "zero_stage", "tensor_parallel", "shard_group")
                if key in facts
            }
            | {"sequence_parallel": facts["tensor_parallel"] > 1},
        }
    )
    shape = Shape(
        width,
        model["blocks"],
        length,
        model["vocab"],
        model.get("kv", width),
        model.get("mlp", 4 * width),
        model.get("gated", False),
        length / 2,
    )
    parameters = Counted(shape, model.get("tied", False))
    collectives = traffic(config, parameters, data)
    for collective in collectives:
        if collective.part == "gradients":
            collective.bytes *= facts["reduce"] / 4
    seconds = step_seconds(
        config, parameters, device(row), data, compute_scale, shape=shape, collectives=collectives
    )
    return config.train.global_batch * length / seconds.step / facts["gpus"]


def factor(row: Row) -> float:
    """Of computation, with which the row comes out: by bisection."""
    low, high = 0.1, 10.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predicted(row, middle) > row.speed else (low, middle)
    return low


def errors() -> dict[Row, float]:
    """Predicted over published, less one, of all rows but those of calibration."""
    factors = {row.source: factor(row) for row in rows() if row.use == "calibration"}
    return {
        (row.source, row.number): predicted(row, factors[row.source]) / row.speed - 1
        for row in rows()
        if row.use != "calibration"
    }
