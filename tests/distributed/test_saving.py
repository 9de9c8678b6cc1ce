"""What `latest` names always loads: killed at any moment of saves at every step; saves that fail say so."""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from lomdm_dist.config import load_config
from lomdm_dist.errors import UserError
from lomdm_dist.train import inputs, loop, saver
from lomdm_dist.train.checkpoint import Checkpoint
from lomdm_dist.train.inputs import open_inputs
from tests.distributed.grids import command_line, ends_of, on_processes
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


@pytest.mark.parametrize("trials", [pytest.param(20, marks=pytest.mark.slow)])
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
    on_processes(1, train, [*base, "train.steps=21", "train.keep_last=1", f"train.run={run}"])
    assert sorted(os.listdir(run / "checkpoints")) == ["step-14", "step-21", "step-7"], "kept for good"


def train_on_a_full_disk(overrides: list[str], rank: int, full_until: int) -> str:
    """One rank finds no room for the saves before step `full_until`; what the run ends with."""
    import lomdm_dist.train.saver as saver
    from lomdm_dist.errors import UserError

    plain = saver.sha256

    def full(path: Path) -> str:
        folder = next(part for part in path.parts if part.startswith(".step-"))
        step = int(folder.split(".")[1].removeprefix("step-"))
        if step < full_until and int(os.environ["RANK"]) == rank:
            raise OSError(28, "No space left on device")
        return plain(path)

    saver.sha256 = full
    try:
        train(overrides)
    except UserError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_one_rank_leaves_nothing_and_training_goes_on(rank, base, tmp_path):
    run = tmp_path / "run"
    options = [*base, "train.steps=4", "train.save_every=1", f"train.run={run}"]
    assert on_processes(2, train_on_a_full_disk, options, rank, 3, seconds=60) == ["done"] * 2
    assert sorted(os.listdir(run / "checkpoints")) == ["step-3", "step-4"]
    Checkpoint(run)
    said = on_processes(2, train_on_a_full_disk, [*options, "train.steps=6"], rank, 9, seconds=60)
    assert all("cannot write checkpoint" in text and "No space left" in text for text in said), said
    assert sorted(os.listdir(run / "checkpoints")) == ["step-3", "step-4"]
    assert Checkpoint(run).progress.step == 4 and max(curve(run)) == 6


def train_where_torch_hides_that_the_disk_is_full(words: list[str]) -> None:
    import lomdm_dist.train.saver as saver

    def fails(*_):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    saver.Saver._write_pieces, saver.is_full = fails, lambda path: True
    command_line(words)


def test_a_full_disk_is_called_that_and_each_failure_is_said_once(base, tmp_path):
    words = ["train", "--config", "configs/demo.yaml", *base, f"train.run={tmp_path / 'run'}"]
    words += ["train.steps=4", "train.save_every=2"]
    ((status, text),) = ends_of(1, tmp_path, train_where_torch_hides_that_the_disk_is_full, words)
    said = re.findall(r"cannot write checkpoint .*/(step-\d): No space left on device", text)
    assert (status, said) == (2, ["step-2", "step-4"]), text


def train_apart(overrides: list[str], folders: list[Path], meet: bool) -> str:
    """On hosts whose disks are not shared; `meet`: nobody looks at that before the first save."""
    os.chdir(folders[int(os.environ["RANK"])])
    inputs.APPEARS = 0.5
    if not meet:
        loop.check_together = lambda *_: None
    try:
        train(overrides)
    except UserError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("meet", [True, False])
def test_a_run_on_disks_of_each_host_is_refused_and_never_called_saved(meet, base, tmp_path):
    """Each rank would write its own pieces where no other rank, and no later run, finds them."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    said = on_processes(2, train_apart, [*base, "train.steps=2", "train.run=run"], folders, meet)
    expected = "rank 1 cannot see what rank 0 writes to train.run run" if meet else "is it a shared disk?"
    assert all(expected in text for text in said), said
    assert not list(tmp_path.rglob("latest"))


def test_ranks_that_found_different_things_are_refused(base, tiny_data, tmp_path):
    """Host b has an older state of the run, or other data of the same kind."""
    folders = [tmp_path / "a", tmp_path / "b"]
    options = [*base, "train.steps=4", "train.run=run"]
    for folder, steps in zip(folders, (2, 1), strict=True):
        folder.mkdir()
        on_processes(1, train_in, folder, [*options, f"train.steps={steps}"])
    said = on_processes(2, train_apart, options, folders, True)
    assert all("rank 1 found another checkpoint to resume from than rank 0" in text for text in said), said
    for folder, split in zip(folders, ("train", "valid"), strict=True):
        (folder / "data").symlink_to(tiny_data / split)
    options = [*options, "train.run=new", "data.train=data"]
    said = on_processes(2, train_apart, options, folders, True)
    assert all("rank 1 found another training data than rank 0" in text for text in said), said


def train_in(folder: Path, overrides: list[str]) -> None:
    os.chdir(folder)
    train(overrides)


class Killed(BaseException):
    pass


def test_latest_names_a_whole_checkpoint_at_every_moment_of_saving_a_step_again(trained_run, tmp_path):
    """Killed before each call to the file system, one after the other, and gone on from what was left."""
    for stop_at in range(100):
        run = tmp_path / str(stop_at)
        step = run / "checkpoints/step-8"
        shutil.copytree(trained_run.run, run)
        shutil.copytree(step, step.with_name(".step-8.partial"))
        left = iter(range(stop_at))

        def counted(plain, left=left):
            def call(*arguments, **named):
                if next(left, None) is None:
                    raise Killed
                return plain(*arguments, **named)

            return call

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "rename", counted(Path.rename))
            patch.setattr(saver, "write_atomically", counted(saver.write_atomically))
            patch.setattr(os, "link", counted(os.link))
            patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
            try:
                saver.publish(step.with_name(".step-8.partial"), step, run / "latest")
                break
            except Killed:
                pass
        assert Checkpoint(run).progress.step == 8, f"killed before call {stop_at}"
    assert stop_at > 8 and (run / "latest").read_text() == "step-8\n"
    assert os.listdir(run / "checkpoints") == ["step-8"]


def test_what_cannot_be_dropped_stays_and_is_said(trained_run, tmp_path):
    checkpoints = tmp_path / "run/checkpoints"
    shutil.copytree(trained_run.run, tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    for step in (2, 3, 4):
        shutil.copytree(checkpoints / "step-8", checkpoints / f"step-{step}")
    (checkpoints / "step-2").rename(elsewhere)
    (checkpoints / "step-2").symlink_to(elsewhere)
    (checkpoints / "step-1").write_text("a stray file")
    with pytest.MonkeyPatch.context() as patch:
        plain = shutil.rmtree

        def fails_for_3(path):
            if "step-3" in path.name:
                raise PermissionError(13, "Permission denied", str(path))
            plain(path)

        patch.setattr(shutil, "rmtree", fails_for_3)
        (problem,) = saver.drop_old(checkpoints / "step-8", 1)
    assert "step-3" in str(problem)
    assert sorted(os.listdir(checkpoints)) == [".step-3.gone.partial", "step-1", "step-2", "step-8"]


def test_checkpoints_without_latest_are_not_started_over(trained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run.run, run)
    (run / "latest").unlink()
    config = load_config(run / "config.yaml", [f"train.run={run}"])
    for resume in (None, "auto"):
        with pytest.raises(UserError, match="has checkpoints, but no file latest"):
            open_inputs(config, resume)
