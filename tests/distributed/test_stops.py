"""Asked to stop, a run ends with the step that it is in, saved, with status 75."""

import os
import signal

import pytest

from lomdm_dist.train.checkpoint import Checkpoint
from tests.distributed import grids
from tests.distributed.grids import ends_of
from tests.distributed.runs import curve

STEP = 4


def train(overrides: list[str], how: str) -> None:
    """One rank is told in the middle of a step: the last one by a signal, or the first finds a file."""
    from lomdm_dist.config import load_config
    from lomdm_dist.errors import REQUEUE, StoppedOnRequest
    from lomdm_dist.parallel.grid import rank
    from lomdm_dist.train import gradients, loop, stop

    plain, stop.LOOK_SECONDS = gradients.backpropagate, 0.0
    config = load_config(grids.ROOT / "configs/demo.yaml", overrides)
    calls = [0]

    def backpropagate(*arguments):
        calls[0] += 1
        if how != "nothing" and calls[0] == 2 * STEP and rank() == 2:  # two micro-batches a step
            if how == "file":
                (config.train.run / "stop").touch()
            else:
                os.kill(os.getpid(), getattr(signal, how))
        return plain(*arguments)

    gradients.backpropagate = backpropagate
    try:
        loop.train(config)
    except StoppedOnRequest:
        os._exit(REQUEUE)


def test_a_file_from_before_the_start_counts(base, tmp_path):
    """It may have been made while the job was waiting in a queue."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "stop").touch()
    options = [*base, "train.steps=100000", f"train.run={run}"]
    assert [status for status, _ in ends_of(2, tmp_path, train, options, "nothing")] == [75] * 2
    assert Checkpoint(run).progress.step == 1 and not (run / "stop").exists()


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.slow), "file"])
def test_the_step_is_finished_and_saved(how, base, tmp_path):
    run = tmp_path / "run"
    options = [
        *base,
        "train.global_batch=24",
        "train.micro_batch=4",
        "train.steps=100000",
        f"train.run={run}",
    ]
    ends = ends_of(3, tmp_path, train, options, how)
    assert [status for status, _ in ends] == [75] * 3, ends
    assert list(curve(run)) in ([1, 2, 3, 4], [1, 2, 3, 4, 5] if how == "file" else [])
    assert Checkpoint(run).progress.step == max(curve(run))
    assert not (run / "stop").exists(), "the next run is not stopped by it"
