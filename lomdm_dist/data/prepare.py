"""Raw text -> tokenizer and token shards: `lomdm prepare`.

    OUT/request.json   what was asked, to know whether OUT can be reused
    OUT/tokenizer/     in Hugging Face form
    OUT/train/, OUT/valid/   token shards (lomdm_dist.data.shards)

Everything is written beside OUT and renamed at the end: OUT is whole or absent.
"""

import hashlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from tqdm import tqdm

from lomdm_dist import __version__
from lomdm_dist.data.shards import ShardSet, ShardWriter, TokenizerFacts, read_manifest
from lomdm_dist.data.tokenizer import (
    TRAINED,
    describe,
    encode,
    ensure_pad,
    load_tokenizer,
    open_tokenizer,
    train_tokenizer,
)
from lomdm_dist.errors import UserError
from lomdm_dist.files import new_folder, sha256

HUB, REQUEST, SPLITS = "hf:", "request.json", ("train", "valid")
LONGEST, LARGEST_VOCABULARY = 2**20, 2**24
DOCUMENTS_A_BATCH = 512
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Request:
    """What to prepare. `sample_by` says what a document is in plain text files."""

    inputs: tuple[str, ...]
    tokenizer: str
    length: int
    vocab_size: int | None = None  # of a tokenizer trained here
    packing: str = "packed"
    valid_fraction: float = 0.05
    sample_by: str = "paragraph"
    text_field: str = "text"

    def check(self) -> None:
        """Raises UserError before anything is read or written."""
        if not 2 <= self.length <= LONGEST:
            raise UserError(f"--length {self.length}: a sequence has 2 to {LONGEST} tokens")
        if self.vocab_size is not None and not 8 <= self.vocab_size <= LARGEST_VOCABULARY:
            raise UserError(f"--vocab-size {self.vocab_size}: give 8 to {LARGEST_VOCABULARY}")
        if not 0 < self.valid_fraction < 1:
            raise UserError(f"--valid-fraction {self.valid_fraction} is not between 0 and 1")
        if self.tokenizer in TRAINED and not self.vocab_size:
            raise UserError(f"--tokenizer {self.tokenizer} is trained here: give --vocab-size")
        if self.tokenizer not in TRAINED and self.vocab_size:
            raise UserError(f"--vocab-size is for {' and '.join(TRAINED)}; {self.tokenizer} has its own")
        for name in self.inputs:
            if not name.startswith(HUB) and not Path(name).is_file():
                raise UserError(f"no input file {name} (a hub data set is written {HUB}NAME)")

    def fingerprint(self) -> dict:
        """The request with the content of its inputs in place of their paths."""
        contents = [n if n.startswith(HUB) else sha256(Path(n)) for n in self.inputs]
        tokenizer = Path(self.tokenizer)
        given = {}
        if tokenizer.is_dir():
            files = sorted(p for p in tokenizer.iterdir() if p.is_file())
            given = {"tokenizer": {p.name: sha256(p) for p in files}}
        return asdict(self) | given | {"inputs": contents, "version": __version__}


def prepare(request: Request, out: Path) -> tuple[dict, bool]:
    """Make OUT; returns (totals, reused). Raises UserError; never overwrites."""
    request.check()
    out, fingerprint = out.resolve(), request.fingerprint()
    if (out / REQUEST).exists():
        _check_same_request(out, fingerprint)
        _verify(out)
        return _totals(out), True
    with new_folder(out) as partial:
        tokenizer = _tokenizer(request)
        tokenizer.save_pretrained(partial / "tokenizer")
        _write_splits(request, tokenizer, partial)
        (partial / REQUEST).write_text(json.dumps(fingerprint, indent=1) + "\n")
    return _totals(out), False


def _check_same_request(out: Path, fingerprint: dict) -> None:
    try:
        found = json.loads((out / REQUEST).read_text())
        different = sorted(key for key in fingerprint if found.get(key) != fingerprint[key])
    except (OSError, ValueError, AttributeError):
        raise UserError(f"{out / REQUEST} is damaged; give another --out, or delete {out}") from None
    if different:
        raise UserError(
            f"{out} holds shards of another request (different: {', '.join(different)}); "
            "give another --out, or delete it"
        )


def _verify(out: Path) -> None:
    """Read every shard and the tokenizer of an earlier run. Raises UserError."""
    for name in SPLITS:
        split = ShardSet(out / name)
        open_tokenizer(split.tokenizer_folder, split.tokenizer)


def _totals(out: Path) -> dict:
    """Counts over both splits."""
    splits = [read_manifest(out / name) for name in SPLITS]
    totals = {key: sum(getattr(s, key) for s in splits) for key in ("sequences", "tokens", "documents")}
    facts = {key: getattr(splits[0].tokenizer, key) for key in ("vocab_size", "mask_id")}
    return totals | facts | {"shards": sum(len(s.shards) for s in splits)}


def _tokenizer(request: Request):
    if request.tokenizer in TRAINED:
        train = (text for text in read_documents(request) if not in_valid(text, request.valid_fraction))
        return train_tokenizer(request.tokenizer, train, request.vocab_size)
    tokenizer = load_tokenizer(request.tokenizer)
    if request.packing == "padded":
        ensure_pad(tokenizer)
    return tokenizer


def in_valid(text: str, fraction: float) -> bool:
    """Whether a document belongs to validation: by its own hash, so equal texts never straddle."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _write_splits(request: Request, tokenizer, folder: Path) -> None:
    facts = describe(tokenizer)
    splits = {
        name: _Split(ShardWriter(folder / name, request.length, facts.vocab_size), request, facts)
        for name in SPLITS
    }
    documents = read_documents(request)
    with tqdm(desc="prepare", unit=" tokens", unit_scale=True, disable=None) as bar:
        while batch := list(itertools.islice(documents, DOCUMENTS_A_BATCH)):
            for text, ids in zip(batch, encode(tokenizer, batch), strict=True):
                split = "valid" if in_valid(text, request.valid_fraction) else "train"
                splits[split].add(ids)
                bar.update(len(ids))
    for name, split in splits.items():
        if not split.sequences:
            raise UserError(
                f"the {name} split has {split.documents} documents and not one whole sequence of "
                f"{request.length} tokens; give more text, a smaller --length or another --valid-fraction"
            )
        split.writer.close(
            split=name,
            packing=request.packing,
            tokenizer=facts,
            tokens=split.tokens,
            documents=split.documents,
            dropped_tokens=len(split.rest),
            version=__version__,
        )


class _Split:
    """Packs the documents of one split into sequences.

    packed: documents one after the other, EOS after each, cut every `length`; the last incomplete
    sequence is dropped and counted. padded: a sequence holds one document (a long one is cut into
    several), EOS at its end, then padding.
    """

    def __init__(self, writer: ShardWriter, request: Request, facts: TokenizerFacts):
        self.writer, self.length, self.facts = writer, request.length, facts
        self.padded = request.packing == "padded"
        self.rest: list[int] = []
        self.documents = self.sequences = self.tokens = 0

    def add(self, ids: list[int]) -> None:
        never = {"mask": self.facts.mask_id} | ({"padding": self.facts.pad_id} if self.padded else {})
        for what, token in never.items():
            if token in ids:
                raise UserError(
                    f"the tokenizer's {what} token (id {token}) is also text: document {self.documents} of "
                    "the split holds it; use a tokenizer where they differ"
                )
        self.documents += 1
        ids = [*ids, self.facts.eos_id]
        if not self.padded:
            ids = self.rest + ids
        whole = len(ids) - len(ids) % self.length
        for start in range(0, whole, self.length):
            self._write(ids[start : start + self.length])
        rest = ids[whole:]
        if not self.padded:
            self.rest = rest
        elif rest:
            self._write(rest)

    def _write(self, ids: list[int]) -> None:
        row = np.full(self.length, self.facts.pad_id if self.padded else 0, dtype=np.int64)
        row[: len(ids)] = ids
        self.writer.add(row)
        self.sequences += 1
        self.tokens += len(ids)


def read_documents(request: Request) -> Iterator[str]:
    """All non-empty documents of all inputs, in order. Half a surrogate pair becomes U+FFFD."""
    for name in request.inputs:
        for text in _read_input(name, request):
            if not text.isascii():
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if text.strip():
                yield text


def _read_input(name: str, request: Request) -> Iterable[str]:
    if name.startswith(HUB):
        return _read_hub(name.removeprefix(HUB), request.text_field)
    path = Path(name)
    kind = next((s for s in reversed(path.suffixes) if s.lower() not in COMPRESSED), "").lower()
    if kind == ".parquet":
        return _read_parquet(path, request.text_field)
    if kind in (".jsonl", ".json"):
        return _read_jsonl(path, request.text_field)
    return _read_text(path, request.sample_by)


def _lines(path: Path) -> Iterator[str]:
    """Lines of a text file, plain or compressed; a file that ends too early is an error."""
    try:
        compression = COMPRESSED.get(path.suffix.lower())
        with (
            pyarrow.input_stream(str(path), compression=compression) as binary,
            io.TextIOWrapper(binary, encoding="utf-8-sig") as file,
        ):
            yield from file
    except UnicodeDecodeError as error:
        raise UserError(f"input {path} is not UTF-8 text: {error}") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read input {path}: {' '.join(str(error).split())}") from None


def _read_text(path: Path, sample_by: str) -> Iterator[str]:
    if sample_by == "line":
        yield from (line.rstrip("\n") for line in _lines(path))
    elif sample_by == "document":
        yield "".join(_lines(path))
    else:
        for blank, lines in itertools.groupby(_lines(path), lambda line: not line.strip()):
            if not blank:
                yield "".join(lines).rstrip("\n")


def _field(record, field: str, where: str) -> str:
    if not isinstance(record, dict) or field not in record:
        has = f"fields {', '.join(record)}" if isinstance(record, dict) else "no fields"
        raise UserError(f"{where} has no field {field!r} ({has}); name the text's with --text-field")
    if not isinstance(record[field], str):
        raise UserError(f"{where}: field {field!r} is not text but {type(record[field]).__name__}")
    return record[field]


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path} line {number} is not JSON: {error}") from None
            yield _field(record, field, f"{path} line {number}")


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
        fields = {f.name: f.type for f in file.schema_arrow}
        if field not in fields:
            _field(fields, field, str(path))
        if not (pyarrow.types.is_string(fields[field]) or pyarrow.types.is_large_string(fields[field])):
            raise UserError(f"{path}: field {field!r} is not text but {fields[field]}")
        for batch in file.iter_batches(columns=[field]):
            yield from (text or "" for text in batch.column(0).to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read parquet {path}: {error}") from None


def _read_hub(name: str, field: str) -> Iterator[str]:
    """NAME or NAME:SPLIT of a Hugging Face data set, streamed."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{HUB}{name} needs the `datasets` library: pip install datasets") from None
    name, _, split = name.partition(":")
    try:
        stream = datasets.load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # network, access, spelling: the library raises many kinds
        raise UserError(f"cannot load the data set {name} from the hub: {error}") from None
    for number, record in enumerate(stream):
        yield _field(record, field, f"{name} record {number}")
