"""Text -> token ids in processes of their own. Imports little: each worker starts with this file.

A worker gets batches of texts and gives back one array of ids a batch, in the shards' dtype, EOS after
each document. It encodes on one thread; the number of workers is the number of threads.
"""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice

import numpy as np
import tokenizers

BATCHES_A_WORKER = 3  # in flight: one at work, one waiting, one on its way back
BEGINNING = 40  # letters of a document in a message


@dataclass(frozen=True)
class Encoding:
    """How a worker encodes. `never` names the ids that no text may contain."""

    tokenizer: str  # as JSON
    dtype: np.dtype
    eos_id: int
    never: dict[str, int]
    valid_fraction: float | None = None  # None: documents are not told apart by their hash


@dataclass(frozen=True)
class Encoded:
    """A batch: ids of all documents in a row, the length of each, EOS included, which are validation."""

    ids: np.ndarray
    lengths: np.ndarray
    valid: np.ndarray | None
    refused: tuple[int, str, str] | None  # document of the batch, name of the id it holds, its beginning


def in_valid(text: str, fraction: float) -> bool:
    """Whether a document belongs to validation: by its own hash, so equal texts never straddle."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def available_cores() -> int:
    """Those this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_plainly(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Set it to encode whole texts as they stand: one that spells a special token is text."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode_in_order(batches: Iterable[tuple], encoding: Encoding, workers: int) -> Iterator[tuple]:
    """(key, Encoded) of each batch (key, texts), in order. ChildProcessError where a worker dies."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoding,))
    batches, flying = iter(batches), []
    try:
        while True:
            for key, texts in islice(batches, workers * BATCHES_A_WORKER - len(flying)):
                flying.append((key, pool.submit(_encode, texts)))
            if not flying:
                return
            key, future = flying.pop(0)
            yield key, future.result()
    except BrokenProcessPool:
        raise ChildProcessError(
            "an encoding worker died (killed from outside, or for want of memory: fewer --workers need less)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(encoding: Encoding) -> None:
    global _tokenizer, _encoding
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the work, in order
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # One thread of the library's own pool: measured a quarter faster than its encoding on this thread.
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "1"}
    _encoding = encoding
    _tokenizer = read_plainly(tokenizers.Tokenizer.from_str(encoding.tokenizer))


def _die_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode(texts: list[str]) -> Encoded:
    found = _tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    lengths = np.array([len(one) + 1 for one in found])
    ids = np.full(lengths.sum(), _encoding.eos_id, _encoding.dtype)
    ends = np.cumsum(lengths)
    for one, end, length in zip(found, ends, lengths, strict=True):
        ids[end - length : end - 1] = one.ids
    fraction = _encoding.valid_fraction
    valid = None if fraction is None else np.array([in_valid(text, fraction) for text in texts])
    return Encoded(ids, lengths, valid, _refused(texts, ids, ends))


def _refused(texts: list[str], ids: np.ndarray, ends: np.ndarray) -> tuple[int, str, str] | None:
    """The first document that holds an id which is never text."""
    for name, token in _encoding.never.items():
        places = np.flatnonzero(ids == token)
        if token == _encoding.eos_id:
            places = np.setdiff1d(places, ends - 1, assume_unique=True)
        if len(places):
            number = int(np.searchsorted(ends, places[0], side="right"))
            return number, name, texts[number][:BEGINNING]
    return None
