"""What `latest` names always loads: killed at any moment of saves at every step; saves that fail say so."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from lomdm_dist.train.checkpoint import Checkpoint
from tests.distributed.grids import on_processes
from tests.distributed.runs import curve, finish, start, wait_for
from tests.distributed.test_grids import contents, train

SAVES = ["train.save_every=1", "train.steps=100000", "train.keep_last=2"]


def kill(process) -> None:
    """The launcher and all its workers, which are in sessions of their own."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=60)
    process.wait()


def killed_after(seconds: float, run: Path, options: list[str]) -> str:
    """Train on two processes, killed so long after their first save; returns what `latest` names."""
    latest = run / "latest"
    before = latest.read_text() if latest.exists() else ""
    process = start(2, *options, f"train.run={run}", "--resume", "auto")
    wait_for(latest, "step-", process)
    while latest.read_text() == before:
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(seconds)
    kill(process)
    name = (run / "latest").read_text().strip()
    checkpoint = Checkpoint(run)  # reads every file and compares its checksum
    assert checkpoint.progress.step == int(name.removeprefix("step-"))
    assert not any(tensor.isnan().any() for tensor in contents(checkpoint.folder).values())
    checkpoint.build_model()
    return name


@pytest.mark.parametrize("trials", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_while_saving_at_every_step(trials, base, tmp_path):
    """Each trial goes on from what the one before left: half-written folders and all."""
    random.seed(trials)
    run, names = tmp_path / "run", []
    for _ in range(trials):
        names.append(killed_after(random.uniform(0, 3), run, [*base, *SAVES]))
    steps = [int(name.removeprefix("step-")) for name in names]
    print(f"latest after each kill: {steps}; left in checkpoints/: {sorted(os.listdir(run / 'checkpoints'))}")
    assert steps == sorted(steps) and steps[-1] > steps[0] + trials - 2
    finish(start(2, *base, f"train.run={run}", f"train.steps={steps[-1] + 5}", "--resume", "auto"))
    assert (run / "latest").read_text() == f"step-{steps[-1] + 5}\n"
    assert not list((run / "checkpoints").glob(".*")), "what was half written is gone"


def test_saves_in_a_row_keep_the_last_and_every_nth(base, tmp_path):
    run = tmp_path / "run"
    options = [*base, "train.steps=20", "train.save_every=1", "train.keep_last=2", "train.keep_every=7"]
    on_processes(2, train, [*options, f"train.run={run}"])
    assert sorted(os.listdir(run / "checkpoints")) == ["step-14", "step-19", "step-20", "step-7"]
    assert len(curve(run)) == 20


def train_on_a_full_disk(overrides: list[str], rank: int) -> str:
    """One rank cannot write; what everyone is told."""
    import lomdm_dist.train.saver as saver
    from lomdm_dist.errors import UserError

    if int(os.environ["RANK"]) == rank:

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        saver.sha256 = full
    try:
        train(overrides)
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_one_rank_is_said_by_all_and_leaves_nothing(rank, base, tmp_path):
    run = tmp_path / "run"
    on_processes(2, train, [*base, "train.steps=2", f"train.run={run}"])
    before = sorted(os.listdir(run / "checkpoints"))
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "latest").unlink()
    shutil.rmtree(other / "checkpoints")
    said = on_processes(
        2, train_on_a_full_disk, [*base, "train.steps=4", f"train.run={other}"], rank, seconds=60
    )
    assert all("cannot write checkpoint" in text and "No space left" in text for text in said), said
    assert os.listdir(other / "checkpoints") == [] and not (other / "latest").exists()
    assert sorted(os.listdir(run / "checkpoints")) == before
