"""A disk that is full, a folder that is gone or cannot be written, clocks that jump: nothing is lost."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from lomdm_dist.train.checkpoint import Checkpoint
from tests.distributed import grids
from tests.distributed.grids import ends_of, on_processes
from tests.distributed.runs import assert_same, curve

SAVES = ["train.steps=9", "train.save_every=3", "train.global_batch=8", "train.micro_batch=4"]
MIB = 2**20


def fill(folder: Path) -> None:
    """To the last byte."""
    with open(folder / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError:
            pass


def replace(folder: Path) -> None:
    """Nothing can be made in a folder that is a file."""
    shutil.rmtree(folder / "run/checkpoints")
    (folder / "run/checkpoints").write_text("")


TROUBLES = {
    # what happens to the folder that holds the run, how it ends, what a save then says
    "full": (fill, lambda folder: (folder / "ballast").unlink(), "No space left on device"),
    "no folder": (replace, lambda folder: (folder / "run/checkpoints").unlink(), "Not a directory"),
    "run deleted": (lambda folder: shutil.rmtree(folder / "run"), lambda _: None, None),
}


def train(overrides: list[str], folder: Path, trouble: str, lasts: int) -> None:
    """The trouble begins before the save of step 6, and ends `lasts` steps later."""
    from lomdm_dist.config import load_config
    from lomdm_dist.parallel.grid import rank
    from lomdm_dist.train import loop

    begin, end, _ = TROUBLES[trouble]
    plain = loop.Run.step

    def step(run, number):
        if number in (5, 5 + lasts):
            run.saver._last.exception()  # the save before this is over
            run.grid.all_agree(True)
            if rank() == 0:
                (begin if number == 5 else end)(folder)
            run.grid.all_agree(True)
        return plain(run, number)

    loop.Run.step = step
    loop.train(load_config(grids.ROOT / "configs/demo.yaml", overrides), resume="auto")


@pytest.fixture
def small_disk(tmp_path):
    """Of 12 MiB, with room for two checkpoints of 3.5 MiB and another on its way."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={12 * MIB}", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_training_goes_on(trouble, base, small_disk, tmp_path):
    run = small_disk / "run"
    options = [*base, *SAVES, f"train.run={run}"]
    ends = ends_of(2, tmp_path, train, options, small_disk, trouble, 2)
    assert [status for status, _ in ends] == [0, 0], ends
    said, losses = ends[0][1], curve(run)
    reason = TROUBLES[trouble][2]
    if reason:
        assert f"error: cannot write checkpoint {run / 'checkpoints/step-6'}: " in said and reason in said
    assert ("cannot write" in said and "training goes on, lines wait in memory" in said) == (
        trouble == "full"
    )
    if trouble == "run deleted":
        assert "metrics.jsonl was deleted: it begins anew" in said
        assert list(losses) == [6, 7, 8, 9] and sorted(os.listdir(run / "checkpoints")) == [
            "step-6",
            "step-9",
        ]
    else:
        assert list(losses) == list(range(1, 10)), "the lines that waited were written"
    assert Checkpoint(run).progress.step == 9 and Checkpoint(run).build_model()


def test_training_stops_where_the_config_says_so(base, small_disk, tmp_path):
    run = small_disk / "run"
    options = [*base, *SAVES, f"train.run={run}", "faults.on_failed_save=stop", "train.steps=100"]
    ends = ends_of(2, tmp_path, train, options, small_disk, "full", 1000)
    assert [status for status, _ in ends] == [2, 2], ends
    assert f"error: cannot write checkpoint {run / 'checkpoints/step-6'}: " in ends[0][1]
    assert "step 100/100" not in ends[0][1], "it stopped when the save had failed"
    assert (run / "latest").read_text() == "step-3\n" and os.listdir(run / "checkpoints") == ["step-3"]
    assert Checkpoint(run).progress.step == 3 and Checkpoint(run).build_model()
    (small_disk / "ballast").unlink()
    on_processes(1, grids.train, [*base, *SAVES, f"train.run={run}"])
    assert list(curve(run)) == list(range(1, 10))


def train_where_no_save_can_be_written(overrides: list[str]) -> None:
    """Each fails while training already waits for it to end: with the next one due."""
    from lomdm_dist.train import saver

    def fails(*_):
        time.sleep(2)
        raise OSError(28, "No space left on device")

    saver.Saver._write_pieces = fails
    grids.train(overrides)


def test_a_save_that_fails_while_the_next_one_waits_stops_training_too(base, tmp_path):
    run = tmp_path / "run"
    options = [*base, *SAVES, f"train.run={run}", "faults.on_failed_save=stop", "train.save_every=1"]
    ends = ends_of(2, tmp_path, train_where_no_save_can_be_written, options)
    assert [status for status, _ in ends] == [2, 2], ends
    assert ends[0][1].count(f"error: cannot write checkpoint {run / 'checkpoints/step-1'}: ") >= 1
    assert "checkpoints/step-2" not in ends[0][1], "it did not go on to lose more"


def train_on_a_slow_disk(overrides: list[str]) -> None:
    from lomdm_dist.train import saver

    saver.PATIENCE, plain = 0.2, saver.Saver._write_pieces

    def slowly(*arguments):
        time.sleep(0.5)
        plain(*arguments)

    saver.Saver._write_pieces = slowly
    grids.train(overrides)


def test_a_slow_disk_is_said_and_waited_for(base, tmp_path):
    run = tmp_path / "run"
    options = [*base, *SAVES, "train.save_every=1", "faults.hang_seconds=1", f"train.run={run}"]
    ends = ends_of(2, tmp_path, train_on_a_slow_disk, options)
    assert [status for status, _ in ends] == [0, 0], ends
    assert "the save before this one is not yet written: training has waited for 0 s" in ends[0][1]
    assert Checkpoint(run).progress.step == 9 and list(curve(run)) == list(range(1, 10))


def train_with_another_clock(overrides: list[str]) -> None:
    real = time.time
    time.time = lambda: 2e9 - real()  # it runs backwards
    grids.train(overrides)


def test_clocks_do_not_matter(base, tmp_path):
    """Files of tomorrow and of long ago, and a clock that runs backwards."""
    options = [*base, *SAVES]
    on_processes(1, grids.train, [*options, f"train.run={tmp_path / 'a'}"])
    run = tmp_path / "b"
    on_processes(1, grids.train, [*options, f"train.run={run}"], 6)
    for number, path in enumerate(sorted(run.rglob("*"))):
        os.utime(path, (time.time() + 86_400, time.time() + 86_400) if number % 2 else (1, 1))
    on_processes(1, train_with_another_clock, [*options, f"train.run={run}"])
    assert_same(curve(run), curve(tmp_path / "a"), range(1, 10), 1e-6)
