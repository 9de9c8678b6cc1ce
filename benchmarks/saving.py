"""What a checkpoint costs: how long training stands still, and beside it DeepSpeed's own form.

    torchrun --nproc_per_node 2 benchmarks/saving.py --json saving.json

One ZeRO 1 run in bf16 on random tokens. A round saves once in each way, one after the other, and the
order of the ways turns from round to round.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist
from memory import config_of

from lomdm_dist import machine
from lomdm_dist.config import Config
from lomdm_dist.data.shards import TokenizerFacts
from lomdm_dist.parallel.engine import Blueprint, start_engine
from lomdm_dist.parallel.grid import Grid, process_grid
from lomdm_dist.train.checkpoint import DataFacts, Progress
from lomdm_dist.train.optim import WeightAverage, make_optimizer
from lomdm_dist.train.saver import Saver

ROUNDS = 5
DATA = DataFacts(
    tokenizer=TokenizerFacts(vocab_size=512, eos_id=0, mask_id=1, pad_id=None, sha256=""),
    packing="packed",
    identity="",
)


def config_in(folder: Path, ranks: int) -> Config:
    model = {"model.width": 768, "model.heads": 12, "model.blocks": 6, "model.vocab_size": 8192}
    run = {"train.run": folder / "run", "train.keep_last": 1}
    return config_of("deepspeed", 1, "bf16", ranks).changed(model | run)


def seconds(work) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def measure(folder: Path, grid: Grid) -> dict:
    config = config_in(folder, grid.data_size)
    blueprint = Blueprint(config, grid)
    engine = start_engine(blueprint, make_optimizer)
    engine.fill(partial(blueprint.draw, seed=0))
    average = WeightAverage(engine.pieces, 0.999)
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "run").mkdir(exist_ok=True)
    saver = Saver(config, DATA, folder / "tokenizer", grid, lambda _: None)

    def ours(step: int) -> dict[str, float]:
        stands_still = seconds(lambda: saver.save(engine.pieces, average, Progress(step)))
        return {"stands still": stands_still, "written after": stands_still + seconds(saver.wait)}

    def deepspeeds(step: int) -> dict[str, float]:
        took = seconds(lambda: engine.engine.save_checkpoint(folder / "deepspeed", tag=f"step-{step}"))
        if grid.first:
            shutil.rmtree(folder / "deepspeed")
        dist.barrier()
        return {"DeepSpeed's own form, without EMA": took}

    rounds = []
    for k in range(ROUNDS):
        of_round = {}
        for way in (ours, deepspeeds) if k % 2 else (deepspeeds, ours):
            of_round |= way(k)
        rounds.append(of_round)
    saver.close()
    saved = folder / f"run/checkpoints/step-{ROUNDS - 1}"
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    ways = {
        way: {"median": statistics.median(times), "range": [min(times), max(times)]}
        for way in rounds[0]
        for times in [[of_round[way] for of_round in rounds]]
    }
    return {"parameters": blueprint.parameters, "bytes": size, "seconds": ways, "rounds": ROUNDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    options = parser.parse_args()
    with process_grid() as grid:
        folder = Path(grid.gather(tempfile.mkdtemp() if grid.first else None)[0])
        result = measure(folder, grid)
        if grid.first:
            shutil.rmtree(folder)
            print(f"{result['parameters']:,} parameters, {result['bytes'] / 2**20:,.0f} MiB a checkpoint")
            for way, times in result["seconds"].items():
                print(
                    f"{way:35}{times['median']:8.2f} s  ({times['range'][0]:.2f} .. {times['range'][1]:.2f})"
                )
            machine.write_result(options.json, result | {"ranks": grid.data_size}, {})


if __name__ == "__main__":
    main()
