"""Texts out of files: plain, JSON lines, Parquet, tar archives of texts, compressed or not; and the hub."""

import contextlib
import io
import itertools
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import pyarrow
import pyarrow.parquet

from lomdm_dist.errors import UserError, first_line

HUB = "hf:"
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# what would otherwise be read as plain text, and is none
NOT_TEXT = (
    ".tar.zst",
    ".csv",
    ".tsv",
    ".zip",
    ".7z",
    ".rar",
    ".xz",
    ".pdf",
    ".docx",
    ".arrow",
    ".npy",
    ".bin",
)
TAR = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", "_data.xz")


class Meter:
    """How many bytes of its input files a reader has passed, as they lie on disk; for a progress bar."""

    def __init__(self):
        self._passed, self._file = 0, None

    @contextlib.contextmanager
    def reading(self, path: Path, raw):
        """Count `raw`, the open file at `path`, as far as it is read; all of it afterwards."""
        self._file = raw
        yield
        self._passed, self._file = self._passed + path.stat().st_size, None

    @property
    def bytes(self) -> int:
        with contextlib.suppress(ValueError):  # at its end a stream closes what it reads
            return self._passed + (self._file.tell() if self._file is not None else 0)
        return self._passed


def clean_unicode(text: str) -> str:
    """Half a surrogate pair, which JSON can hold and UTF-8 cannot, becomes U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_any(name: str, meter: Meter, field: str = "text", sample_by: str = "paragraph") -> Iterable[str]:
    """Documents of a file, by the ending of its name, or of a hub data set `hf:NAME[:SPLIT]`. UserError."""
    if name.startswith(HUB):
        return read_hub(name.removeprefix(HUB), field)
    path = Path(name)
    if path.name.lower().endswith(TAR):
        return read_tar(path, meter)
    if path.name.lower().endswith(NOT_TEXT):
        raise UserError(
            f"input {path}: this kind of file is not read; give .txt, .jsonl (also .gz, .zst, .bz2), "
            ".parquet or .tar of texts"
        )
    kind = next((s for s in reversed(path.suffixes) if s.lower() not in COMPRESSED), "").lower()
    if kind == ".parquet":
        return read_parquet(path, meter, field)
    if kind in (".jsonl", ".json"):
        return (field_of(record, field, where) for record, where in read_jsonl(path, meter))
    return read_text(path, meter, sample_by)


def lines(path: Path, meter: Meter) -> Iterator[str]:
    """Lines of a text file, plain or compressed; a file that ends too early is an error."""
    try:
        compression = COMPRESSED.get(path.suffix.lower())
        with pyarrow.OSFile(str(path)) as raw, meter.reading(path, raw):
            binary = pyarrow.input_stream(raw, compression=compression)
            with io.TextIOWrapper(binary, encoding="utf-8-sig") as file:
                yield from file
    except UnicodeDecodeError as error:
        raise UserError(f"input {path} is not UTF-8 text: {error}") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read input {path}: {' '.join(str(error).split())}") from None


def read_text(path: Path, meter: Meter, sample_by: str) -> Iterator[str]:
    """Plain text; a document is a `line`, a `paragraph` (blank lines stand between them) or the file."""
    if sample_by == "line":
        yield from (line.rstrip("\n") for line in lines(path, meter))
    elif sample_by == "document":
        yield "".join(lines(path, meter))
    else:
        for blank, group in itertools.groupby(lines(path, meter), lambda line: not line.strip()):
            if not blank:
                yield "".join(group).rstrip("\n")


def field_of(record, field: str, where: str) -> str:
    if not isinstance(record, dict) or field not in record:
        has = f"fields {', '.join(record)}" if isinstance(record, dict) else "one object a line is wanted"
        raise UserError(f"{where} has no field {field!r} ({has}); name the text's with --text-field")
    if not isinstance(record[field], str):
        raise UserError(f"{where}: field {field!r} is not text but {type(record[field]).__name__}")
    return record[field]


def read_jsonl(path: Path, meter: Meter) -> Iterator[tuple[object, str]]:
    """Each record, and where it stands."""
    for number, line in enumerate(lines(path, meter), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path} line {number} is not JSON: {error}") from None
            yield record, f"{path} line {number}"


def read_parquet(path: Path, meter: Meter, field: str) -> Iterator[str]:
    try:
        with open(path, "rb") as raw, meter.reading(path, raw):
            file = pyarrow.parquet.ParquetFile(raw)
            fields = {f.name: f.type for f in file.schema_arrow}
            if field not in fields:
                field_of(fields, field, str(path))
            if not (pyarrow.types.is_string(fields[field]) or pyarrow.types.is_large_string(fields[field])):
                raise UserError(f"{path}: field {field!r} is not text but {fields[field]}")
            for batch in file.iter_batches(columns=[field], batch_size=1024):
                yield from (text or "" for text in batch.column(0).to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read parquet {path}: {error}") from None


def read_tar(path: Path, meter: Meter) -> Iterator[str]:
    """Each file of a tar archive is a document, in the archive's order; nothing is unpacked. UserError."""
    try:
        with open(path, "rb") as raw, meter.reading(path, raw), tarfile.open(fileobj=raw, mode="r:*") as tar:
            for member in tar:
                _check_member(path, member)
                if member.isfile():
                    try:
                        yield tar.extractfile(member).read().decode("utf-8")
                    except UnicodeDecodeError as error:
                        raise UserError(f"{path}: {member.name} is not UTF-8 text: {error}") from None
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"cannot read archive {path}: {' '.join(str(error).split())}") from None


def _check_member(path: Path, member: tarfile.TarInfo) -> None:
    """Refuse what an honest archive of texts has no use for. Raises UserError."""
    name = PurePosixPath(member.name)
    wrong = "has a name that leads out of the archive" if name.is_absolute() or ".." in name.parts else None
    if not (member.isfile() or member.isdir()):
        wrong = f"is a link to {member.linkname!r}" if member.issym() or member.islnk() else "is a device"
    if wrong:
        raise UserError(f"{path}: its member {member.name!r} {wrong}: pack plain files and folders only")


def _open_hub(load_dataset, name: str, config: str | None, split: str):
    try:
        return load_dataset(name, config, split=split, streaming=True)
    except RuntimeError as error:
        if config is None or "scripts are no longer supported" not in str(error):
            raise
    # A data set that is a program, which the library runs no more: the hub keeps its rows as Parquet
    # beside it. The folder is named whole, for the first part of a large split lies in `partial-train`.
    files = {split: f"{config}/{split}/*.parquet"}
    return load_dataset(name, data_files=files, split=split, revision="refs/convert/parquet", streaming=True)


def count_hub(name: str, config: str | None = None) -> int | None:
    """Records of NAME:SPLIT as the hub counts them, without reading them; None where it does not say."""
    with contextlib.suppress(Exception):  # of many kinds; reading it will say what is wrong
        import datasets

        name, _, split = name.partition(":")
        return datasets.load_dataset_builder(name, config).info.splits[split].num_examples or None
    return None


def read_hub(name: str, field: str, config: str | None = None) -> Iterator[str]:
    """NAME or NAME:SPLIT of a Hugging Face data set, streamed. UserError."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{HUB}{name} needs the `datasets` library: pip install datasets") from None
    name, _, split = name.partition(":")
    try:
        stream = _open_hub(datasets.load_dataset, name, config, split or "train")
    except Exception as error:  # network, access, spelling: the library raises many kinds
        reason = first_line(error)
        raise UserError(
            f"cannot load the data set {name} from the hub: {reason}; without network give its files, --input"
        ) from None
    for number, record in enumerate(stream):
        yield field_of(record, field, f"{name} record {number}")
