"""How fast sequences are read: this reader, a flat memory map, and the plain webdataset stream.

    python benchmarks/reader.py [--tokens 200_000_000] [--json FILE]

All read the same random tokens from the page cache of one machine in one run, the ways in turn, and the
median of the rounds is given with its spread. The floor is a random gather from one flat array: `take`
of numpy, and indexing as most trainers write it (`array[indices]`); both hand out uint16 as the reader
does. What each way does besides is in its name.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import webdataset

from lomdm_dist import machine
from lomdm_dist.data.reader import Reader
from lomdm_dist.data.shards import ShardSet, ShardWriter
from lomdm_dist.data.store import Access

VOCABULARY = 50_258
FACTS = {"sha256": "x", "vocab_size": VOCABULARY, "eos_id": 50_256, "mask_id": 50_257, "pad_id": None}
TOKENS_A_BATCH, ROUNDS, SECONDS = 2**19, 5, 1.5


def write(folder: Path, length: int, tokens: int) -> np.ndarray:
    """The same tokens as shards and as one flat file; returns the latter's memory map."""
    writer = ShardWriter(folder / "shards", length, VOCABULARY)
    draws, rows = np.random.default_rng(0), tokens // length
    flat = np.memmap(folder / "flat.bin", dtype="<u2", mode="w+", shape=(rows, length))
    for start in range(0, rows, 2**23 // length):
        block = draws.integers(0, 50_000, (min(2**23 // length, rows - start), length), dtype=np.uint16)
        flat[start : start + len(block)] = block
        writer.add(block)
    facts = {"recipe": "text", "split": "train", "official_split": "train", "packing": "packed"}
    counts = {"tokens": tokens, "documents": 1, "dropped_documents": 0, "dropped_tokens": 0}
    writer.close(version="benchmark", tokenizer=FACTS, tokenizer_files=[], **facts, **counts)
    flat.flush()
    return np.memmap(folder / "flat.bin", dtype="<u2", mode="r", shape=(rows, length))


def gathers(flat: np.ndarray, batch: int, how):
    """Batches of random rows, as `how` takes them out of the flat file."""
    draws = np.random.default_rng(1)
    for _ in itertools.count():
        yield how(flat, draws.integers(0, len(flat), batch))


def stream(folder: Path, batch: int, workers: int, **settings):
    reader = Reader([ShardSet(folder / "shards", Access("size"))], **settings)
    return (rows.ids for rows in reader.stream(0, batch, batch, workers))


def plain_webdataset(folder: Path, batch: int, shuffled: bool):
    """Its own reading and decoding of blocks of 256; shuffled: of single sequences, through its buffer."""
    tars = sorted(str(path) for path in (folder / "shards").glob("*.tar"))
    for _ in itertools.count():
        data = webdataset.WebDataset(tars, shardshuffle=len(tars) if shuffled else False).decode()
        if shuffled:
            singles = data.compose(_singles).shuffle(10_000)
            yield from singles.batched(batch, collation_fn=lambda rows: np.stack([r["row"] for r in rows]))
        else:
            yield from (sample["npy"] for sample in data)


def _singles(samples):
    for sample in samples:
        for number, row in enumerate(sample["npy"]):
            yield {"__key__": f"{sample['__key__']}/{number}", "row": row}


def ways(folder: Path, flat: np.ndarray, batch: int) -> dict:
    return {
        "flat memory map, take": gathers(flat, batch, lambda a, i: np.take(a, i, axis=0)),
        "flat memory map, array[indices]": gathers(flat, batch, lambda a, i: a[i]),
        "reader, no worker": stream(folder, batch, 0),
        "reader, 1 worker": stream(folder, batch, 1),
        "reader, 2 workers": stream(folder, batch, 2),
        "reader, no worker, window of 2 shards": stream(folder, batch, 0, window=2),
        "plain webdataset, in order, blocks of 256": plain_webdataset(folder, batch, shuffled=False),
        "plain webdataset, shuffled sequences": plain_webdataset(folder, batch, shuffled=True),
    }


def speed(stream, length: int) -> float:
    """Million tokens a second over SECONDS."""
    tokens, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < SECONDS:
        tokens += len(next(stream)) * length
    return tokens / passed / 1e6


def first_batch(folder: Path, batch: int, position: int) -> float:
    """Milliseconds to the first batch of a new reader at a position; the files are in the page cache."""
    reader = Reader([ShardSet(folder / "shards", Access("size"))])
    start = time.perf_counter()
    reader.read(position, batch)
    return 1e3 * (time.perf_counter() - start)


def measure(length: int, tokens: int) -> dict:
    batch, rows = TOKENS_A_BATCH // length, {}
    with tempfile.TemporaryDirectory() as folder:
        flat = write(Path(folder), length, tokens)
        streams = ways(Path(folder), flat, batch)
        for _ in range(ROUNDS):
            for name, way in streams.items():
                rows.setdefault(name, []).append(speed(way, length))
    return {"length": length, "batch": batch, "million_tokens_per_second": rows}


def first_batches() -> dict[int, list[float]]:
    """Of a set of 20 million short sequences: at its beginning, in the middle, and epochs later."""
    starts = {position: [] for position in (0, 10_000_000, 1_000_000_000)}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), 8, 20_000_000 * 8)
        for _ in range(15):
            for position, times in starts.items():
                times.append(first_batch(Path(folder), 512, position))
    return starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--json")
    options = parser.parse_args()
    results = []
    print(f"{machine.cpu()}, {os.cpu_count()} cores, {options.tokens:,} tokens\n")
    for length in (128, 1024):
        result = measure(length, options.tokens)
        results.append(result)
        speeds = {name: statistics.median(v) for name, v in result["million_tokens_per_second"].items()}
        floor = speeds["flat memory map, take"]
        print(f"length {length}, {result['batch']} sequences a batch\n")
        print("| | million tokens/s | range | of the floor |\n|---|---|---|---|")
        for name, values in result["million_tokens_per_second"].items():
            spread = f"{min(values):,.0f} .. {max(values):,.0f}"
            print(f"| {name} | {speeds[name]:,.0f} | {spread} | {speeds[name] / floor:.2f} |")
        print()
    starts = first_batches()
    print("first batch of 512, from 20 million sequences\n\n| at position | ms | quartiles |\n|---|---|---|")
    for position, times in starts.items():
        quartiles = statistics.quantiles(times, n=4)
        spread = f"{quartiles[0]:.2f} .. {quartiles[2]:.2f}"
        print(f"| {position:,} | {statistics.median(times):.2f} | {spread} |")
    machine.write_result(options.json, {"results": results, "first_batch_ms": starts}, {})


if __name__ == "__main__":
    main()
