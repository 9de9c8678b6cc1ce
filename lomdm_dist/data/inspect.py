"""What token shards hold, and whether they are whole: `lomdm prepare verify | inspect | reshard`."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from tqdm import tqdm

from lomdm_dist.data.shards import MANIFEST, BadShard, Manifest, PlainName, ShardSet, ShardWriter
from lomdm_dist.data.store import Access
from lomdm_dist.data.tokenizer import open_tokenizer
from lomdm_dist.errors import UserError
from lomdm_dist.files import new_folder

REQUEST = "request.json"
LARGEST_SHARD_MIB = 2048
THREADS = 4
SEQUENCES_AT_ONCE = 4096
FIRST_ERRORS = 3
SHOWN = 3  # sequences of a split
LETTERS_SHOWN = 400
DOCUMENT_END = " ◆ "


class ReadAgain(Access):
    """Takes no earlier check's word for a shard."""

    def found_good(self, file, what: str) -> bool:
        return False

    def remember_good(self, file, what: str) -> None:
        pass


def split_folders(folder: Path) -> list[Path]:
    """The split folders of an OUT, or the one that `folder` is. Raises UserError."""
    if (folder / MANIFEST).exists():
        return [folder]
    if (folder / REQUEST).exists():
        try:
            splits = json.loads((folder / REQUEST).read_text())["splits"]
            return [folder / TypeAdapter(PlainName).validate_python(name) for name in splits]
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(f"{folder / REQUEST} is damaged: prepare the data again") from None
    found = sorted({path.parent for pattern in (MANIFEST, "*.tar") for path in folder.glob(f"*/{pattern}")})
    if not found:
        raise UserError(f"no token shards in {folder}; give a folder that `lomdm prepare` made")
    return found


def check_shard_mib(shard_mib: float) -> None:
    if not 0 < shard_mib <= LARGEST_SHARD_MIB:
        raise UserError(f"--shard-mib {shard_mib:g}: give more than 0 and at most {LARGEST_SHARD_MIB}")


# Verify.


def verify(folder: Path) -> list[Manifest]:
    """Read all of it, and compare it with what the manifests say; UserError that names what is wrong."""
    manifests, wrong = [], []
    for split in split_folders(folder):
        try:
            shards = ShardSet(split, ReadAgain())
            wrong += _wrong_in(shards)
            manifests.append(shards.manifest)
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        more = len(wrong) - FIRST_ERRORS
        listed = "; ".join(wrong[:FIRST_ERRORS]) + (f"; and {more} more" if more > 0 else "")
        raise UserError(listed if len(wrong) == 1 else f"{len(wrong)} things are wrong: {listed}")
    return manifests


def _wrong_in(shards: ShardSet) -> list[str]:
    """What is wrong with a split, a line each."""
    wrong = []
    try:
        shards.check_extra()
    except UserError as error:
        wrong.append(str(error))
    try:
        open_tokenizer(shards.tokenizer_folder(), shards.tokenizer)
    except UserError as error:
        wrong.append(str(error))
    of_files = ShardSet(shards.store.location, Access(verify="size")).check()
    bad = {error.number: str(error) for error in of_files}
    whole = [number for number in range(len(shards.manifest.shards)) if number not in bad]
    documents = tokens = 0
    with (
        ThreadPoolExecutor(THREADS) as pool,
        tqdm(desc=f"verify {shards}", total=len(shards.manifest.shards), unit=" shards", disable=None) as bar,
    ):
        for number, counts in zip(whole, pool.map(lambda number: _count(shards, number), whole), strict=True):
            if isinstance(counts, BadShard):
                bad[number] = str(counts)
            else:
                documents, tokens = documents + counts[0], tokens + counts[1]
            bar.update()
    wrong += [bad[number] for number in sorted(bad)]
    return wrong if bad else wrong + _wrong_counts(shards, documents, tokens)


def _count(shards: ShardSet, number: int) -> tuple[int, int] | BadShard:
    """Documents that end in a shard, and its tokens; or what is wrong with it."""
    documents = tokens = 0
    try:
        for rows in _rows(shards, number):
            documents += int((_inside(shards, rows) == shards.tokenizer.eos_id).sum())
            tokens += rows.size if shards.pad_id is None else int((rows != shards.pad_id).sum())
    except BadShard as error:
        return error
    return documents, tokens


def _inside(shards: ShardSet, rows: np.ndarray) -> np.ndarray:
    """Rows without the BOS and EOS that `wrapped` packing puts around each, which end no document."""
    return rows[:, 1:-1] if shards.manifest.packing == "wrapped" else rows


def _wrong_counts(shards: ShardSet, documents: int, tokens: int) -> list[str]:
    manifest = shards.manifest
    listed = {
        "documents": (documents, manifest.documents - manifest.dropped_documents),
        "tokens": (tokens, manifest.tokens),
    }
    return [
        f"{shards} holds {found:,} {what}, its {MANIFEST} says {said:,}: prepare the data again"
        for what, (found, said) in listed.items()
        if found != said
    ]


def _rows(shards: ShardSet, number: int) -> Iterator[np.ndarray]:
    """Sequences of a shard, in order, some thousands at a time: [n, length]."""
    before = sum(shard.sequences for shard in shards.manifest.shards[:number])
    end = before + shards.manifest.shards[number].sequences
    for start in range(before, end, SEQUENCES_AT_ONCE):
        yield shards.rows(np.arange(start, min(end, start + SEQUENCES_AT_ONCE)))


def _all_rows(shards: ShardSet, what: str) -> Iterator[np.ndarray]:
    numbers = range(len(shards.manifest.shards))
    for number in tqdm(numbers, desc=f"{what} {shards}", unit=" shards", disable=None):
        yield from _rows(shards, number)


# Inspect.


@dataclass
class Contents:
    """What a split holds. lengths: documents by the binary digits of their number of tokens, EOS left out."""

    folder: str
    manifest: Manifest
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(64, dtype=int))
    shown: list[str] = field(default_factory=list)

    @property
    def padding(self) -> float:
        """Share of all places."""
        return 1 - self.manifest.tokens / (self.manifest.sequences * self.manifest.length)

    def bins(self) -> list[tuple[int, int, int]]:
        """(least, most, documents) of each bin from the first to the last that is not empty."""
        there = np.flatnonzero(self.lengths)
        digits = range(there[0], there[-1] + 1) if len(there) else []
        return [(2**k // 2, 2**k - 1, int(self.lengths[k])) for k in map(int, digits)]

    def as_dict(self) -> dict:
        """For a --json file."""
        facts = self.manifest.model_dump(exclude={"shards", "index"})
        shards = len(self.manifest.shards)
        return facts | {"shards": shards, "padding": self.padding, "document_lengths": self.bins()}

    def lines(self) -> Iterator[str]:
        """For a reader."""
        m, ids = self.manifest, self.manifest.tokenizer
        yield f"{self.folder}: split {m.split} ({m.official_split}) of {m.recipe}, lomdm_dist {m.version}"
        mib = sum(shard.bytes for shard in m.shards) / 2**20
        yield (
            f"  {m.sequences:,} sequences of {m.length}, {m.packing}, {m.dtype}, in {len(m.shards)} shards "
            f"({mib:,.1f} MiB)"
        )
        yield f"  {m.tokens:,} tokens; padding is {self.padding:.1%} of all places"
        yield (
            f"  {m.documents:,} documents were read; the dropped tail has {m.dropped_tokens} tokens and ends "
            f"{m.dropped_documents} of them"
        )
        yield f"  {ids.vocab_size} ids: EOS {ids.eos_id}, mask {ids.mask_id}, padding {ids.pad_id}"
        yield f"  identity {m.identity}"
        yield "  documents by their length in tokens, as far as they end in the sequences:"
        most = max(1, *self.lengths)
        for least, greatest, count in self.bins():
            yield f"  {least:>9,} to {greatest:<9,} {count:>11,} {'#' * -(-40 * count // most)}".rstrip()
        yield f"  the first sequences ({DOCUMENT_END.strip()} ends a document):"
        for text in self.shown:
            yield f"  | {text}"


def inspect(folder: Path) -> list[Contents]:
    """What each split holds, and its first sequences as text. Raises UserError."""
    return [_contents(split) for split in split_folders(folder)]


def _contents(folder: Path) -> Contents:
    shards = ShardSet(folder)
    contents, facts = Contents(str(folder), shards.manifest), shards.tokenizer
    tokenizer = open_tokenizer(shards.tokenizer_folder(), facts)
    first = shards.rows(np.arange(min(SHOWN, len(shards))))
    contents.shown = [_shown(tokenizer, row, facts.eos_id, shards.pad_id) for row in _inside(shards, first)]
    open_tokens = 0  # of the document that goes on in the next rows
    for rows in _all_rows(shards, "inspect"):
        rows = _inside(shards, rows)
        stream = rows.reshape(-1) if shards.pad_id is None else rows[rows != shards.pad_id]
        ends = np.flatnonzero(stream == facts.eos_id)
        lengths = np.diff(ends, prepend=-1 - open_tokens) - 1
        np.add.at(contents.lengths, np.frexp(lengths)[1], 1)
        open_tokens = len(stream) - 1 - ends[-1] if len(ends) else open_tokens + len(stream)
    return contents


def _shown(tokenizer, row: np.ndarray, eos_id: int, pad_id: int | None) -> str:
    """A sequence as text on one line, where documents end, and how much padding follows."""
    ids = row if pad_id is None else row[row != pad_id]
    pieces = np.split(ids, np.flatnonzero(ids == eos_id) + 1)
    texts = [tokenizer.decode(piece[piece != eos_id]) for piece in pieces]
    text = " ".join(DOCUMENT_END.join(texts).split())
    text = text if len(text) <= LETTERS_SHOWN else f"{text[:LETTERS_SHOWN]}..."
    return text + (f" (and {len(row) - len(ids)} padding)" if len(ids) < len(row) else "")


# Reshard.


def reshard(folder: Path, out: Path, shard_mib: float) -> list[Manifest]:
    """The same sequences in the same order, in shards of another size, in a new OUT. Raises UserError."""
    check_shard_mib(shard_mib)
    splits = [ShardSet(split, ReadAgain()) for split in split_folders(folder)]
    for shards in splits:
        shards.check_extra()
        open_tokenizer(shards.tokenizer_folder(), shards.tokenizer)
    with new_folder(out) as partial:
        shutil.copytree(splits[0].tokenizer_folder(), partial / "tokenizer")
        if (folder / REQUEST).exists():
            request = json.loads((folder / REQUEST).read_text())
            request["shard_mib"] = shard_mib
            (partial / REQUEST).write_text(json.dumps(request, indent=1) + "\n")
        return [_reshard(shards, partial, shard_mib) for shards in splits]


def _reshard(shards: ShardSet, out: Path, shard_mib: float) -> Manifest:
    manifest = shards.manifest
    folder = out / manifest.split
    writer = ShardWriter(folder, manifest.length, shards.tokenizer.vocab_size, shard_mib)
    for rows in _all_rows(shards, "reshard"):
        writer.add(rows)
    of_the_writer = {"format", "sha256", "length", "dtype", "sequences", "index", "shards"}
    kept = {key: getattr(manifest, key) for key in Manifest.model_fields if key not in of_the_writer}
    return writer.close(**kept)
