"""Real process groups: one result on one process and on two, after a kill, and on another ZeRO stage."""

import os
import signal

import psutil
import pytest

from lomdm_dist.data.shards import ShardSet
from tests.distributed.grids import on_processes, train
from tests.distributed.runs import assert_same, curve, finish, start, wait_for


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory, base):
    """25 undisturbed steps on two processes."""
    run = tmp_path_factory.mktemp("whole") / "run"
    on_processes(2, train, [*base, "train.steps=25", f"train.run={run}"])
    return run


def test_one_process_has_the_losses_of_two(tmp_path, base, whole_run):
    run = tmp_path / "run"
    on_processes(1, train, [*base, "train.steps=10", f"train.run={run}"])
    ours, theirs = curve(run), curve(whole_run)
    assert all(abs(ours[step] - theirs[step]) < 1e-4 for step in range(1, 11))


def test_the_data_are_counted(whole_run, tiny_data):
    size = len(ShardSet(tiny_data / "train"))
    sequences, epochs = curve(whole_run, "sequences"), curve(whole_run, "epoch")
    assert all(epochs[step] * size == pytest.approx(sequences[step]) for step in range(1, 26))
    assert all(waited >= 0 for waited in curve(whole_run, "data_seconds").values())


def test_losses_move(whole_run):
    losses = curve(whole_run)
    assert losses[1] == pytest.approx(5.7, abs=0.3) and losses[25] < losses[1] - 0.05
    assert max(curve(whole_run, "exponent_std").values()) > 1e-3
    assert max(curve(whole_run, "velocity").values()) > 0


@pytest.mark.slow
def test_killed_on_two_processes_and_resumed_as_if_nothing_had_been(tmp_path, base, whole_run):
    """SIGKILL after step 15; the resumed run's curves are the undisturbed run's, and none is logged twice."""
    run = tmp_path / "run"
    options = [*base, "train.steps=25", "train.save_every=15", f"train.run={run}"]
    process = start(2, *options)
    wait_for(run / "latest", "step-15", process)  # written in the background, while training goes on
    workers = psutil.Process(process.pid).children(recursive=True)  # in sessions of their own
    for worker in workers:
        worker.kill()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert (run / "latest").read_text() == "step-15\n"
    refused = start(2, *options)
    assert "continue it with --resume auto" in refused.communicate(timeout=300)[0]
    finish(start(2, *options, "--resume", "auto"))
    for key in ("loss", "grad_norm", "lr", "lr_heads", "tokens", "exponent_std"):
        assert_same(curve(run, key), curve(whole_run, key), range(1, 26), 1e-6)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((2, "parallel.zero_stage=3"), (1, "parallel.zero_stage=0")),
        pytest.param((1, "parallel.zero_stage=0"), (2, "parallel.zero_stage=2"), marks=pytest.mark.slow),
    ],
)
def test_a_run_moves_between_grids_and_zero_stages(tmp_path, base, whole_run, first, then):
    """Weights, moments, EMA and learning rates travel: the curve stays the undisturbed one's."""
    run = tmp_path / "run"
    options = [*base, "train.steps=12", f"train.run={run}", "train.micro_batch=4"]
    on_processes(first[0], train, [*options, first[1]], 6)
    assert (run / "latest").read_text() == "step-6\n"
    on_processes(then[0], train, [*options, then[1]])
    for key in ("loss", "grad_norm", "lr", "lr_heads"):
        assert_same(curve(run, key), curve(whole_run, key), range(1, 13), 1e-4)


def test_sigterm_saves_and_exits_75(tmp_path, base):
    run = tmp_path / "run"
    process = start(1, *base, "train.steps=100000", f"train.run={run}")
    wait_for(run / "metrics.jsonl", '"step": 1,', process)
    process.send_signal(signal.SIGTERM)
    assert "stopped on request" in finish(process, expect=75)
    last = max(curve(run))
    assert (run / "latest").read_text() == f"step-{last}\n"


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGUSR1, marks=pytest.mark.slow), signal.SIGKILL, "stop"]
)
def test_torchrun_starts_again_and_workers_outlive_it_no_longer_than_a_save(tmp_path, base, number):
    """Its store outlives the workers that it starts again, and what they had written there.

    It dies of either signal and tells its workers nothing; the run must neither go on nor be lost. The
    file RUN/stop is asked of the workers alone, and torchrun must not start them again. It does after a
    signal to one worker: on several hosts that may be one which leaves, and the others go on.
    """
    run = tmp_path / "run"
    options = [*base, "train.steps=100000", "train.save_every=5", f"train.run={run}", "--resume", "auto"]
    process = start(2, *options, launcher=["--max-restarts", "3"])
    wait_for(run / "latest", "step-", process)
    torchrun = psutil.Process(process.pid)
    torchrun.children(recursive=True)[-1].kill()
    wait_for(run / "ended.log", "has died", process)
    wait_for(run / "metrics.jsonl", f'"step": {max(curve(run)) + 10},', process)
    workers = torchrun.children(recursive=True)
    if number == "stop":
        workers[-1].terminate()
        psutil.wait_procs(workers, timeout=120)
        wait_for(run / "metrics.jsonl", f'"step": {max(curve(run)) + 10},', process)
        workers = torchrun.children(recursive=True)
        (run / number).touch()
    else:
        process.send_signal(number)
    status = process.wait(timeout=300)
    assert number != "stop" or status == 0
    _, alive = psutil.wait_procs(workers, timeout=120)
    assert not alive
    said = process.communicate()[0]
    assert "has died" in said and "from step " in said
    steps = list(curve(run))
    assert (run / "latest").read_text() == f"step-{steps[-1]}\n" and steps == list(range(1, steps[-1] + 1))


def test_dropout_repeats_after_a_resume(tmp_path, base):
    losses = []
    for name, stops in (("a", [None]), ("b", [4, None])):
        options = [*base, "model.dropout=0.3", "train.steps=8", f"train.run={tmp_path / name}"]
        for stop in stops:
            on_processes(1, train, options, stop)
        losses.append(curve(tmp_path / name))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
