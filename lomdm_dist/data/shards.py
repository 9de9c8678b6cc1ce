"""Token shards: WebDataset tar files of fixed-length sequences, and a manifest.

A folder holds `manifest.json` and `00000.tar`, `00001.tar`, ... Each tar member is a `.npy` block
of many sequences, [n, length] in uint16 or uint32, so that a sequence costs its bytes and nothing
more, and any row is read by position through one memory map a shard.
"""

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError, model_validator
from torch import Tensor

from lomdm_dist.errors import UserError
from lomdm_dist.files import sha256

MANIFEST = "manifest.json"
ROWS_A_MEMBER = 256
ROWS_A_SHARD = 64 * ROWS_A_MEMBER


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class TokenizerFacts(BaseModel):
    """What is recorded of a tokenizer; the hash is of its whole definition."""

    sha256: str
    vocab_size: int = Field(gt=0)
    eos_id: int = Field(ge=0)
    mask_id: int = Field(ge=0)
    pad_id: int | None = Field(ge=0)


class Shard(BaseModel):
    name: str = Field(pattern=r"^[0-9]+\.tar$")
    sequences: int = Field(gt=0)
    sha256: str


class Manifest(BaseModel):
    """manifest.json; `tokens` leaves padding out, `dropped_tokens` did not fill a sequence."""

    version: str
    split: str
    packing: Literal["packed", "padded"]
    tokenizer: TokenizerFacts
    length: int = Field(gt=0)
    dtype: str
    sequences: int
    tokens: int
    documents: int
    dropped_tokens: int
    shards: list[Shard] = Field(min_length=1)

    @model_validator(mode="after")
    def _adds_up(self):
        if self.sequences != sum(shard.sequences for shard in self.shards):
            raise ValueError("sequences is not the sum over the shards")
        if len({shard.name for shard in self.shards}) != len(self.shards):
            raise ValueError("a shard is listed twice")
        if self.dtype != token_dtype(self.tokenizer.vocab_size).name:
            raise ValueError(f"dtype {self.dtype} is not that of the vocabulary")
        return self

    def identity(self) -> str:
        """A hash of the data themselves: equal for equal sequences in equal order."""
        shards = [shard.sha256 for shard in self.shards]
        return hashlib.sha256(json.dumps([self.packing, self.length, shards]).encode()).hexdigest()


class ShardWriter:
    """Writes sequences in order; the same sequences give the same bytes on any machine."""

    def __init__(self, folder: Path, length: int, vocab_size: int):
        self.folder, self.length, self.vocab_size = folder, length, vocab_size
        self.dtype = token_dtype(vocab_size)
        self.shards: list[Shard] = []
        self._rows: list[np.ndarray] = []
        folder.mkdir(parents=True)

    def add(self, row: np.ndarray) -> None:
        """row [length] of token ids."""
        assert row.shape == (self.length,) and row.max() < self.vocab_size
        self._rows.append(row.astype(self.dtype))
        if len(self._rows) == ROWS_A_SHARD:
            self._flush()

    def _flush(self) -> None:
        path = self.folder / f"{len(self.shards):05d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for start in range(0, len(self._rows), ROWS_A_MEMBER):
                buffer = io.BytesIO()
                np.save(buffer, np.stack(self._rows[start : start + ROWS_A_MEMBER]))
                # TarInfo's own mtime, uid and gid are 0: nothing of this machine enters the file
                member = tarfile.TarInfo(f"{len(self.shards):05d}_{start:05d}.npy")
                member.size = buffer.tell()
                buffer.seek(0)
                tar.addfile(member, buffer)
        self.shards.append(Shard(name=path.name, sequences=len(self._rows), sha256=sha256(path)))
        self._rows = []

    def close(self, **facts) -> Manifest:
        """Write the last shard and the manifest, with `facts` in it; returns the manifest."""
        if self._rows:
            self._flush()
        manifest = Manifest(
            **facts,
            length=self.length,
            dtype=self.dtype.name,
            sequences=sum(shard.sequences for shard in self.shards),
            shards=self.shards,
        )
        (self.folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n")
        return manifest


class ShardSet:
    """Random access to all sequences of a shard folder, as one array [sequences, length].

    Opening checks that every shard is there; `verify` also compares checksums. Raises UserError.
    """

    def __init__(self, folder: str | Path, verify: bool = True):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.length, self.tokenizer = self.manifest.length, self.manifest.tokenizer
        self._blocks = [block for shard in self.manifest.shards for block in self._open(shard, verify)]
        self._starts = np.cumsum([0, *map(len, self._blocks)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def tokenizer_folder(self) -> Path:
        """Where `lomdm prepare` put the tokenizer: beside the splits."""
        return self.folder.resolve().parent / "tokenizer"

    @property
    def pad_id(self) -> int | None:
        """The id of padding, None where the sequences are packed full."""
        return self.tokenizer.pad_id if self.manifest.packing == "padded" else None

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Sequences by index: [n] -> [n, length], int64."""
        out = np.empty((len(indices), self.length), dtype=np.int64)
        blocks = np.searchsorted(self._starts, indices, side="right") - 1
        for i, (block, index) in enumerate(zip(blocks, indices, strict=True)):
            out[i] = self._blocks[block][index - self._starts[block]]
        return out

    def batch(self, indices: np.ndarray, device) -> tuple[Tensor, Tensor | None]:
        """Sequences on the device: x [n, length] int64, and valid [n, length], None where packed."""
        rows = self.rows(indices)
        if rows.size and (rows.max() >= self.tokenizer.vocab_size or (rows == self.tokenizer.mask_id).any()):
            raise UserError(f"shards in {self.folder} hold ids that are not text: prepare the data again")
        x = torch.from_numpy(rows).to(device)
        return x, None if self.pad_id is None else x != self.pad_id

    def _open(self, shard: Shard, verify: bool) -> list[np.ndarray]:
        path = self.folder / shard.name
        if not path.is_file():
            raise UserError(f"shard {path} is missing; its manifest lists it: prepare the data again")
        damaged = UserError(
            f"shard {path} is cut short or altered (it does not match its manifest): prepare the data again"
        )
        if verify and sha256(path) != shard.sha256:
            raise damaged
        try:
            blocks = _map_members(path)
        except (tarfile.TarError, ValueError, EOFError, OSError):
            raise damaged from None
        fits = all(b.shape == (len(b), self.length) and b.dtype.name == self.manifest.dtype for b in blocks)
        if not fits or sum(map(len, blocks)) != shard.sequences:
            raise damaged
        return blocks


def _map_members(path: Path) -> list[np.ndarray]:
    """Each `.npy` member of a tar as a view of one memory map of the file."""
    blocks, raw = [], np.memmap(path, dtype=np.uint8, mode="r")
    with tarfile.open(path) as tar:
        for member in tar:
            file = tar.extractfile(member)
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            start = member.offset_data + file.tell()
            stop = start + int(np.prod(shape)) * dtype.itemsize
            if dtype.hasobject or stop > len(raw):
                raise ValueError("not a block of tokens")
            blocks.append(raw[start:stop].view(dtype).reshape(shape))
    return blocks


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError where the folder is not a shard folder."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"no token shards in {folder} (no {MANIFEST}); make them with `lomdm prepare`"
        ) from None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise UserError(f"{path} is damaged ({where} {problem['msg']}): prepare the data again") from None


def check_model_fits(shards: ShardSet, vocab_size: int, mask_id: int, length: int) -> None:
    """Refuse shards whose tokenizer or length is not the model's. Raises UserError."""
    found = {
        "model.vocab_size": (vocab_size, shards.tokenizer.vocab_size),
        "model.mask_id": (mask_id, shards.tokenizer.mask_id),
        "model.length": (length, shards.length),
    }
    wrong = [
        f"{key} is {ours}, the shards have {theirs}"
        for key, (ours, theirs) in found.items()
        if ours != theirs
    ]
    if wrong:
        raise UserError(f"shards in {shards.folder} do not fit the model: {'; '.join(wrong)}")
