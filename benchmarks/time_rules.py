"""Bias and standard error of the bound under the time rules, for a network of constant CE = 1.

The true value is 1 nat a token, whatever the exponents. One draw of (time, masks) for each of N
sequences, times stratified over them; the standard error is over independent repetitions of that.

    python benchmarks/time_rules.py    # prints the table, writes benchmarks/results/time_rules.md
"""

import platform
from pathlib import Path

import torch

from lomdm_dist.process import (
    PowerSchedule,
    keyed_uniforms,
    nelbo_integrand,
    norm_sig,
    sample_time,
    stratify,
)

LENGTH, SEQUENCES, REPETITIONS = 128, 256, 400
EXPONENTS = (0.05, 0.1, 0.2, 0.375, 0.7, 1.0, 1.35)
RULES = {"mixture": ("mixture", 0.0), "uniform 1e-3": ("uniform", 1e-3), "uniform 1e-5": ("uniform", 1e-5)}


def estimates(exponent: torch.Tensor, rule: str, eps: float) -> torch.Tensor:
    """The bound a token, by each repetition: [REPETITIONS]; exponent [L]."""
    exponent, indices = exponent.expand(SEQUENCES, LENGTH), torch.arange(SEQUENCES)
    found = []
    for repetition in range(REPETITIONS):
        uniforms = keyed_uniforms(0, 0, repetition, indices, 2 + LENGTH)
        uniforms[:, 0] = stratify(uniforms[:, 0], indices, SEQUENCES)
        t, weight = sample_time(exponent, uniforms[:, :2], rule, eps)
        schedule = PowerSchedule(exponent)
        masked = uniforms[:, 2:] < schedule.log_mask_prob(t).exp()
        velocity = schedule.velocity(t)
        main, _ = nelbo_integrand(torch.ones_like(velocity), masked, velocity, velocity)
        found.append((weight * main).mean() / LENGTH)
    return torch.stack(found)


def cases() -> dict[str, torch.Tensor]:
    learned = 0.7 + 0.65 * norm_sig(torch.randn(1, LENGTH, generator=torch.Generator().manual_seed(0)) * 1.5)
    named = {f"all {e:g}": torch.full((LENGTH,), e, dtype=torch.float64) for e in EXPONENTS}
    return named | {f"0.7 + 0.65 NormSig, sd {learned.std():.2f}": learned[0]}


def main() -> None:
    lines = [
        f"| exponents | {' | '.join(f'{r}: bias | sd' for r in RULES)} |",
        "|---|" + "---|---|" * len(RULES),
    ]
    for name, exponent in cases().items():
        cells = []
        for rule, eps in RULES.values():
            found = estimates(exponent, rule, eps)
            cells += [f"{found.mean() - 1:+.4f}", f"{found.std():.4f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    table = "\n".join(lines)
    about = (
        f"`python benchmarks/time_rules.py`, {platform.processor() or platform.machine()}, "
        f"torch {torch.__version__}, float64. {SEQUENCES} sequences of {LENGTH}, one draw each, CE = 1; "
        f"bias (truth: 1) and standard deviation of the batch's estimate over {REPETITIONS} repetitions."
    )
    (Path(__file__).parent / "results" / "time_rules.md").write_text(f"# Time rules\n\n{about}\n\n{table}\n")


if __name__ == "__main__":
    main()
