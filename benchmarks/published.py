"""How near the model of time comes to speeds that others have published (benchmarks/published.yaml).

    python -m benchmarks.published            one line a source
    python -m benchmarks.published --rows     and one a row, those held out marked

Each source has one factor of computation, from its row of calibration; constants are the same for all.
"""

import argparse
import dataclasses
import math
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


@dataclass(frozen=True, eq=False)
class Row:
    """A published speed, tokens/s a GPU.

    use     calibration, development or held out
    beyond  what sets its source apart from those that the test holds
    missed  why the model misses it
    """

    source: str
    number: int
    use: str
    beyond: str
    missed: str
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
    """Parameters of a published shape: what the model of time asks of study.memory.Parameters."""

    def __init__(self, shape: Shape, tied: bool):
        self.shape, self.tied = shape, tied

    def shapes(self, ranks: int) -> dict[str, tuple]:
        """By names like ours; products of their rows and columns are those of a tensor-parallel rank."""
        tables = {"backbone.embedding.weight": (self.shape.vocab / ranks, self.shape.width)}
        if not self.tied:
            tables["backbone.output.weight"] = tables["backbone.embedding.weight"]
        for block in range(self.shape.blocks):
            for number, product in enumerate(self.shape.products(ranks)):
                tables[f"backbone.blocks.{block}.{number}.weight"] = product
        return tables

    def of_rank(self, ranks: int) -> float:
        return sum(math.prod(shape) for shape in self.shapes(ranks).values())


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
            found.append(
                Row(
                    name,
                    number,
                    use,
                    source.get("beyond", ""),
                    source.get("misses", {}).get(number, ""),
                    facts,
                    facts.pop("speed"),
                )
            )
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
    collectives = [
        dataclasses.replace(one, bytes=one.bytes * facts["reduce"] / 4) if one.part == "gradients" else one
        for one in collectives
    ]
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
    others = (row for row in rows() if row.use != "calibration")
    return {row: predicted(row, factors[row.source]) / row.speed - 1 for row in others}


def summary(found: dict[Row, float]) -> str:
    """Of errors: how many, the median, and the largest on one node and beyond."""
    sizes = {row: abs(error) for row, error in found.items()}
    one_node = [size for row, size in sizes.items() if row.one_node]
    more = [size for row, size in sizes.items() if not row.one_node]
    cells = [len(sizes), f"{statistics.median(sizes.values()):.1%}"]
    cells += [f"{max(some):.1%}" if some else "" for some in (one_node, more)]
    return " | ".join(str(cell) for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="a line a row")
    parser.add_argument("--without-held-out", action="store_true", help="while constants are being set")
    options = parser.parse_args()
    found = {r: e for r, e in errors().items() if not (options.without_held_out and r.use == "held out")}
    if options.rows:
        print(
            "| source | model, length x micro-batch x accumulation | GPUs | published | predicted | error | |"
        )
        print("|---|---|---|---|---|---|---|")
        for row, error in found.items():
            cells = [row.source, row.name, row.facts["gpus"], f"{row.speed:,.0f}"]
            cells += [
                f"{row.speed * (1 + error):,.0f}",
                f"{error:+.1%}",
                "held out" * (row.use == "held out"),
            ]
            print(f"| {' | '.join(str(cell) for cell in cells)} |")
        print()
    print("| | rows | median | one node, largest | beyond, largest |\n|---|---|---|---|---|")
    held = {row: error for row, error in found.items() if not row.beyond}
    for source in dict.fromkeys(row.source for row in found):
        own = {row: error for row, error in found.items() if row.source == source}
        print(f"| {source} | {summary(own)} |")
    for use in dict.fromkeys(row.use for row in held):
        print(f"| all {use} | {summary({r: e for r, e in held.items() if r.use == use})} |")
    print(f"| all | {summary(held)} |")


if __name__ == "__main__":
    main()
