"""Variance of the loss and of the gradients under the time rules `uniform` and `mixture`, on a trained LoMDM.

One batch of training sequences, the same for all draws, without dropout; a draw is the noise of one step
as training draws it, times stratified over the batch, both rules from the same uniforms. A stratum belongs
to a place in the batch, so the sequences are shuffled anew for each draw, or each would see its own times
only. Of each draw, the loss and the gradients of theta, phi and psi. What the uniform rule's cut leaves out
has draws of its own (`remainder`). Besides as trained, with phi's and psi's last layers magnified until the
exponents spread as in a longer run.

    python benchmarks/time_variance.py    # of `make demo`'s runs/demo; writes results/time_variance.md
"""

import argparse
import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lomdm_dist import machine
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.errors import UserError
from lomdm_dist.parallel.engine import Alone
from lomdm_dist.train.checkpoint import Checkpoint
from lomdm_dist.train.step import backpropagate, draw_noise

EPS, SPREAD, GROUPS = 1e-3, 0.2, 10
RULES, PARTS = ("uniform", "mixture", "remainder"), ("loss", "theta", "phi", "psi")


class Sums(NamedTuple):
    """Of independent draws of a vector, `draws` in each group: total [GROUPS, D], squared norms [GROUPS]."""

    total: Tensor
    squares: Tensor
    draws: int

    def variance(self) -> Tensor:
        """The sum over elements of each one's variance, as each group has it: [GROUPS]."""
        return (self.squares - self.total.square().sum(dim=1) / self.draws) / (self.draws - 1)


def square_of_mean(means: Tensor) -> tuple[float, float]:
    """|mean|^2 without the noise's part, from the means of independent groups [G, D]; and its error.

    It is the mean product of two different groups; the error is that where the mean is small.
    """
    products = (means @ means.T)[*torch.triu_indices(len(means), len(means), 1)]
    return products.mean().item(), products.std().item() / len(products) ** 0.5


@torch.no_grad()
def magnify(model, x: Tensor, valid: Tensor | None) -> float:
    """Multiply the heads' last layers until the exponents of x [B, L] spread by SPREAD: by which factor."""
    outputs, low, high = model.order_outputs(x, valid), 1.0, 1000.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        narrow = spread_of(model.schedule(outputs * middle, x, valid)) < SPREAD
        low, high = (middle, high) if narrow else (low, middle)
    for parameter in (model.phi.weight, model.phi.bias, model.psi.weight, model.psi.bias):
        parameter *= high
    return high


def spread_of(schedule) -> float:
    return schedule.exponent.std(dim=1).mean().item()


def measure(checkpoint: str, draws: int, magnified: bool, rule: str) -> tuple[str, dict[str, Sums]]:
    """What the exponents are, and the sums of each of PARTS over `draws` draws in each group."""
    torch.set_num_threads(1)
    saved = Checkpoint(checkpoint)
    config, model, batch = saved.config, saved.build_model(), saved.config.train.global_batch
    objective = config.objective.model_copy(update={"time": rule, "time_eps": EPS})
    config = config.model_copy(update={"objective": objective})
    draws = draws // 5 if rule == "remainder" else draws  # it varies little
    shards = ShardSet(config.data.train[0].path)
    x, valid = shards.batch(np.linspace(0, len(shards) - 1, batch).astype(np.int64), "cpu")
    name = f"magnified {magnify(model, x, valid):.1f} times" if magnified else "as trained"
    name += f", sd {spread_of(model.order(x, valid)):.3f}"
    parts = {"theta": model.backbone, "phi": model.phi, "psi": model.psi}
    parameters = {part: list(module.parameters()) for part, module in parts.items()}
    sizes = {"loss": 1} | {part: sum(p.numel() for p in ps) for part, ps in parameters.items()}
    double = partial(torch.zeros, dtype=torch.float64)
    sums = {part: Sums(double(GROUPS, size), double(GROUPS), draws) for part, size in sizes.items()}
    for step in range(GROUPS * draws):
        model.zero_grad()
        places = torch.randperm(batch, generator=torch.Generator().manual_seed(step))
        noise = draw_noise(config, step, places, "cpu")
        stats = backpropagate(Alone(model), x, valid, noise, config)
        found = {part: torch.cat([p.grad.flatten() for p in ps]) for part, ps in parameters.items()}
        found["loss"] = (stats["bound"] / stats["tokens"]).view(1)
        for part, value in found.items():
            sums[part].total[step // draws] += value
            sums[part].squares[step // draws] += value.double().square().sum()
    return name, sums


def row(part: str, both: list[Sums], remainder: Sums) -> str:
    """A line of the table: mean, standard deviation and their ratio under each rule, and the two compared."""
    means, variances = [sums.total / sums.draws for sums in both], [sums.variance() for sums in both]
    norms = [max(square_of_mean(mean)[0], 0.0) ** 0.5 for mean in means]
    sds = [variance.mean().item() ** 0.5 for variance in variances]
    ratio = (sds[0] / sds[1]) ** 2
    error = (variances[0] - ratio * variances[1]).std().item() / sds[1] ** 2 / GROUPS**0.5
    left_out = remainder.total / remainder.draws
    square, noise = square_of_mean(left_out)
    bias = f"{square**0.5:.2g}" if square > 2 * noise else f"< {(max(square, 0) + 2 * noise) ** 0.5:.2g}"
    if part == "loss":
        bias = f"{left_out.mean():.4f} ± {left_out.std() / GROUPS**0.5:.4f}"
    cells = [part, *(f"{value:.4g}" for value in norms + sds)]
    cells += [f"{sd / norm:.3g}" if norm else "-" for sd, norm in zip(sds, norms, strict=True)]
    return " | ".join([*cells, f"{ratio:.2f} ± {error:.2f}", bias])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="runs/demo")
    parser.add_argument("--draws", type=int, default=1000)
    options = parser.parse_args()
    try:
        saved = Checkpoint(options.checkpoint, read_weights=False)
    except UserError as error:
        sys.exit(f"{error}; `make demo` makes runs/demo")
    jobs = [(magnified, rule) for rule in RULES for magnified in (False, True)]
    work = partial(measure, options.checkpoint, options.draws // GROUPS)
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count()), get_context("spawn")) as pool:
        found = list(pool.map(work, *zip(*jobs, strict=True)))
    lines = [HEADER, "|---" * 10 + "|"]
    for (name, uniform), (_, mixture), (_, left_out) in (found[::2], found[1::2]):
        lines += [
            f"| {name} | {row(part, [uniform[part], mixture[part]], left_out[part])} |" for part in PARTS
        ]
    print(*lines, sep="\n")
    batch, length = saved.config.train.global_batch, saved.config.model.length
    about = (
        f"`python benchmarks/time_variance.py`, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} CPU cores, torch {machine.versions()['torch']}, {saved.config.train.precision}. "
        f"{options.checkpoint} at step {saved.progress.step}, EMA weights; {batch} training sequences of "
        f"{length}, {options.draws} draws a rule, `uniform` from {EPS:g} on."
    )
    out = Path(__file__).parent / "results" / "time_variance.md"
    out.write_text("\n\n".join(["# Variance of a step under the time rules", about, "\n".join(lines), NOTES]))


HEADER = (
    "| exponents | of | mean, uniform | mean, mixture | sd, uniform | sd, mixture | sd / mean, uniform "
    "| sd / mean, mixture | variance, uniform / mixture | mean below the cut |"
)
NOTES = """\
## Reading
"""


if __name__ == "__main__":
    main()
