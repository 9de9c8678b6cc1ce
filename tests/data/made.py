"""Shard folders made of plain numbers, for the tests of reading: row i holds i in every place."""

from pathlib import Path

import numpy as np

from lomdm_dist.data import shards
from lomdm_dist.data.shards import ShardWriter

VOCABULARY = 70_000
TOKENIZER = {
    "sha256": "x",
    "vocab_size": VOCABULARY,
    "eos_id": VOCABULARY - 2,
    "mask_id": VOCABULARY - 1,
    "pad_id": None,
}
FACTS = {
    "version": "test",
    "recipe": "text",
    "split": "train",
    "official_split": "train",
    "packing": "packed",
    "tokenizer": TOKENIZER,
    "tokenizer_files": [],
    "tokens": 0,
    "documents": 1,
    "dropped_documents": 0,
    "dropped_tokens": 0,
}


def write_shards(folder: Path, sizes: list[int], length: int = 4, first: int = 0, **facts) -> Path:
    """Shards of these sizes (one member each); the rows are numbered from `first` on."""
    writer = ShardWriter(folder, length, VOCABULARY)
    for size in sizes:
        writer._write(np.repeat(first + np.arange(size), length).reshape(size, length).astype(writer.dtype))
        first += size
    writer.close(**FACTS | facts)
    return folder


def small_members(monkeypatch, rows: int) -> None:
    """Members of so few rows that a test crosses their borders."""
    monkeypatch.setattr(shards, "SEQUENCES_A_MEMBER", rows)
