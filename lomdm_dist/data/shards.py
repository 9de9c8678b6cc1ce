"""Token shards: WebDataset tar files of fixed-length sequences, an index, and a manifest.

A folder holds `manifest.json` and `00000.tar`, `00001.tar`, ... Each tar member is a `.npy` block of
many sequences, [n, length] in uint16 or uint32. All members but a shard's last have the same number
of sequences, so three numbers, the index, say where any sequence stands, in any shard:

    byte = first + row // sequences_a_member * member_bytes + row % sequences_a_member * sequence_bytes

Every document ends in the EOS id, which no text contains: the boundaries can be had from the ids.
"""

import hashlib
import io
import json
import math
import mmap
import tarfile
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError, model_validator
from torch import Tensor

from lomdm_dist.config import ModelConfig
from lomdm_dist.data.store import Access, Damaged, Store
from lomdm_dist.errors import UserError, in_words
from lomdm_dist.files import sha256, write_atomically

MANIFEST, FORMAT = "manifest.json", 2
SEQUENCES_A_MEMBER = 256
SHARD_MIB = 64
TAR_BLOCK, NPY_HEADER = 512, 128  # bytes
CHECKING_THREADS = 4
PlainName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # of a file or folder, not a way to another
MOST_OPEN = 1024  # shards mapped at once by a process; Linux allows 65,530 maps


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class TokenizerFacts(BaseModel):
    """What is recorded of a tokenizer; the hash is of its whole definition."""

    sha256: str
    vocab_size: int = Field(gt=0)
    eos_id: int = Field(ge=0)
    mask_id: int = Field(ge=0)
    pad_id: int | None = Field(ge=0)


class Index(BaseModel):
    """Where the sequences of a shard stand; the formula is at the top of this file."""

    first: int = Field(ge=0)
    sequences_a_member: int = Field(gt=0)
    member_bytes: int = Field(gt=0)
    sequence_bytes: int = Field(gt=0)

    def offsets(self, rows: np.ndarray) -> np.ndarray:
        member, inside = np.divmod(rows, self.sequences_a_member)
        return self.first + member * self.member_bytes + inside * self.sequence_bytes

    def end(self, sequences: int) -> int:
        """The byte after the last of so many sequences; of Python's integers, which never overflow."""
        member, inside = divmod(sequences - 1, self.sequences_a_member)
        return self.first + member * self.member_bytes + (inside + 1) * self.sequence_bytes

    @classmethod
    def of(cls, length: int, dtype: np.dtype) -> "Index":
        """The index of the shards that ShardWriter writes: tar header, npy header, rows, and so on."""
        row = length * dtype.itemsize
        member = TAR_BLOCK + _whole_blocks(NPY_HEADER + SEQUENCES_A_MEMBER * row)
        return cls(
            first=TAR_BLOCK + NPY_HEADER,
            sequences_a_member=SEQUENCES_A_MEMBER,
            member_bytes=member,
            sequence_bytes=row,
        )


def _whole_blocks(size: int) -> int:
    return -(-size // TAR_BLOCK) * TAR_BLOCK


class Shard(BaseModel):
    name: str = Field(pattern=r"^[0-9]+\.tar$")
    sequences: int = Field(gt=0)
    bytes: int = Field(gt=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """manifest.json.

    tokens            without padding
    documents         all that were read; `dropped_documents` end in the dropped tail
    dropped_tokens    of the tail that did not fill a sequence
    identity          names the sequences and their order, however they are cut into shards
    sha256            of all the rest: an edited manifest is refused
    """

    format: Literal[2] = FORMAT
    version: str
    recipe: str
    split: PlainName
    official_split: str
    packing: Literal["packed", "wrapped", "padded"]
    tokenizer: TokenizerFacts
    tokenizer_files: list[PlainName]
    length: int = Field(gt=0)
    dtype: str
    sequences: int
    tokens: int
    documents: int
    dropped_documents: int
    dropped_tokens: int
    index: Index
    shards: list[Shard] = Field(min_length=1)
    identity: str
    sha256: str = ""

    @model_validator(mode="after")
    def _adds_up(self):
        if self.sequences != sum(shard.sequences for shard in self.shards):
            raise ValueError("sequences is not the sum over the shards")
        if len({shard.name for shard in self.shards}) != len(self.shards):
            raise ValueError("a shard is listed twice")
        if self.dtype != token_dtype(self.tokenizer.vocab_size).name:
            raise ValueError(f"dtype {self.dtype} is not that of the vocabulary")
        if self.index.sequence_bytes != self.length * np.dtype(self.dtype).itemsize:
            raise ValueError("index.sequence_bytes is not that of length and dtype")
        # rows are read by address, so no index may lead out of its file
        if self.index.member_bytes < self.index.sequences_a_member * self.index.sequence_bytes:
            raise ValueError("index has members that overlap")
        for shard in self.shards:
            if self.index.end(shard.sequences) > shard.bytes:
                raise ValueError(f"index reaches beyond the end of {shard.name}")
        if self.sha256 and self.sha256 != self.checksum():
            raise ValueError("sha256 is not that of the content: the file was edited")
        return self

    def checksum(self) -> str:
        content = self.model_dump(mode="json", exclude={"sha256"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        signed = self.model_copy(update={"sha256": self.checksum()})
        write_atomically(folder / MANIFEST, signed.model_dump_json(indent=1) + "\n")


class ShardWriter:
    """Writes sequences in order; the same sequences give the same bytes on any machine."""

    def __init__(self, folder: Path, length: int, vocab_size: int, shard_mib: float = SHARD_MIB):
        self.folder, self.length, self.vocab_size = folder, length, vocab_size
        self.dtype = token_dtype(vocab_size)
        self.index = Index.of(length, self.dtype)
        members = max(1, int(shard_mib * 2**20 // self.index.member_bytes))
        self.sequences_a_shard = members * SEQUENCES_A_MEMBER
        self.shards: list[Shard] = []
        self._pending: list[np.ndarray] = []
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def sequences(self) -> int:
        return sum(shard.sequences for shard in self.shards) + sum(map(len, self._pending))

    def go_on(self, shards: list[Shard], pending: np.ndarray) -> None:
        """Take up the work of a writer that was ended, after its last whole shard."""
        self.shards, self._pending = list(shards), [pending] if len(pending) else []

    @property
    def pending(self) -> np.ndarray:
        """Sequences that are in no shard yet, [n, length]."""
        return np.concatenate(self._pending) if self._pending else np.empty((0, self.length), self.dtype)

    def add(self, rows: np.ndarray) -> None:
        """rows [n, length] of token ids."""
        assert rows.shape[1:] == (self.length,) and (not rows.size or rows.max() < self.vocab_size)
        self._pending.append(rows.astype(self.dtype))
        if sum(map(len, self._pending)) >= self.sequences_a_shard:
            rows = self.pending
            whole = len(rows) - len(rows) % self.sequences_a_shard
            for start in range(0, whole, self.sequences_a_shard):
                self._write(rows[start : start + self.sequences_a_shard])
            self._pending = [rows[whole:]] if whole < len(rows) else []

    def _write(self, rows: np.ndarray) -> None:
        path = self.folder / f"{len(self.shards):05d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for start in range(0, len(rows), SEQUENCES_A_MEMBER):
                buffer = io.BytesIO()
                block = rows[start : start + SEQUENCES_A_MEMBER]
                np.save(buffer, block)
                assert buffer.tell() == NPY_HEADER + block.nbytes
                # TarInfo's own mtime, uid and gid are 0: nothing of this machine enters the file
                member = tarfile.TarInfo(f"{path.stem}_{start:07d}.npy")
                member.size = buffer.tell()
                buffer.seek(0)
                tar.addfile(member, buffer)
        size = path.stat().st_size
        self.shards.append(Shard(name=path.name, sequences=len(rows), bytes=size, sha256=sha256(path)))

    def close(self, **facts) -> Manifest:
        """Write the last shard and the manifest, with `facts` in it; returns the manifest."""
        if len(self.pending):
            self._write(self.pending)
            self._pending = []
        packing = facts["packing"]
        content = json.dumps([packing, self.length, [shard.sha256 for shard in self.shards]])
        facts = {"identity": hashlib.sha256(content.encode()).hexdigest()} | facts
        manifest = Manifest(
            **facts,
            length=self.length,
            dtype=self.dtype.name,
            sequences=self.sequences,
            index=self.index,
            shards=self.shards,
        )
        manifest.write(self.folder)
        return manifest


class BadShard(UserError):
    """A shard that cannot be used; `number` is its place in the manifest."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number


class ShardSet:
    """Random access to all sequences of a shard folder, local or remote, as one array [sequences, length].

    Opening it reads the manifest. A shard's content is checked when it is first read: its checksum, and
    that its ids are text (both left out where `access.verify` is "size"); `check` does so before. Threads
    may share one. Raises UserError and BadShard.
    """

    def __init__(self, location: str | Path, access: Access | None = None):
        self.access = access or Access()
        self.store = Store(str(location), self.access)
        self.manifest = _parse_manifest(self.store)
        self.length, self.tokenizer = self.manifest.length, self.manifest.tokenizer
        self.dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        sizes = [shard.sequences for shard in self.manifest.shards]
        self._starts = np.cumsum([0, *sizes])
        self._row = np.dtype((np.void, self.manifest.index.sequence_bytes))  # one element a sequence
        index = self.manifest.index
        # every sequence of every map lies at a multiple of this: maps begin at pages
        self._unit = math.gcd(mmap.PAGESIZE, index.first, index.member_bytes, index.sequence_bytes)
        gap = index.member_bytes - index.sequences_a_member * index.sequence_bytes
        self._units = tuple(size // self._unit for size in (index.first, index.sequence_bytes, gap))
        self._open: OrderedDict[int, tuple[np.ndarray, int]] = OrderedDict()
        largest = max(shard.bytes for shard in self.manifest.shards)
        self._most_open = min(MOST_OPEN, max(1, self.access.cache_bytes // largest))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.manifest.sequences

    def __str__(self) -> str:
        return self.store.location

    @property
    def pad_id(self) -> int | None:
        """The id of padding, None where the sequences are packed full."""
        return self.tokenizer.pad_id if self.manifest.packing == "padded" else None

    def tokenizer_folder(self) -> Path:
        """Where the tokenizer lies that `lomdm prepare` put beside the splits; fetched where remote."""
        return self.store.tokenizer_folder(self.manifest.tokenizer_files)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Sequences by index: int64 [n] -> [n, length] in the shards' own dtype."""
        if not len(indices):
            return np.empty((0, self.length), self.dtype)
        shards = self.shard_of(indices)
        used = np.flatnonzero(np.bincount(shards))
        maps = [self._shard(int(number)) for number in used]
        lowest, highest = min(maps, key=_address), max(maps, key=_address)
        first, a_row, a_gap = self._units
        begin = np.zeros(used[-1] + 1, dtype=np.int64)  # of each shard's sequences, in units
        begin[used] = [(address - lowest[1]) // self._unit + first for _, address in maps]
        row = indices - self._starts[shards]
        # the index's formula, with one division only: each member before adds the gap between two blocks
        places = begin[shards] + row * a_row + row // self.manifest.index.sequences_a_member * a_gap
        return self._everything(lowest, highest)[places].view(self.dtype).reshape(len(indices), self.length)

    def shard_of(self, indices: np.ndarray) -> np.ndarray:
        """Numbers of the shards that sequences lie in."""
        return np.searchsorted(self._starts, indices, side="right") - 1

    def batch(self, indices: np.ndarray, device) -> tuple[Tensor, Tensor | None]:
        """Sequences on the device: x [n, length] int64, and valid [n, length], None where packed."""
        return unpack(torch.from_numpy(self.rows(indices)), self.pad_id, device)

    def check(self, share: int = 0, of: int = 1) -> list[BadShard]:
        """What is wrong with the shards of a local folder; remote ones are checked as they come.

        Looks at the name and size of every file, and opens every `of`-th one, from `share` on.
        """
        if self.store.remote:
            return []
        bad = [error for number in range(len(self.manifest.shards)) if (error := self._check_file(number))]
        if self.access.verify == "size":
            return bad
        opened = set(range(share, len(self.manifest.shards), of)) - {error.number for error in bad}
        with ThreadPoolExecutor(CHECKING_THREADS) as pool:
            return bad + [error for error in pool.map(self._try, sorted(opened)) if error]

    def _check_file(self, number: int) -> BadShard | None:
        shard = self.manifest.shards[number]
        path = Path(self.store.location, shard.name)
        if not path.is_file():
            return self._bad(number, "is missing, but its manifest lists it")
        if path.stat().st_size != shard.bytes:
            return self._bad(number, f"has {path.stat().st_size} bytes, its manifest says {shard.bytes}")

    def _try(self, number: int) -> BadShard | None:
        try:
            self._shard(number)
        except BadShard as error:
            return error

    def check_extra(self) -> None:
        """Refuse a local folder with shards that its manifest does not list. UserError."""
        if not self.store.remote:
            listed = {shard.name for shard in self.manifest.shards}
            extra = sorted({path.name for path in Path(self.store.location).glob("*.tar")} - listed)
            if extra:
                raise UserError(
                    f"{self} holds {', '.join(extra[:3])}, which its {MANIFEST} does not list: "
                    "take it away, or prepare the data again"
                )

    def fetch(self, number: int) -> None:
        """Bring a remote shard into the cache ahead of its use."""
        shard = self.manifest.shards[number]
        self.store.open(shard.name, shard.sha256, shard.bytes).close()

    def is_cached(self, number: int) -> bool:
        return self.store.is_cached(self.manifest.shards[number].sha256)

    def _shard(self, number: int) -> tuple[np.ndarray, int]:
        """The bytes of a shard, mapped, and the address of the map."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
        try:
            raw = self._map(number)
        except BadShard:
            if not self.store.remote:
                raise
            self.store.forget(self.manifest.shards[number].sha256)  # the copy may be at fault
            raw = self._map(number)
        mapped = raw, raw.__array_interface__["data"][0]
        with self._lock:
            self._open[number] = mapped
            while len(self._open) > self._most_open:
                self._open.popitem(last=False)
        return mapped

    def _everything(self, lowest: tuple, highest: tuple) -> np.ndarray:
        """Several mapped shards as one array: element i is the sequence at i units from the lowest map.

        One loop in C then copies sequences out of any of them; a loop over shards in Python would take
        longer than the copying. What lies between the maps belongs to the array, and is never read.
        """
        raw, address = lowest
        span = highest[1] + len(highest[0]) - address - self._row.itemsize
        one = raw[: self._row.itemsize].view(self._row)
        return np.lib.stride_tricks.as_strided(one, (span // self._unit + 1,), (self._unit,), writeable=False)

    def _map(self, number: int) -> np.ndarray:
        shard = self.manifest.shards[number]
        try:
            with self.store.open(shard.name, shard.sha256, shard.bytes) as file:
                raw = np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
                self._check_header(number, raw)
                if self.access.verify == "checksum":
                    self._check_once(number, raw, file)
        except Damaged as error:
            raise BadShard(str(error), number) from None
        except (OSError, ValueError) as error:
            raise self._bad(number, f"cannot be read: {error}") from None
        return raw

    def _check_header(self, number: int, raw: np.ndarray) -> None:
        shard, index = self.manifest.shards[number], self.manifest.index
        if len(raw) != shard.bytes or index.offsets(np.array(shard.sequences - 1)) >= len(raw):
            raise self._bad(number, f"has {len(raw)} bytes, its manifest says {shard.bytes}")
        rows = min(index.sequences_a_member, shard.sequences)
        found = raw[TAR_BLOCK : index.first].tobytes()
        if found != _npy_header(rows, self.length, self.dtype):
            raise self._bad(number, _describe(found, self.length, self.dtype))

    def _check_once(self, number: int, raw: np.ndarray, file) -> None:
        """Checksum and ids; a file that this machine has found good is not read again."""
        shard, facts = self.manifest.shards[number], self.tokenizer
        what = f"{shard.sha256} {facts.vocab_size} {facts.mask_id}"
        if self.access.found_good(file, what):
            return
        if hashlib.sha256(raw).hexdigest() != shard.sha256:
            raise self._bad(number, "was altered: its checksum is not that of its manifest")
        index = self.manifest.index
        for start in range(0, shard.sequences, index.sequences_a_member):
            rows = min(index.sequences_a_member, shard.sequences - start)
            begin = int(index.offsets(np.array(start)))
            ids = raw[begin : begin + rows * index.sequence_bytes].view(self.dtype)
            if ids.max() >= facts.vocab_size or (ids == facts.mask_id).any():
                raise self._bad(
                    number,
                    f"holds ids that are not text (the mask's, {facts.mask_id}, or beyond the vocabulary of "
                    f"{facts.vocab_size})",
                )
        self.access.remember_good(file, what)

    def _bad(self, number: int, what: str) -> BadShard:
        name = self.store.name_of(self.manifest.shards[number].name)
        return BadShard(f"shard {name} {what}: prepare the data again, or copy it anew", number)


def _npy_header(rows: int, length: int, dtype: np.dtype) -> bytes:
    buffer = io.BytesIO()
    facts = {"descr": dtype.str, "fortran_order": False, "shape": (rows, length)}
    np.lib.format.write_array_header_1_0(buffer, facts)
    return buffer.getvalue()


_parsing = threading.Lock()  # Python's parser, which numpy reads headers with, is not safe in threads


def _describe(header: bytes, length: int, dtype: np.dtype) -> str:
    """What is wrong with the first member of a shard."""
    file = io.BytesIO(header)
    try:
        with _parsing:
            np.lib.format.read_magic(file)
            (_, found), _, of = np.lib.format.read_array_header_1_0(file)
    except (ValueError, TypeError):
        return "is no shard of token blocks"
    if (found, of) == (length, dtype):
        return "has other blocks than its manifest says"
    return f"has {of} sequences of {found}, its manifest says {dtype} of {length}"


def _address(mapped: tuple[np.ndarray, int]) -> int:
    return mapped[1]


def unpack(rows: Tensor, pad_id: int | None, device) -> tuple[Tensor, Tensor | None]:
    """Sequences as stored -> x int64 [n, length] on the device, and valid, False at padding (or None)."""
    x = rows.to(device, non_blocking=True).long()
    return x, None if pad_id is None else x != pad_id


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a local folder. Raises UserError where it is not a shard folder."""
    return _parse_manifest(Store(str(folder), Access()))


def _parse_manifest(store: Store) -> Manifest:
    where = store.name_of(MANIFEST)
    try:
        manifest = Manifest.model_validate_json(store.read(MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        splits = sorted(path.parent.name for path in Path(store.location).glob(f"*/{MANIFEST}"))
        hint = (
            f"it holds the splits {', '.join(splits)}: give one, {store.location}/{splits[0]}"
            if splits
            else ("make them with `lomdm prepare`")
        )
        raise UserError(f"no token shards in {store.location} (no {MANIFEST}); {hint}") from None
    except OSError as error:
        raise UserError(f"cannot read {where}: {error.strerror}") from None
    except ValidationError as error:
        if any(p["loc"] == ("format",) for p in error.errors()):
            raise UserError(
                f"{where} was written by another version of lomdm_dist: prepare the data again"
            ) from None
        found = in_words(error.errors()[0])
        raise UserError(f"{where} is damaged ({found}): prepare the data again") from None
    if not manifest.sha256:
        raise UserError(f"{where} is damaged (it has no sha256): prepare the data again")
    return manifest


def check_model_fits(shards: ShardSet, model: ModelConfig) -> None:
    """Refuse shards whose tokenizer or length is not the model's. Raises UserError."""
    found = {
        "model.vocab_size": (model.vocab_size, shards.tokenizer.vocab_size),
        "model.mask_id": (model.mask_id, shards.tokenizer.mask_id),
        "model.length": (model.length, shards.length),
    }
    if model.eos_id is not None:
        found["model.eos_id"] = (model.eos_id, shards.tokenizer.eos_id)
    wrong = [
        f"{key} is {ours}, the shards have {theirs}"
        for key, (ours, theirs) in found.items()
        if ours != theirs
    ]
    if wrong:
        raise UserError(f"shards in {shards} do not fit the model: {'; '.join(wrong)}")
