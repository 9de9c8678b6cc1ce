"""Which sequence comes when: a function of (seed, position) and of nothing else."""

import numpy as np


class ShuffledOrder:
    """An endless stream of indices: epoch after epoch, each a permutation of 0 .. size - 1.

    The state of a reader is the position alone. An epoch whose end does not fill a global batch
    flows on into the next.
    """

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def at(self, first: int, count: int) -> np.ndarray:
        """Indices at positions first .. first + count - 1 of the stream, [count]."""
        positions = np.arange(first, first + count)
        out = np.empty(count, dtype=np.int64)
        for epoch in np.unique(positions // self.size):
            here = positions // self.size == epoch
            out[here] = self._epoch_order(int(epoch))[positions[here] % self.size]
        return out

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        return self._permutation
