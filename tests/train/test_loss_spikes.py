"""A loss that jumps is said; one that falls, or is as noisy as it was, is not."""

import math
from collections import deque

import numpy as np
import pytest

from lomdm_dist.train.checkpoint import Progress
from lomdm_dist.train.loop import KNOWN_LOSSES, Run


class Said:
    def __init__(self):
        self.lines = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def run():
    run = object.__new__(Run)
    run.losses, run.spikes, run.reporter, run.progress = deque(maxlen=KNOWN_LOSSES), 0, Said(), Progress()
    return run


def test_a_falling_noisy_loss_is_no_spike_and_a_jump_is_one(run):
    noise = np.random.default_rng(0).normal(0, 0.1, 2000)
    for step in range(2000):
        run._note_loss(5 * math.exp(-step / 500) + 3 + noise[step])
    assert run.spikes == 0 and not run.reporter.lines
    run._note_loss(4.5)
    assert run.spikes == 1 and run.loss == 4.5
    (said,) = run.reporter.lines
    assert "jumps to 4.5000; the median of the 100 before it is 3.0" in said


def test_nothing_is_said_before_enough_is_known(run):
    for loss in [3.0] * (KNOWN_LOSSES - 1) + [50.0]:
        run._note_loss(loss)
    assert run.spikes == 0
