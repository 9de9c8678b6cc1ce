"""Tokens a second of sampling, by the number of steps.

`every step` is the reverse process as it is written: the whole batch through the network at each step of
time. `reused` is what `lomdm sample` does: a sequence is looked at again where something was revealed in it.
The same noise, hence the same texts; rounds in turns. Seconds are the process's own, of one thread.

    python benchmarks/sampling.py    # ten minutes; writes benchmarks/results/sampling.md
"""

import os
import statistics
import time
from pathlib import Path

import torch

from lomdm_dist import machine
from lomdm_dist.config import load_config
from lomdm_dist.model import LoMDM
from lomdm_dist.sample import sample
from lomdm_dist.sample.ancestral import StepNoise, reverse_step
from lomdm_dist.sample.look import Look

ROOT = Path(__file__).resolve().parent.parent
SEQUENCES, LENGTH, ROUNDS = 4, 64, 3
SMALL = [
    "model.blocks=4",
    "model.width=320",
    "model.heads=5",
    "model.vocab_size=4096",
    f"model.length={LENGTH}",
]


@torch.no_grad()
def every_step(model, steps: int) -> torch.Tensor:
    """The texts, the network asked at each step."""
    z = torch.full((SEQUENCES, LENGTH), model.mask_id)
    t = torch.ones(SEQUENCES, dtype=torch.float64)
    for k in range(steps):
        look, number = Look(model, z), torch.full((SEQUENCES,), k)
        noise = StepNoise(0, number, torch.arange(SEQUENCES), z.device)
        reveal, tokens, t = reverse_step(look, look.masked, t, number, steps, noise)
        z = z.masked_scatter(reveal, tokens)
    return z


def random_model() -> LoMDM:
    config = load_config(ROOT / "configs/lm1b_unpacked.yaml", SMALL)
    model = LoMDM(config.model, config.objective).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # gates, heads and output start at zero
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return model


def row(model, steps: int) -> list[str]:
    """steps; tokens/s at every step, and reused; their ratio and its ends; calls a sequence; share saved."""
    plain, reused = [], []
    for _ in range(ROUNDS):
        start = time.process_time()
        ids = every_step(model, steps)
        plain.append(time.process_time() - start)
        start = time.process_time()
        found = sample(model, SEQUENCES, LENGTH, steps, seed=0)
        reused.append(time.process_time() - start)
        assert torch.equal(ids, found.token_ids)
    tokens = SEQUENCES * LENGTH
    ratios = [a / b for a, b in zip(plain, reused, strict=True)]
    return [
        f"{steps} = {steps / LENGTH:g} L",
        f"{tokens / statistics.median(plain):.0f}",
        f"{tokens / statistics.median(reused):.0f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})",
        f"{found.network_calls:.1f}",
        f"{found.saved_calls:.0%}",
    ]


def main() -> None:
    torch.set_num_threads(1)
    model = random_model()
    every_step(model, 2)  # warms up
    lines = [
        "| steps | every step, tokens/s | reused, tokens/s | ratio | calls a sequence | saved |",
        "|---|---|---|---|---|---|",
    ]
    for share in (4, 2, 1, 1 / 2, 1 / 4):
        lines.append(f"| {' | '.join(row(model, int(LENGTH / share)))} |")
        print(lines[-1], flush=True)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    about = (
        f"`python benchmarks/sampling.py`, {machine.cpu()}, "
        f"one thread of {os.cpu_count()} cores, seconds of CPU time, torch {torch.__version__}, float32. "
        f"LoMDM of {millions:.1f}M parameters with random weights, V = 4,096; {SEQUENCES} sequences of "
        f"{LENGTH} in one batch, uniform steps of time. Medians of {ROUNDS} rounds in turns; ratio: with its "
        "least and its largest value. Both give the same ids, which is checked."
    )
    table = "\n".join(lines)
    (Path(__file__).parent / "results" / "sampling.md").write_text(f"# Sampling\n\n{about}\n\n{table}\n")


if __name__ == "__main__":
    main()
