"""A loss or gradient that is no number: left out, stopped at, or gone back from, alike on every engine."""

import json
import math
import shutil

import pytest
import torch

from lomdm_dist.convert.checkpoint import seal
from lomdm_dist.data.reader import open_reader
from lomdm_dist.train.checkpoint import Checkpoint
from tests.distributed import grids
from tests.distributed.grids import on_processes
from tests.distributed.runs import assert_same, curve

BATCH = 8
BLOCK = "backbone.blocks.1"
STEPS = ["train.steps=9", f"train.global_batch={BATCH}", "train.micro_batch=4", "train.save_every=3"]
# of the global batches 0, 1, ...: one by itself, and two in a row
BAD = {3, 6, 7}
ROLLBACK = ["faults.on_nonfinite=rollback", "faults.nonfinite_in_a_row=2"]


def train(
    overrides: list[str], bad: set[int], bad_rank: int, where: str = "forward"
) -> tuple[list[str], str]:
    """Train; one rank's activations or gradients of some global batches are NaN. What is said, the end."""
    from lomdm_dist.errors import RunFailed
    from lomdm_dist.parallel.grid import rank
    from lomdm_dist.train import gradients, loop
    from lomdm_dist.train.metrics import Reporter

    said, batch, plain, real = [], [0], loop.Run._micro_batches, gradients.backpropagate

    def micro_batches(run, step, rows):
        batch[0] = run.progress.sequences // run.config.train.global_batch
        return plain(run, step, rows)

    def spoil(_, __, output):
        if torch.is_grad_enabled() and where == "forward":  # in the samples' passes, not in the order's
            return output * math.nan
        if torch.is_grad_enabled():
            output.register_hook(lambda gradient: gradient * math.nan)

    def backpropagate(engine, *arguments):
        block = engine.module.get_submodule(BLOCK)
        spoiled = rank() == bad_rank and batch[0] in bad
        handle = block.register_forward_hook(spoil) if spoiled else None
        try:
            return real(engine, *arguments)
        finally:
            if handle:
                handle.remove()

    Reporter.say = lambda _, text: said.append(text)
    loop.Run._micro_batches, gradients.backpropagate = micro_batches, backpropagate
    try:
        grids.train(overrides)
    except RunFailed as error:
        return said, str(error)
    return said, ""


def edited(checkpoint, to, **changes) -> None:
    """A copy that says that it is of another step, or has gone through other data."""
    folder = to / "checkpoints" / f"step-{changes['step']}"
    shutil.copytree(checkpoint, folder)
    seal(folder, Checkpoint(folder).state.model_copy(update=changes))
    (to / "latest").write_text(f"step-{changes['step']}\n")


@pytest.fixture(scope="module")
def expected(base, tmp_path_factory):
    """The curve that BAD leaves with ROLLBACK, made by hand: whole runs, and edited checkpoints between."""
    folder = tmp_path_factory.mktemp("by_hand")
    options = [*base, *STEPS, "parallel.zero_stage=0"]
    parts = [folder / name for name in ("a", "b", "c")]
    on_processes(1, grids.train, [*options, f"train.run={parts[0]}"], 3)
    # the fourth step is left out, with its data
    edited(parts[0] / "checkpoints/step-3", parts[1], step=4, sequences=4 * BATCH)
    on_processes(1, grids.train, [*options, f"train.run={parts[1]}"], 6)
    # steps 7 and 8 are not; the data are
    edited(parts[1] / "checkpoints/step-6", parts[2], step=6, sequences=8 * BATCH)
    on_processes(1, grids.train, [*options, f"train.run={parts[2]}"])
    return {
        key: curve(parts[0], key) | curve(parts[1], key) | curve(parts[2], key)
        for key in ("loss", "grad_norm", "sequences")
    }


ENGINES = {
    "ZeRO 0": (1, ["parallel.zero_stage=0"]),
    "ZeRO 1": (2, ["parallel.zero_stage=1"]),
    "ZeRO 2": (2, ["parallel.zero_stage=2"]),
    "ZeRO 3": (2, ["parallel.zero_stage=3"]),
    "ZeRO 1, bf16": (2, ["parallel.zero_stage=1", "train.precision=bf16"]),
    "ZeRO 1, offload": (2, ["parallel.zero_stage=1", "parallel.offload=true"]),
    "FSDP2": (2, ["parallel={engine: fsdp2, zero_stage: 3}"]),
    "tp 2": (2, ["parallel.tensor_parallel=2"]),
}
FAST = ["ZeRO 1", "ZeRO 3", "FSDP2"]


@pytest.mark.parametrize(
    "engine", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES]
)
def test_one_is_left_out_and_two_are_gone_back_from(engine, base, tiny_data, expected, tmp_path):
    processes, parallel = ENGINES[engine]
    run, bad_rank = tmp_path / "run", processes - 1
    options = [*base, *STEPS, *parallel, *ROLLBACK, f"train.run={run}"]
    said, end = on_processes(processes, train, options, BAD, bad_rank)[0]
    assert end == ""
    tolerance = 5e-3 if "bf16" in engine else 1e-5
    good = [1, 2, 3, 5, 6, 7, 8, 9]
    for key, values in expected.items():
        assert_same(curve(run, key), values, good, tolerance)
    assert curve(run)[4] is None, "no loss, and no made-up number"
    assert list(curve(run, "skipped_steps").values()) == [0] * 3 + [1] * 3 + [3] * 3
    assert list(curve(run, "rollbacks").values()) == [0] * 6 + [1] * 3
    (left_out,) = [line for line in said if line.startswith("left out: the loss of step 4 is nan")]
    assert (
        f"rank {bad_rank}, whose loss is nan, first bad in the gradient of backbone.output.weight" in left_out
    )
    assert "rolled back to step 6; the data up to step 8 are left behind" in said
    config = Checkpoint(run).config
    written = json.loads((run / f"bad_steps/step-4.rank-{bad_rank}.json").read_text())
    share = BATCH // (1 if "tp" in engine else processes)
    first = 3 * BATCH + (0 if "tp" in engine else bad_rank * share)
    rows = open_reader(config.data, config.train.seed).read(first, share).ids
    assert torch.equal(torch.tensor(written["ids"]), rows.to(torch.int64))


@pytest.mark.parametrize(("where", "engine"), [("forward", "ZeRO 1"), ("backward", "FSDP2")])
def test_stop_ends_at_once_and_all_agree(where, engine, base, tmp_path):
    """In the backward pass the loss is fine, and it is not in the output's gradient that it begins."""
    processes, parallel = ENGINES[engine]
    run = tmp_path / "run"
    options = [*base, *STEPS, *parallel, "faults.on_nonfinite=stop", f"train.run={run}"]
    ends = [end for _, end in on_processes(processes, train, options, {6}, 1, where)]
    assert ends[0] == ends[1]
    if where == "forward":
        assert ends[0].startswith("the loss of step 7 is nan: rank 1, whose loss is nan, first bad in the")
    else:
        assert ends[0].startswith("the gradient norm of step 7 is nan: rank 1, first bad in the gradient of")
        assert f"{BLOCK}.mlp_out.bias" in ends[0]
    assert max(curve(run)) == 6 and Checkpoint(run).progress.step == 6


def test_skip_stops_after_so_many_in_a_row(base, tmp_path):
    run = tmp_path / "run"
    options = [*base, *STEPS, "faults.nonfinite_in_a_row=2", f"train.run={run}"]
    ((said, end),) = on_processes(1, train, options, {1, 3, 4}, 0)
    assert [line[:40] for line in said if line.startswith("left out")] == [
        "left out: the loss of step 2 is nan: ran",
        "left out: the loss of step 4 is nan: ran",
    ]
    assert "the loss of step 5 is nan" in end and "(2 in a row)" in end
    assert "--resume auto goes on from the last checkpoint, or begins again where there is none" in end


def break_weights(overrides: list[str]) -> tuple[list[str], str]:
    """After the update of the third batch one weight is NaN, as by a device that computes wrongly, once."""
    from lomdm_dist.train import loop

    plain, broken = loop.Run._count, []

    def count(run, good, sums):
        plain(run, good, sums)
        if run.progress.sequences == 3 * BATCH and not broken:
            broken.append(True)
            run.engine.pieces[0].master[0] = math.nan

    loop.Run._count = count
    return train(overrides, set(), 0)


@pytest.mark.parametrize("way", ["skip", "rollback"])
def test_bad_weights_are_never_saved(way, base, tmp_path):
    run = tmp_path / "run"
    options = [*base, *STEPS, "parallel.zero_stage=0", "train.save_every=1", f"train.run={run}"]
    options += [f"faults.on_nonfinite={way}", "faults.nonfinite_in_a_row=2"]
    ((said, end),) = on_processes(1, break_weights, options)
    assert any("step-3: ValueError: the weights" in line and "are no numbers" in line for line in said), said
    if way == "skip":
        assert "whose weights" in end and "are no numbers already" in end and "(2 in a row)" in end
        assert (run / "latest").read_text() == "step-2\n"
    else:
        assert end == "" and "rolled back to step 2; the data up to step 5 are left behind" in said
        assert (run / "latest").read_text() == "step-9\n" and list(curve(run)) == list(range(1, 10))
    for name in (run / "checkpoints").iterdir():
        assert all(p.isfinite().all() for p in Checkpoint(name).build_model("raw").parameters())


def test_a_fault_that_does_not_come_again_is_named_so():
    from lomdm_dist.train.bad_steps import Found, describe

    clean = [Found(r, 5.0) for r in range(3)]
    assert "done again it is finite on every rank" in describe(7, math.inf, 1.0, clean)
    found = [Found(0, 5.0), Found(1, 5.0, weight="a.weight"), *[Found(r, math.nan, "b") for r in range(2, 9)]]
    text = describe(7, 5.0, math.nan, found)
    assert text.startswith(
        "the gradient norm of step 7 is nan: rank 1, whose weights a.weight are no numbers"
    )
    assert text.endswith("; and 4 ranks more")
