"""Noise that depends on what it is for, and on nothing else.

A counter-based generator (Philox) is keyed by the seed and the purpose, and counted by the step
and the index of the sequence in the global batch. So the noise of a sequence is the same on any
grid of processes, with any micro-batch, and after any resume.
"""

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class Purpose(IntEnum):
    """Keeps the streams of one seed apart."""

    TRAIN = 0
    EVALUATE = 1
    SAMPLE = 2
    PERMUTATION = 3
    STRATA = 4
    DROPOUT = 5


def keyed_generator(seed: int, purpose: int, step: int, index: int) -> np.random.Generator:
    """The generator of one (seed, purpose, step, index); its first 2**64 blocks are its own."""
    key = np.array([seed, purpose], dtype=np.uint64)  # of a list, numpy would make float64
    return np.random.Generator(np.random.Philox(key=key, counter=[0, step, index, 0]))


def keyed_uniforms(seed: int, purpose: int, step: int, indices: Iterable[int], count: int) -> Tensor:
    """Uniforms in [0, 1), one row an index: [len(indices), count], float64, on the CPU."""
    rows = [keyed_generator(seed, purpose, step, int(index)).random(count) for index in indices]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, count, dtype=torch.float64)


def keyed_integers(seed: int, purpose: int, step: int, indices: Iterable[int], count: int) -> Tensor:
    """The same of integers in [0, 2**63): int64."""
    rows = [
        keyed_generator(seed, purpose, step, int(index)).integers(2**63 - 1, size=count) for index in indices
    ]
    return torch.from_numpy(np.stack(rows))
