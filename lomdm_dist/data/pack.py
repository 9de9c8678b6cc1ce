"""Encoded documents -> shards of sequences, in a way that can be stopped anywhere and gone on with."""

import io
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lomdm_dist import __version__
from lomdm_dist.data.encode import Encoded
from lomdm_dist.data.shards import Shard, ShardWriter, TokenizerFacts
from lomdm_dist.errors import UserError
from lomdm_dist.files import sha256, write_atomically

STATE = ".state.npz"


class DamagedWork(UserError):
    """An unfinished folder that cannot be gone on with."""


class Work:
    """The shards of all splits, and how far they are: taken up from the folder's state if it has one."""

    def __init__(
        self,
        folder: Path,
        splits: Iterable[str],
        length: int,
        packing: str,
        shard_mib: float,
        facts: TokenizerFacts,
        ends: tuple[int, int],
    ):
        """ends: the ids that begin and end a piece of `wrapped` packing."""
        self.folder, self.length, self.packing, self.facts = folder, length, packing, facts
        self.documents = 0  # that were packed
        self.documents_in_all: int | None = None
        self.splits = {
            name: _Split(
                ShardWriter(folder / name, length, facts.vocab_size, shard_mib), packing, facts.pad_id, ends
            )
            for name in splits
        }
        if (folder / STATE).exists():
            self._load()

    def add(self, split: str | None, encoded: Encoded) -> None:
        """Pack a batch into a split (None: those that it says); save where a shard was written."""
        if encoded.refused:
            document, name, beginning = encoded.refused
            token = {"mask": self.facts.mask_id, "EOS": self.facts.eos_id, "padding": self.facts.pad_id}[name]
            raise UserError(
                f"the tokenizer's {name} token (id {token}) is also text: document "
                f"{self.documents + document + 1} of the input, which begins {beginning!r}, holds it; "
                "use a tokenizer where they differ"
            )
        before = self._shards()
        if split is not None:
            self.splits[split].add(encoded.ids, encoded.lengths)
        else:
            valid = np.repeat(encoded.valid, encoded.lengths)
            self.splits["train"].add(encoded.ids[~valid], encoded.lengths[~encoded.valid])
            if "valid" in self.splits:
                self.splits["valid"].add(encoded.ids[valid], encoded.lengths[encoded.valid])
        self.documents += len(encoded.lengths)
        if self._shards() != before:
            self.save()

    def _shards(self) -> int:
        return sum(len(split.writer.shards) for split in self.splits.values())

    def save(self) -> None:
        """Record how far the work is; what it speaks of is on the disk before."""
        facts, arrays = {"documents": self.documents, "documents_in_all": self.documents_in_all}, {}
        for name, split in self.splits.items():
            for shard in split.writer.shards[split.saved :]:
                with open(split.writer.folder / shard.name, "rb") as file:
                    os.fsync(file.fileno())
            split.saved = len(split.writer.shards)
            shards = [shard.model_dump() for shard in split.writer.shards]
            facts[name] = {"documents": split.documents, "tokens": split.tokens, "shards": shards}
            arrays |= {f"{name}_rest": split.rest, f"{name}_pending": split.writer.pending}
        buffer = io.BytesIO()
        np.savez(buffer, facts=np.array(json.dumps(facts)), **arrays)
        write_atomically(self.folder / STATE, buffer.getvalue())

    def _load(self) -> None:
        """Raises DamagedWork where the state, or a shard that it speaks of, is not whole."""
        try:
            self._load_state()
        except Exception as error:  # whatever a foreign or cut file makes numpy and json raise
            reason = f"{type(error).__name__}: {error}"
            raise DamagedWork(f"the work in {self.folder} is damaged ({reason}): delete it") from None
        for split in self.splits.values():
            listed = {shard.name: shard for shard in split.writer.shards}
            for path in split.writer.folder.glob("*.tar"):
                if path.name not in listed:
                    path.unlink()  # written after the state, and again now
            for name, shard in listed.items():
                path = split.writer.folder / name
                if not path.is_file() or sha256(path) != shard.sha256:
                    raise DamagedWork(f"{path} is missing or altered: delete {self.folder}")

    def _load_state(self) -> None:
        with np.load(self.folder / STATE, allow_pickle=False) as state:
            facts = json.loads(str(state["facts"]))
            self.documents, self.documents_in_all = facts["documents"], facts["documents_in_all"]
            for name, split in self.splits.items():
                split.documents, split.tokens = facts[name]["documents"], facts[name]["tokens"]
                split.rest = state[f"{name}_rest"]
                shards = [Shard(**shard) for shard in facts[name]["shards"]]
                split.writer.go_on(shards, state[f"{name}_pending"])
                split.saved = len(shards)

    def close(self, recipe: str, official: dict[str, str], tokenizer_files: list[str]) -> None:
        """Write the last shards and the manifests. UserError where a split has no sequence."""
        for name, split in self.splits.items():
            if not split.writer.sequences:
                raise UserError(
                    f"the {name} split has {split.documents} documents and not one whole sequence of "
                    f"{self.length} tokens; give more text, a smaller --length or another --valid-fraction"
                )
        for name, split in self.splits.items():
            split.writer.close(
                version=__version__,
                recipe=recipe,
                split=name,
                official_split=official[name],
                packing=self.packing,
                tokenizer=self.facts,
                tokenizer_files=tokenizer_files,
                tokens=split.tokens,
                documents=split.documents,
                dropped_documents=int((split.rest == self.facts.eos_id).sum()),
                dropped_tokens=len(split.rest),
            )


class _Split:
    """Packs the documents of one split into sequences.

    packed: documents one after the other, EOS after each, cut every `length`; the last incomplete
    sequence is dropped and counted. wrapped: the same cut every `length` - 2, with BOS before and EOS after
    each piece, as MDLM trains. padded: a sequence holds one document (a long one is cut into several), EOS
    at its end, then padding.
    """

    def __init__(self, writer: ShardWriter, packing: str, pad_id: int | None, ends: tuple[int, int]):
        self.writer, self.pad_id, self.ends = writer, pad_id, ends if packing == "wrapped" else ()
        self.padded = packing == "padded"
        self.rest = np.empty(0, writer.dtype)
        self.documents = self.tokens = self.saved = 0  # saved: shards that the state speaks of

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Documents in a row: their ids, EOS at the end of each, and their lengths."""
        self.documents += len(lengths)
        if self.padded:
            rows = pad(ids, lengths, self.writer.length, self.pad_id)
            self.tokens += len(ids)
        else:
            stream = np.concatenate([self.rest, ids])
            rows = cut(stream, self.writer.length - len(self.ends))
            self.rest = stream[rows.size :].copy()
            rows = wrap(rows, *self.ends) if self.ends else rows
            self.tokens += rows.size
        if len(rows):
            self.writer.add(rows)


def cut(stream: np.ndarray, length: int) -> np.ndarray:
    """A row of tokens in pieces, [n, length], without its end, which fills none."""
    return stream[: len(stream) - len(stream) % length].reshape(-1, length)


def wrap(rows: np.ndarray, bos_id: int, eos_id: int) -> np.ndarray:
    """[n, L - 2] -> [n, L]: BOS before and EOS after each row."""
    return np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), (bos_id, eos_id)))


def pad(ids: np.ndarray, lengths: np.ndarray, length: int, pad_id: int) -> np.ndarray:
    """Each document from the beginning of a row of its own on: [rows, length]."""
    rows = -(-lengths // length)
    shift = (np.cumsum(rows) - rows) * length - (np.cumsum(lengths) - lengths)
    out = np.full(rows.sum() * length, pad_id, ids.dtype)
    out[np.arange(len(ids)) + np.repeat(shift, lengths)] = ids
    return out.reshape(-1, length)
