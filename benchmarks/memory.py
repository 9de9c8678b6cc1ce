"""Bytes that a rank holds of parameters, gradients and optimiser, counted, beside what the textbook says.

    torchrun --nproc_per_node 4 benchmarks/memory.py --json memory.json

Counted are the storages of all tensors alive after the backward pass of each micro-batch, of which a
step has two; the largest sum is kept. Sums are in bytes a parameter of the model. A reduction bucket, of
constant size whatever the model, is counted apart; the average of the weights (EMA) would add 4 bytes a
parameter, shared out as the optimiser's state is.
"""

import argparse
import gc
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from lomdm_dist import machine
from lomdm_dist.config import Config
from lomdm_dist.parallel.engine import Blueprint, start_engine
from lomdm_dist.parallel.grid import Grid, process_grid
from lomdm_dist.parallel.zero import REDUCE_BUCKET
from lomdm_dist.train.optim import make_optimizer
from lomdm_dist.train.step import backpropagate, draw_noise

MICRO_BATCH = 2
MODEL = {"vocab_size": 512, "mask_id": 1, "length": 16, "width": 512, "blocks": 2, "heads": 4, "dropout": 0.0}

# bytes a parameter on each of N ranks: what the network computes with, gradients, masters and moments
TEXTBOOK = {
    ("deepspeed", 0, "fp32"): lambda n: (4, 4, 8),
    ("deepspeed", 1, "bf16"): lambda n: (2, 4, 12 / n),
    ("deepspeed", 2, "bf16"): lambda n: (2, 4 / n, 12 / n),
    ("deepspeed", 3, "bf16"): lambda n: (2 / n, 4 / n, 12 / n),
    ("fsdp2", 3, "bf16"): lambda n: (4 / n, 4 / n, 8 / n),  # its shards are the masters
}


def config_of(engine: str, stage: int, precision: str, ranks: int) -> Config:
    batch = 2 * ranks * MICRO_BATCH
    return Config.model_validate(
        {
            "model": MODEL,
            "objective": {"name": "mdlm"},
            "data": {"train": "-", "valid": "-"},
            "train": {
                "run": "-",
                "steps": 1,
                "global_batch": batch,
                "micro_batch": MICRO_BATCH,
                "precision": precision,
            },
            "parallel": {"engine": engine, "zero_stage": stage},
        }
    )


def storages(tensors) -> dict[int, int]:
    """Address: bytes of what the tensors lie in, each counted once."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def alive() -> dict[int, int]:
    """Storages of all tensors made since gc.freeze()."""
    while gc.collect():  # what one pass frees may leave more to the next
        pass
    tensors = []
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            tensors.append(thing)
        elif type(thing) is DTensor:
            tensors.append(thing.to_local())
    return storages(tensors)


def shares(engine) -> dict[str, int]:
    """Bytes now alive, by what they are."""
    asked = [parameter.grad for parameter in engine.module.parameters()]  # else Python may not know of them
    new = alive()
    del asked
    held = []
    for parameter in engine.module.parameters():
        parameter = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        held += [parameter.data, parameter.ds_tensor.data] if hasattr(parameter, "ds_tensor") else [parameter]
    parameters = storages(held)
    masters = storages(t for piece in engine.pieces for t in (piece.master, *piece.moments.values()))
    masters = {key: size for key, size in masters.items() if key not in parameters}
    rest = [size for key, size in new.items() if key not in parameters and key not in masters]
    return {
        "parameters": sum(parameters.values()),
        "gradients": sum(size for size in rest if size != 4 * REDUCE_BUCKET),
        "optimiser": sum(masters.values()),
        "bucket": sum(size for size in rest if size == 4 * REDUCE_BUCKET),
    }


def measure(config: Config, grid: Grid) -> dict[str, float]:
    """Peak bytes a parameter on this rank, by what they are, over two steps of random tokens."""
    gc.collect()
    gc.freeze()  # what is there already does not count
    blueprint = Blueprint(config, grid)
    engine = start_engine(blueprint, make_optimizer)
    engine.fill(partial(blueprint.draw, seed=0))
    peak = {}
    for step in range(2):
        for _ in range(config.accumulation(grid.data_size)):
            x = torch.randint(
                3, config.model.vocab_size, (MICRO_BATCH, config.model.length), device=grid.device
            )
            noise = draw_noise(config, step, torch.arange(MICRO_BATCH), grid.device)
            backpropagate(engine, x, None, noise, config)
            now = shares(engine)
            if sum(now.values()) > sum(peak.values()):
                peak = now
        engine.step()
    return {name: size / blueprint.parameters for name, size in peak.items()}


def measure_all(grid: Grid) -> list[dict]:
    """A row for each engine and stage; the largest of all ranks."""
    rows = []
    for (engine, stage, precision), textbook in TEXTBOOK.items():
        of_ranks = grid.gather(measure(config_of(engine, stage, precision, grid.data_size), grid))
        counted = {name: max(rank[name] for rank in of_ranks) for name in of_ranks[0]}
        expected = dict(zip(("parameters", "gradients", "optimiser"), textbook(grid.data_size), strict=True))
        name = "FSDP2" if engine == "fsdp2" else f"ZeRO {stage}"
        rows.append({"engine": name, "precision": precision, "counted": counted, "textbook": expected})
    return rows


def total(parts: dict[str, float]) -> float:
    return sum(size for name, size in parts.items() if name != "bucket")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    options = parser.parse_args()
    with process_grid() as grid:
        rows = measure_all(grid)
        if grid.first:
            print(f"bytes a parameter on each of {grid.data_size} data-parallel ranks: counted (textbook)")
            for row in rows:
                counted, textbook = row["counted"], row["textbook"]
                parts = "".join(f"{counted[n]:10.2f} ({textbook[n]:5.2f})" for n in textbook)
                whole = f"{total(counted):10.2f} ({total(textbook):5.2f})"
                print(f"{row['engine']:7}{row['precision']:5}{parts}{whole}  bucket {counted['bucket']:.2f}")
            machine.write_result(options.json, {"ranks": grid.data_size, "rows": rows}, MODEL)


if __name__ == "__main__":
    main()
