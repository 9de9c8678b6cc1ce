"""SIGKILL to any process at any moment, saves under way: what resumes has the undisturbed curve."""

import random
import sys
import time

import pytest

from lomdm_dist.train.checkpoint import Checkpoint
from tests.distributed.grids import begin, end, on_processes, train
from tests.distributed.runs import assert_same, curve

RANKS = 4
SAVES = ["train.save_every=2", "train.keep_last=2", "train.global_batch=8", "train.micro_batch=2"]
GRIDS = [
    ["parallel.zero_stage=1"],
    ["parallel={engine: fsdp2, zero_stage: 3}"],
    ["parallel={zero_stage: 2, tensor_parallel: 2}"],
    ["parallel.zero_stage=3"],
]
ENDLESS = ["train.steps=1000000", "faults.join_seconds=20"]


def size(path) -> int:
    return path.stat().st_size if path.exists() else 0


# rounding adds up from grid to grid: over hundreds of steps the undisturbed run has the one that is killed
CASES = [(3, GRIDS), pytest.param(50, GRIDS[:1], marks=pytest.mark.slow)]


@pytest.mark.parametrize(("trials", "grids"), CASES)
def test_killed_at_any_moment(trials, grids, base, tmp_path):
    """Each trial goes on from what the one before left, on the next grid; the others end by themselves."""
    draws = random.Random(trials)
    run, tally, slowest = tmp_path / "run", {"saved": 0, "before a save": 0}, 0.0
    for trial in range(trials):
        options = [*base, *SAVES, *grids[trial % len(grids)], f"train.run={run}", *ENDLESS]
        logged = size(run / "metrics.jsonl")
        processes, outputs = begin(RANKS, tmp_path, train, options)
        if draws.random() < 0.9:  # else it may die while all start
            deadline = time.monotonic() + 120
            while size(run / "metrics.jsonl") <= logged:
                assert time.monotonic() < deadline and all(p.is_alive() for p in processes), outputs[
                    0
                ].read_text()
                time.sleep(0.01)
        time.sleep(draws.uniform(0, 1.5))
        victim = draws.randrange(RANKS)
        before = (run / "latest").read_text() if (run / "latest").exists() else ""
        processes[victim].kill()
        killed = time.monotonic()
        ends = end(processes, outputs, seconds=60)
        slowest = max(slowest, time.monotonic() - killed)
        statuses = [status for status, _ in ends]
        assert statuses.pop(victim) == -9 and set(statuses) == {1}, ends
        if (run / "latest").exists():
            Checkpoint(run).build_model()  # every file of it is whole
        tally["saved" if before else "before a save"] += 1
    last = Checkpoint(run).progress.step + 4
    on_processes(RANKS, train, [*base, *SAVES, *grids[0], f"train.run={run}", f"train.steps={last}"])
    whole = tmp_path / "whole"
    undisturbed = [*base, *SAVES, *grids[0], f"train.run={whole}", "train.save_every=1000000"]
    on_processes(RANKS, train, [*undisturbed, f"train.steps={last}"])
    ours, theirs = curve(run), curve(whole)
    assert_same(ours, theirs, range(1, last + 1), 1e-5)
    worst = max(abs(ours[s] / theirs[s] - 1) for s in ours)
    print(
        f"{trials} kills: {tally}; {last} steps; largest relative difference of the loss {worst:.1e}; "
        f"the others ended within {slowest:.1f} s",
        file=sys.stderr,
    )
