"""What a rank reads of each step's global batch, ahead of the step.

The global batch of step s is the positions s * B .. s * B + B - 1 of the order, whose only state is
the position; rank r of n takes the r-th of n equal parts. No rank waits for another, and an epoch's end
is a place like any other.
"""

import contextlib
import hashlib
import itertools
import json
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lomdm_dist.config import DataConfig
from lomdm_dist.data.order import Order, SourceOrder
from lomdm_dist.data.shards import BadShard, ShardSet
from lomdm_dist.data.store import Access
from lomdm_dist.errors import UserError

READ_AHEAD = 2  # steps that each worker has in hand
FETCHING_THREADS = 4
CPU = torch.device("cpu")


def access_of(data: DataConfig) -> Access:
    """How the config's shards are reached."""
    cache = Path(os.path.expanduser(data.cache)) if data.cache else None
    return Access(data.verify, cache, int(data.cache_gib * 2**30))


def open_reader(data: DataConfig, seed: int) -> "Reader":
    """The training stream that a config asks for. Raises UserError."""
    access = access_of(data)
    return Reader(
        [ShardSet(source.path, access) for source in data.train],
        [source.weight for source in data.train],
        seed,
        data.window,
        data.on_bad_shard,
    )


class Rows(NamedTuple):
    """Sequences as they are stored, and how many of them stand in for some of bad shards."""

    ids: Tensor  # [n, length], uint16 or uint32
    replaced: int


class Reader:
    """Several sources of sequences as one endless stream, read at any position. Raises UserError.

    seed, window   of the order (lomdm_dist.data.order)
    on_bad_shard   error: raise; skip: other sequences of the source, drawn by the position, take the
                   place of those that a bad shard held
    """

    def __init__(
        self,
        sources: list[ShardSet],
        weights: list[float] | None = None,
        seed: int = 0,
        window: int | None = None,
        on_bad_shard: str = "error",
    ):
        self.sources, self.on_bad_shard = sources, on_bad_shard
        self.weights = weights or [1.0] * len(sources)
        self.seed = seed
        check_alike(sources)
        orders = [
            SourceOrder([shard.sequences for shard in source.manifest.shards], seed, window, number)
            for number, source in enumerate(sources)
        ]
        _check_cache(sources, orders)
        self.order = Order(orders, self.weights)
        self.bad: list[dict[int, str]] = [{} for _ in sources]  # shards that are left out, and why
        self.messages: list[str] = []  # for the user to read: what is being fetched
        self._fetched: dict[int, dict[int, None]] = {}  # by source: shards on their way, in order

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    @property
    def first(self) -> ShardSet:
        """One source, for what all have in common: tokenizer, packing, length."""
        return self.sources[0]

    def identity(self) -> str:
        """A hash of what this stream consists of: equal for equal sequences in equal order."""
        if len(self.sources) == 1 and self.order.sources[0].is_whole:
            return self.first.manifest.identity
        total = sum(Fraction(str(weight)) for weight in self.weights)
        parts = [
            [
                source.manifest.identity,
                str(Fraction(str(weight)) / total),
                None if order.is_whole else [order.window, *map(int, order.shard_sizes)],
            ]
            for source, weight, order in zip(self.sources, self.weights, self.order.sources, strict=True)
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def epochs(self, position: int) -> list[float]:
        """How often each source has been gone through before `position`."""
        drawn = self.order.drawn(position)
        return [n / source.size for n, source in zip(drawn, self.order.sources, strict=True)]

    def check(self, share: int = 0, of: int = 1) -> None:
        """Look at every file, and read every `of`-th shard once. Raises UserError, or notes bad shards.

        Remote shards are checked as they come.
        """
        for number, source in enumerate(self.sources):
            if self.on_bad_shard == "error":
                source.check_extra()
            for error in source.check(share, of):
                self._note(number, error)

    def read(self, first: int, count: int) -> Rows:
        """The sequences at positions first .. first + count - 1."""
        self._fetch_ahead(first + count - 1)
        sources, indices = self.order.at(first, count)
        if len(self.sources) == 1:
            out, replaced = self._rows(0, first + np.arange(count), indices)
            return Rows(torch.from_numpy(out), replaced)
        out, replaced = np.empty((count, self.first.length), dtype=self.first.dtype), 0
        for number in range(len(self.sources)):
            here = np.flatnonzero(sources == number)
            out[here], n = self._rows(number, first + here, indices[here])
            replaced += n
        return Rows(torch.from_numpy(out), replaced)

    def stream(
        self,
        position: int,
        every: int,
        count: int,
        workers: int,
        device: torch.device = CPU,
        waiting: Callable[[], None] = lambda: None,
    ) -> Iterator[Rows]:
        """`count` sequences from `position` on, then from `position + every`, and so on without end.

        `workers` threads read ahead, in order; with none the caller reads. Threads suffice: what takes
        time here (copying, checksums, the network) runs without Python's lock. For a GPU the rows lie
        in pinned memory. While they are awaited, `waiting` is called every second, and may raise.
        """
        starts = itertools.count(position, every)

        def read() -> Callable[[], Rows]:
            start = next(starts)
            return lambda: self._pinned(self.read(start, count), device)

        if not workers:
            while True:
                yield read()()
        tasks = queue.SimpleQueue()
        for _ in range(workers):  # daemons: a download that hangs must not hold up the end of the process
            threading.Thread(target=_work, args=(tasks, device), daemon=True, name="reader").start()
        ahead = deque(_submit(tasks, read()) for _ in range(READ_AHEAD * workers))
        try:
            while True:
                rows = _result(ahead.popleft(), waiting)
                ahead.append(_submit(tasks, read()))
                yield rows
        finally:
            for future in ahead:
                future.cancel()
            for _ in range(workers):
                tasks.put(None)

    @staticmethod
    def _pinned(rows: Rows, device: torch.device) -> Rows:
        return rows._replace(ids=rows.ids.pin_memory()) if device.type == "cuda" else rows

    def _rows(self, number: int, positions: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, int]:
        """Sequences of a source; where a shard is bad, others."""
        source = self.sources[number]
        while True:
            wanted, replaced = self._avoid_bad(number, positions, indices)
            try:
                return source.rows(wanted), replaced
            except BadShard as error:
                self._note(number, error)

    def _avoid_bad(self, number: int, positions: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, int]:
        bad = self.bad[number]
        if not bad:
            return indices, 0
        source = self.sources[number]
        indices, outside = indices.copy(), list(bad)
        lost = np.flatnonzero(np.isin(source.shard_of(indices), outside))
        for place in lost:
            draws = np.random.default_rng([self.seed, number, int(positions[place])])
            while source.shard_of(indices[place]) in bad:
                indices[place] = draws.integers(len(source))
        return indices, len(lost)

    def _note(self, number: int, error: BadShard) -> None:
        if self.on_bad_shard == "error":
            raise error
        source, bad = self.sources[number], self.bad[number]
        bad[error.number] = str(error)
        if len(bad) == len(source.manifest.shards):
            raise UserError(f"no shard of {source} can be used; the last one: {error}")

    def _fetch_ahead(self, position: int) -> None:
        """Bring the shards of this window and of the next into the cache, in the background."""
        for number, (source, drawn) in enumerate(zip(self.sources, self.order.drawn(position), strict=True)):
            if source.store.remote:
                ahead = self.order.sources[number].shards_ahead(drawn).tolist()
                known = self._fetched.get(number, {})
                if ahead == list(known):
                    continue
                self._fetched[number] = dict.fromkeys(ahead)
                missing = [s for s in ahead if s not in known and not source.is_cached(s)]
                gib = sum(source.manifest.shards[s].bytes for s in missing) / 2**30
                if missing and not known:
                    self.messages.append(f"fetching {len(missing)} shards ({gib:.3g} GiB) of {source}")
                _fetch_in_background(source, missing)


def _fetch_in_background(source: ShardSet, shards: list[int]) -> None:
    """What fails here is told when the shard is read."""
    left = deque(shards)

    def fetch() -> None:
        with contextlib.suppress(IndexError):
            while True:
                with contextlib.suppress(UserError, OSError):
                    source.fetch(left.popleft())

    for _ in range(min(FETCHING_THREADS, len(shards))):
        threading.Thread(target=fetch, daemon=True, name="fetch").start()


def _submit(tasks: queue.SimpleQueue, task: Callable[[], Rows]) -> Future:
    future = Future()
    tasks.put((future, task))
    return future


def _work(tasks: queue.SimpleQueue, device: torch.device) -> None:
    """A reader thread: tasks one after the other, until None."""
    if device.type == "cuda":  # a thread that pins memory without it would open a context on the first GPU
        torch.cuda.set_device(device)
    while (item := tasks.get()) is not None:
        future, task = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)


def _result(future: Future, waiting: Callable[[], None]) -> Rows:
    while True:
        try:
            return future.result(timeout=1)
        except TimeoutError:
            if future.done():  # then the error is the task's own
                raise
            waiting()


def check_alike(sources: list[ShardSet]) -> None:
    """Sources that are mixed must be made alike. UserError."""
    first = sources[0]
    for other in sources[1:]:
        if other.tokenizer != first.tokenizer:
            raise UserError(f"{first} and {other} were made with different tokenizers")
        if other.length != first.length:
            raise UserError(f"{first} has sequences of {first.length} tokens, {other} of {other.length}")
        if other.manifest.packing != first.manifest.packing:
            raise UserError(f"{first} is {first.manifest.packing}, {other} is {other.manifest.packing}")


def _check_cache(sources: list[ShardSet], orders: list[SourceOrder]) -> None:
    """Remote shards must fit the cache: those of one window, and of the next. UserError."""
    need, least = 0, None
    for source, order in zip(sources, orders, strict=True):
        if source.store.remote:
            sizes = sorted((shard.bytes for shard in source.manifest.shards), reverse=True)
            need += sum(sizes[: None if order.is_whole else 2 * order.window])
            least = (least or 0) + sizes[0]
    room = sources[0].access.cache_bytes
    if need > room:
        fits = room // (2 * least)
        smaller = f"set data.window to {fits} shards or fewer, or " if fits else ""
        raise UserError(
            f"the remote shards that are mixed at one time take {need / 2**30:.3g} GiB, data.cache_gib is "
            f"{room / 2**30:.3g}: {smaller}make the cache larger"
        )
