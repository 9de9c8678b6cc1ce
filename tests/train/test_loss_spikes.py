"""A loss that jumps is said; one that falls, or is as noisy as it was, is not."""

import math

import numpy as np
import pytest

from lomdm_dist.config import FaultsConfig
from lomdm_dist.train.bad_steps import KNOWN_LOSSES, Health


@pytest.fixture
def health():
    return Health(FaultsConfig())


def test_a_falling_noisy_loss_is_no_spike_and_a_jump_is_one(health):
    noise = np.random.default_rng(0).normal(0, 0.1, 2000)
    for step in range(2000):
        assert health.good(step, 5 * math.exp(-step / 500) + 3 + noise[step]) is None
    assert "jumps to 4.5000; the median of the 100 before it is 3.0" in health.good(2000, 4.5)
    assert health.spikes == 1 and health.loss == 4.5


def test_nothing_is_said_before_enough_is_known(health):
    for loss in [3.0] * (KNOWN_LOSSES - 1) + [50.0]:
        assert health.good(1, loss) is None
    assert health.spikes == 0
