"""Which sequence comes when: a function of (seed, epoch, position), computed where it is asked for.

Nothing is walked through and nothing is kept: position ten million costs what position 0 costs.
"""

from fractions import Fraction
from functools import lru_cache

import numpy as np

ROUNDS = 8
SMALL = 256  # sets up to this size are permuted as a list
CHUNK = 2**16  # positions computed at once, which costs less for each
EPOCHS_A_CHUNK = 64
LARGEST_DENOMINATOR = 10**6  # of a weight, so that position * numerator stays inside int64


def shuffled(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of 0 .. size - 1, taken at `positions`: int64 [n] -> int64 [n].

    A Feistel network permutes the pairs (left, right), left * 2**bits + right, of a rectangle that
    holds little more than `size`; where it leaves the range it is applied again, which closes the
    permutation (cycle walking). keys: uint32 [rounds, 2].
    """
    if size <= SMALL:  # the halves would be so small that not all permutations are equally likely
        return np.random.default_rng(keys.ravel()).permutation(size)[positions]
    bits = (size - 1).bit_length() // 2
    height = -(-size >> bits)
    out = _feistel(positions, bits, height, keys)
    while len(outside := np.flatnonzero(out >= size)):
        out[outside] = _feistel(out[outside], bits, height, keys)
    return out


def _feistel(numbers: np.ndarray, bits: int, height: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of 0 .. height * 2**bits - 1: each half in turn is moved by a hash of the other.

    The hash is the upper bits of x * odd key + key, mod 2**32, with other keys in each round.
    """
    left, right = (numbers >> bits).astype(np.uint32), (numbers & ((1 << bits) - 1)).astype(np.uint32)
    height, shifts = np.uint32(height), [np.uint32(32 - b) for b in (int(height - 1).bit_length(), bits)]
    for i, (multiplier, offset) in enumerate(keys):
        hashed = (left if i % 2 else right) * (multiplier | np.uint32(1))
        hashed += offset
        hashed >>= shifts[i % 2]
        if i % 2:
            right ^= hashed
        else:
            left += hashed
            left -= left // height * height
    return (left.astype(np.int64) << bits) | right


def _keys(*words: int) -> np.ndarray:
    return np.random.SeedSequence(words).generate_state(2 * ROUNDS, np.uint32).reshape(ROUNDS, 2)


class SourceOrder:
    """One source, endlessly: epoch after epoch, each a permutation of all its sequences.

    With a `window` the shards are shuffled, and the sequences of each `window` shards among
    themselves: what is read at one time lies in that many shards. Without, all is one window, and the
    order does not depend on how the sequences are cut into shards.
    """

    def __init__(self, shard_sizes: list[int], seed: int, window: int | None = None, source: int = 0):
        self.shard_sizes = np.asarray(shard_sizes, dtype=np.int64)
        self.size = int(self.shard_sizes.sum())
        self.seed, self.source = seed, source
        self.window = window if window and window < len(self.shard_sizes) else len(self.shard_sizes)
        self._first = np.cumsum(self.shard_sizes) - self.shard_sizes  # index of each shard's first sequence

    @property
    def is_whole(self) -> bool:
        """Whether one window holds all."""
        return self.window == len(self.shard_sizes)

    def at(self, first: int, count: int) -> np.ndarray:
        """Indices of the sequences at positions first .. first + count - 1 of the stream, [count]."""
        parts, last = [np.empty(0, dtype=np.int64)], first + count
        while first < last:
            epoch, window, start, end = self._place(first)
            inside = np.arange(first - start, min(last, end) - start)
            keys = _keys(self.seed, self.source, epoch, window)
            parts.append(self._index(self._shards(epoch, window), shuffled(inside, end - start, keys)))
            first = min(last, end)
        return np.concatenate(parts) if len(parts) > 2 else parts[-1]

    def shards_ahead(self, position: int) -> np.ndarray:
        """Numbers of the shards in the window that `position` lies in, and in the next."""
        epoch, window, _, end = self._place(position)
        here = self._shards(epoch, window)
        if self.is_whole:
            return here
        following = self._shards(*self._place(end)[:2])
        return np.concatenate([here, following[~np.isin(following, here)]])

    def _place(self, position: int) -> tuple[int, int, int, int]:
        """The epoch and the window that a position lies in, and where that window starts and ends."""
        epoch, inside = divmod(position, self.size)
        ends = _window_ends(self, epoch)
        window = int(np.searchsorted(ends, inside, side="right"))
        start = int(ends[window - 1]) if window else 0
        return epoch, window, epoch * self.size + start, epoch * self.size + int(ends[window])

    def _shards(self, epoch: int, window: int) -> np.ndarray:
        return _shard_order(self, epoch)[window * self.window : (window + 1) * self.window]

    def _index(self, shards: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """The numbers of those sequences that are `inside`, counted through `shards` one after the other."""
        if len(shards) == len(self.shard_sizes):
            return inside
        ends = np.cumsum(self.shard_sizes[shards])
        number = np.searchsorted(ends, inside, side="right")
        return inside - (ends - self.shard_sizes[shards])[number] + self._first[shards[number]]


@lru_cache(maxsize=64)
def _shard_order(order: SourceOrder, epoch: int) -> np.ndarray:
    count = len(order.shard_sizes)
    if order.is_whole:
        return np.arange(count)
    return np.random.default_rng([order.seed, order.source, epoch]).permutation(count)


@lru_cache(maxsize=64)
def _window_ends(order: SourceOrder, epoch: int) -> np.ndarray:
    """Positions in the epoch at which its windows end."""
    ends = np.cumsum(order.shard_sizes[_shard_order(order, epoch)])
    last = np.minimum(np.arange(order.window, len(ends) + order.window, order.window), len(ends)) - 1
    return ends[last]


class Order:
    """Several sources in exact proportion to their weights: position -> (source, index in it).

    After n positions, source k has been drawn n w_k times, rounded down: the first against the rest,
    the second against the rest of that, and so on, each rounding adding less than 1. Each source goes
    through its own epochs.
    """

    def __init__(self, sources: list[SourceOrder], weights: list[float]):
        self.sources = sources
        exact = [Fraction(str(w)).limit_denominator(LARGEST_DENOMINATOR) for w in weights]
        self._shares = [w / sum(exact[k:]) for k, w in enumerate(exact[:-1])]
        self._shares = [s.limit_denominator(LARGEST_DENOMINATOR) for s in self._shares]
        self._chunk = lru_cache(maxsize=4)(self._compute)
        shares = [weight / sum(weights) for weight in weights]
        longest = min(source.size / share for source, share in zip(sources, shares, strict=True))
        self._chunk_size = int(min(CHUNK, max(SMALL, EPOCHS_A_CHUNK * longest)))

    def at(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources and indices at positions first .. first + count - 1, each int64 [count]."""
        size = self._chunk_size
        chunks = range(first // size, (first + count - 1) // size + 1)
        parts = [self._chunk(chunk) for chunk in chunks]
        start = first - chunks[0] * size
        # of one chunk, which is the rule, nothing is copied
        sources, indices = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        return sources[start : start + count], indices[start : start + count]

    def _compute(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources and indices of a chunk of positions."""
        first, count = chunk * self._chunk_size, self._chunk_size
        if len(self.sources) == 1:
            return np.zeros(count, dtype=np.int64), self.sources[0].at(first, count)
        sources, indices = self._draw(first, count), np.empty(count, dtype=np.int64)
        for k, (source, before) in enumerate(zip(self.sources, self.drawn(first), strict=True)):
            here = np.flatnonzero(sources == k)
            indices[here] = source.at(before, len(here))
        return sources, indices

    def _draw(self, first: int, count: int) -> np.ndarray:
        """The source at each position."""
        left, undecided = np.arange(first, first + count), np.arange(count)
        sources = np.full(count, len(self.sources) - 1)
        for k, share in enumerate(self._shares):
            before, after = (n * share.numerator // share.denominator for n in (left, left + 1))
            sources[undecided[after > before]] = k
            undecided, left = undecided[after == before], (left - before)[after == before]
        return sources

    def drawn(self, position: int) -> list[int]:
        """How many sequences of each source stand before `position`."""
        counts, left = [], position
        for share in self._shares:
            counts.append(left * share.numerator // share.denominator)
            left -= counts[-1]
        return [*counts, left]
