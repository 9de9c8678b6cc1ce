"""Time and peak memory of the fused projection and cross-entropy, forward and backward.

Against the plain way: every position onto the vocabulary, torch's cross-entropy, weights zero where nothing
is masked.

Each way has processes of its own, which take turns; memory is what a process grows by beyond its inputs.

    python benchmarks/loss.py    # two minutes; writes benchmarks/results/loss.md
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F

from lomdm_dist import machine
from lomdm_dist.ops.masked_linear_ce import default_chunk, masked_linear_ce

TOKENS, MASKED, VOCABULARY, WIDTH, MASK = 4096, 0.6, 50_258, 768, 50_257
ROUNDS, CALLS = 3, 3
WAYS = ("plain", "fused")


def inputs() -> dict:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).mul_(0.02).requires_grad_()
    bias = torch.zeros(VOCABULARY).requires_grad_()
    targets = torch.randint(0, MASK, (TOKENS,), generator=generator)
    masked = torch.rand(TOKENS, generator=generator) < MASKED
    weights = torch.rand(TOKENS, generator=generator)
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "targets": targets,
        "masked": masked,
        "weights": weights,
    }


def plain(hidden, weight, bias, targets, masked, weights):
    ce = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="none")
    return (ce * weights * masked).sum()


def fused(hidden, weight, bias, targets, masked, weights):
    rows = masked.nonzero()[:, 0]
    total, *_ = masked_linear_ce(hidden[rows], weight, bias, targets[rows], weights[rows], MASK, VOCABULARY)
    return total


def measure(way: str) -> dict:
    """In a process of its own: growth in bytes over the first call, seconds of each later one."""
    given, function, seconds = inputs(), globals()[way], []
    before = psutil.Process().memory_info().rss
    for call in range(CALLS + 1):
        for name in ("hidden", "weight", "bias"):
            given[name].grad = None
        start = time.perf_counter()
        loss = function(**given)
        loss.backward()
        seconds.append(time.perf_counter() - start)
        if call == 0:
            growth = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"bytes": growth, "seconds": seconds[1:], "loss": loss.item()}


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(measure(sys.argv[1])))
        return
    found = {way: {"seconds": [], "bytes": []} for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            done = subprocess.run([sys.executable, __file__, way], capture_output=True, text=True, check=True)
            one = json.loads(done.stdout)
            found[way]["seconds"] += one["seconds"]
            found[way]["bytes"].append(one["bytes"])
            print(way, one, flush=True)
    lines = ["| | seconds | quartiles | peak memory, MiB |", "|---|---|---|---|"]
    for way in WAYS:
        low, middle, high = statistics.quantiles(found[way]["seconds"], n=4, method="inclusive")
        peak = max(found[way]["bytes"]) / 2**20
        lines.append(f"| {way} | {middle:.2f} | {low:.2f} .. {high:.2f} | {peak:,.0f} |")
    seconds = statistics.median(found["fused"]["seconds"]) / statistics.median(found["plain"]["seconds"])
    memory = max(found["fused"]["bytes"]) / min(found["plain"]["bytes"])
    lines.append(f"| fused / plain | {seconds:.2f} | | {memory:.2f} |")
    about = (
        f"`python benchmarks/loss.py`, {machine.cpu()}, "
        f"{torch.get_num_threads()} threads of {os.cpu_count()} cores, torch {torch.__version__}, float32. "
        f"{TOKENS:,} positions, {MASKED:.0%} masked, V = {VOCABULARY:,}, D = {WIDTH}; chunks of "
        f"{default_chunk(VOCABULARY, 'cpu')} rows; {ROUNDS} processes of {CALLS} calls each, in turns. Both "
        "have the weight's gradient, 147 MiB, in their memory."
    )
    table = "\n".join(lines)
    notes = (
        "The floor of the time is the share of the positions that is masked: both do three matrix products."
    )
    (Path(__file__).parent / "results" / "loss.md").write_text(
        f"# The fused loss\n\n{about}\n\n{table}\n\n{notes}\n"
    )
    print(table)


if __name__ == "__main__":
    main()
