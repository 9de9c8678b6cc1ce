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
    config = config.changed({"objective.time": rule, "objective.time_eps": EPS})
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
        f"`python benchmarks/time_variance.py`, {machine.cpu()}, "
        f"{os.cpu_count()} CPU cores, torch {machine.versions()['torch']}, {saved.config.train.precision}. "
        f"{options.checkpoint} at step {saved.progress.step}, EMA weights; {batch} training sequences of "
        f"{length}, {options.draws} draws a rule, `uniform` from {EPS:g} on; a fifth as many below it."
    )
    out = Path(__file__).parent / "results" / "time_variance.md"
    out.write_text("\n\n".join(["# Variance of a step under the time rules", about, "\n".join(lines), NOTES]))


HEADER = (
    "| exponents | of | mean, uniform | mean, mixture | sd, uniform | sd, mixture | sd / mean, uniform "
    "| sd / mean, mixture | variance, uniform / mixture | mean below the cut |"
)
NOTES = """\
## Reading

- Means are norms without the noise's part, of the loss its mean (nats a token); sd is the square root of the
  variance summed over parameters. The error of a variance ratio is from 10 groups of draws; that of the
  groups' differences, so noise that the rules share is left out.
- `mixture` has about half the variance of `uniform`, in the loss and in every gradient, phi's included. It is
  worth a batch 1.7 to 2.1 times as large as trained; with exponents spread by 0.2, 1.7 to 2.2 times in the
  gradients and 2.8 in the loss.
- That is less than the 0.50 and 0.17 of constant CE at L = 1,024, a variance ratio of 9. Those times are
  independent, and here they are stratified over the batch, which takes out most of what times alone vary,
  under either rule. What masks vary is left; a token it falls as 1/L, and L is 64.
- The cut at 1e-3 leaves out 0.7% of the loss as trained, 1.5% with the wider spread. Of the mean gradient it
  leaves out 2% to 5% of theta's, 2% to 8% of psi's; what it leaves out of phi's is as large as phi's mean.
- phi's mean gradient is 20 to 50 times smaller than its noise in one step: 1,000 draws do not measure it
  well (0: not above the noise), so the ratio sd / mean says little there. What lies below the cut is clear.
- The variance of `mixture` has a heavy tail: where t**e is below 1/L, a mask is rare and weighs 1/t**e, so
  rare draws add to the variance as the logarithm of their number. Gradients are clipped in training.
"""


if __name__ == "__main__":
    main()
