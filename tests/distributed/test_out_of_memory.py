"""A rank that runs out of memory: the step is done again, and nothing is lost."""

import json

import pytest
import torch

from lomdm_dist.errors import first_line
from lomdm_dist.train.loop import is_out_of_memory, largest_divisor
from tests.distributed import grids
from tests.distributed.grids import on_processes
from tests.distributed.runs import curve

RANKS, SHORT_RANK, SHORT_STEP = 2, 1, 5


def train_with_a_shortage(overrides: list[str], within: str, times: int) -> str | None:
    """One rank runs out of memory at a step, `times` times, in its second micro-batch; what it dies of."""
    from lomdm_dist.parallel.grid import rank
    from lomdm_dist.train import gradients, loop

    real, calls, left = gradients.backpropagate, {}, [times]

    def short(*_):
        left[0] -= 1
        raise torch.OutOfMemoryError("out of memory, says the test\nand more")

    def backpropagate(engine, x, valid, noise, config, share):
        step = loop_step[0]
        calls[step] = calls.get(step, 0) + 1
        if rank() == SHORT_RANK and step == SHORT_STEP and calls[step] >= 2 and left[0]:
            if within == "forward":
                real(engine, x, valid, noise, config, share)
                short()
            if within == "order":  # the feature pass of phi, which switches dropout off for itself
                handle = engine.module.backbone.blocks[1].register_forward_pre_hook(short)
                try:
                    return real(engine, x, valid, noise, config, share)
                finally:
                    handle.remove()
            handle = engine.module.backbone.blocks[0].attention_out.weight.register_hook(short)
            try:
                return real(engine, x, valid, noise, config, share)
            finally:
                handle.remove()
        return real(engine, x, valid, noise, config, share)

    loop_step, real_step = [0], loop.Run.step

    def step(self, number):
        loop_step[0] = number
        return real_step(self, number)

    gradients.backpropagate, loop.Run.step = backpropagate, step
    try:
        grids.train(overrides)
    except Exception as error:  # of the others: that a rank is gone
        return str(error) or type(error).__name__


ENGINES = {
    "ZeRO 0": ["parallel.zero_stage=0"],
    "ZeRO 1": ["parallel.zero_stage=1"],
    "ZeRO 1, bf16": ["parallel.zero_stage=1", "train.precision=bf16"],
}


@pytest.mark.parametrize(
    ("engine", "within"), [("ZeRO 0", "order"), ("ZeRO 1", "forward"), ("ZeRO 1, bf16", "backward")]
)
def test_the_step_is_done_again_with_half_the_micro_batch(engine, within, base, tmp_path):
    options = [*base, "train.steps=8", "train.global_batch=16", "train.micro_batch=4", "model.dropout=0.1"]
    options += ENGINES[engine]
    runs = {times: tmp_path / str(times) for times in (0, 1)}
    for times, run in runs.items():
        on_processes(RANKS, train_with_a_shortage, [*options, f"train.run={run}"], within, times)
    tolerance = 1e-3 if "bf16" in engine else 1e-5  # other micro-batches round otherwise
    for key in ("loss", "grad_norm"):
        ours, theirs = curve(runs[1], key), curve(runs[0], key)
        assert len(ours) == 8 and list(ours.values()) == pytest.approx(list(theirs.values()), rel=tolerance)
    rows = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    assert [row["out_of_memory"] for row in rows] == [0] * SHORT_STEP + [1] * 3
    assert [row["micro_batch"] for row in rows] == [4] * SHORT_STEP + [2] * 3


def test_what_cannot_shrink_ends_with_the_ways_out(base, tmp_path):
    """A micro-batch of one; and engines whose ranks wait for each other inside of it."""
    options = [*base, "train.steps=8", "train.global_batch=4", "train.micro_batch=1"]
    said = on_processes(
        RANKS, train_with_a_shortage, [*options, f"train.run={tmp_path / 'one'}"], "forward", 1
    )
    assert all("rank" in text and "with micro-batch 1" in text for text in said)
    assert "(out of memory, says the test): resume with train.recompute=block" in said[SHORT_RANK]
    options = [
        *base,
        "train.steps=8",
        "train.global_batch=16",
        "train.micro_batch=4",
        "parallel={engine: fsdp2, zero_stage: 3}",
    ]
    run = tmp_path / "fsdp"
    said = on_processes(
        RANKS, train_with_a_shortage, [*options, f"train.run={run}"], "forward", 1, seconds=60
    )
    assert all(said), "no rank waits for one that has ended"
    assert (
        f"rank {SHORT_RANK} ran out of memory in step {SHORT_STEP + 1} with micro-batch 4" in said[SHORT_RANK]
    )
    assert "resume with train.micro_batch=2 or train.recompute=block" in said[SHORT_RANK]


def train_a_model_that_does_not_fit(overrides: list[str]) -> str:
    from lomdm_dist.parallel.grid import rank
    from lomdm_dist.train import loop

    plain = loop.WeightAverage

    def average(*arguments):
        if rank() == SHORT_RANK:
            raise torch.OutOfMemoryError("out of memory, says the test\nand more")
        return plain(*arguments)

    loop.WeightAverage = average
    try:
        grids.train(overrides)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_model_that_does_not_fit_says_what_would_help(base, tmp_path):
    options = [*base, f"train.run={tmp_path / 'run'}"]
    said = on_processes(RANKS, train_a_model_that_does_not_fit, options, seconds=60)
    assert said[SHORT_RANK].startswith(
        f"UserError: rank {SHORT_RANK} ran out of memory while the model was built (out of memory, says the "
        "test): parallel.zero_stage=3 or "
    )
    assert all(said), "no rank waits for one that has ended"


def test_what_is_taken_for_a_shortage():
    try:
        torch.empty(2**60)
    except RuntimeError as error:
        assert is_out_of_memory(error)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert first_line(MemoryError()) == "MemoryError" and first_line(RuntimeError("a\nb")) == "a"
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert [largest_divisor(n) for n in (2, 3, 8, 9, 12)] == [1, 1, 4, 3, 6]
