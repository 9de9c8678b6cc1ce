"""Raw text -> tokenizer and token shards: `lomdm prepare`.

    OUT/request.json   what was asked, to know whether OUT can be reused
    OUT/tokenizer/     in Hugging Face form
    OUT/train/, ...    token shards of each split (lomdm_dist.data.shards)

This process reads documents and cuts them into batches, workers encode (lomdm_dist.data.encode), and
this process packs and writes, in order: the result is the same for any number of workers.

The work goes on in .OUT.unfinished and is renamed at the end: OUT is whole or absent. There, whenever
a shard was written, `.state.npz` says how far the work is; after a kill the same command goes on.
"""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from lomdm_dist import __version__
from lomdm_dist.data.documents import HUB, Meter, clean_unicode, count_hub, read_any
from lomdm_dist.data.encode import Encoding, available_cores, encode_in_order, in_valid
from lomdm_dist.data.inspect import REQUEST, check_shard_mib, verify
from lomdm_dist.data.pack import STATE, DamagedWork, Work
from lomdm_dist.data.recipes import RECIPES, files_by_split, read
from lomdm_dist.data.shards import (
    MANIFEST,
    SHARD_MIB,
    read_manifest,
    token_dtype,
)
from lomdm_dist.data.tokenizer import TRAINED, bos_id, describe, ensure_pad, load_tokenizer, train_tokenizer
from lomdm_dist.errors import UserError
from lomdm_dist.files import check_new, sha256, write_atomically

TEXT, TRAIN_AND_VALID = "text", ("train", "valid")
LOCK = ".lock"  # what is hidden does not go into OUT
LONGEST, LARGEST_VOCABULARY, MOST_WORKERS = 2**20, 2**24, 1024
# A batch is so small that many fit into memory, and so large that handing it over costs nothing.
LETTERS_A_BATCH, DOCUMENTS_A_BATCH = 10**6, 8192

Files = dict[str, list[str]]  # what is read for each split, for TEXT of a plain request, in order


@dataclass(frozen=True)
class Request:
    """What to prepare: inputs by a recipe. `sample_by` says what a document is in plain text files."""

    inputs: tuple[str, ...]  # none: the recipe's data set from the hub
    tokenizer: str
    length: int
    vocab_size: int | None = None  # of a tokenizer trained here
    packing: str = "packed"
    valid_fraction: float = 0.05  # of documents held out; 0: none
    sample_by: str = "paragraph"
    text_field: str = "text"
    recipe: str = TEXT
    splits: tuple[str, ...] = TRAIN_AND_VALID
    valid_inputs: tuple[str, ...] = ()  # of TEXT: files of its own for validation, in place of a fraction
    shard_mib: float = SHARD_MIB

    def check(self) -> None:
        """Raises UserError before anything is read or written."""
        least = 3 if self.packing == "wrapped" else 2
        if not least <= self.length <= LONGEST:
            raise UserError(
                f"--length {self.length}: a {self.packing} sequence has {least} to {LONGEST} tokens"
            )
        if self.vocab_size is not None and not 8 <= self.vocab_size <= LARGEST_VOCABULARY:
            raise UserError(f"--vocab-size {self.vocab_size}: give 8 to {LARGEST_VOCABULARY}")
        if not 0 <= self.valid_fraction < 1:
            raise UserError(f"--valid-fraction {self.valid_fraction} is not between 0 and 1")
        if self.tokenizer in TRAINED and self.recipe != TEXT:
            raise UserError(
                f"--tokenizer {self.tokenizer}: only `lomdm prepare {TEXT}` trains one; "
                "give a folder or a hub name"
            )
        if self.tokenizer in TRAINED and not self.vocab_size:
            raise UserError(f"--tokenizer {self.tokenizer} is trained here: give --vocab-size")
        if self.tokenizer not in TRAINED and self.vocab_size:
            raise UserError(f"--vocab-size is for {' and '.join(TRAINED)}; {self.tokenizer} has its own")
        check_shard_mib(self.shard_mib)

    def files(self) -> Files:
        """What is read for each split. UserError where a file is not there, or is none of the recipe's."""
        if self.recipe != TEXT:
            return files_by_split(self.recipe, self.splits, self.inputs) if self.inputs else {}
        given: dict[str | Path, str] = {}
        for name in (*self.inputs, *self.valid_inputs):
            place = name if name.startswith(HUB) else Path(name).resolve()
            if place in given:
                raise UserError(f"input {name} is given twice, as {given[place]} too: leave one out")
            given[place] = name
            if name == HUB:
                raise UserError(f"input {name} names no data set: {HUB}NAME or {HUB}NAME:SPLIT")
            if not name.startswith(HUB) and not Path(name).is_file():
                folder = "is a folder: name its files" if Path(name).is_dir() else "does not exist"
                raise UserError(f"input {name} {folder} (a hub data set is written {HUB}NAME)")
        if self.valid_inputs:
            return {"train": list(self.inputs), "valid": list(self.valid_inputs)}
        return {TEXT: list(self.inputs)}

    @property
    def hashed_fraction(self) -> float | None:
        """Share of documents that their hash puts into validation; None where the input says the split."""
        return self.valid_fraction if self.recipe == TEXT and not self.valid_inputs else None

    def fingerprint(self, files: Files) -> dict:
        """The request with the content of its inputs in place of their paths."""
        names = dict.fromkeys(itertools.chain.from_iterable(files.values()))
        content = {
            name: name if name.startswith(HUB) else sha256(Path(name))
            for name in tqdm(names, desc="checksums", disable=None, leave=False)
        }
        tokenizer = Path(self.tokenizer)
        given = {}
        if tokenizer.is_dir():
            given = {"tokenizer": {p.name: sha256(p) for p in sorted(tokenizer.iterdir()) if p.is_file()}}
        inputs = {split: [content[name] for name in names] for split, names in files.items()}
        full = asdict(self) | given | {"inputs": inputs, "version": __version__}
        del full["valid_inputs"]  # they stand among the inputs
        return json.loads(json.dumps(full))


def prepare(request: Request, out: Path, workers: int | None = None) -> tuple[dict, bool]:
    """Make OUT; returns (totals, reused). Raises UserError; never overwrites."""
    workers = available_cores() if workers is None else workers
    if not 1 <= workers <= MOST_WORKERS:
        raise UserError(f"--workers {workers}: give 1 to {MOST_WORKERS}")
    request.check()
    out, files = out.resolve(), request.files()
    if not out.name:
        raise UserError(f"--out {out} is no folder that can be made; give another")
    fingerprint = request.fingerprint(files)
    if (out / REQUEST).exists():
        _check_same_request(out, fingerprint, "shards")
        verify(out)
        return _totals(out, request.splits), True
    with _unfinished(out, fingerprint) as folder:
        if not all((folder / split / MANIFEST).exists() for split in request.splits):
            _make(request, files, folder, workers)
        for hidden in folder.rglob(".*"):  # what a kill left half written, too
            hidden.unlink()
        if out.exists():
            out.rmdir()
        folder.rename(out)
    return _totals(out, request.splits), False


def _check_same_request(folder: Path, fingerprint: dict, what: str) -> None:
    try:
        found = json.loads((folder / REQUEST).read_text())
        different = sorted(key for key in fingerprint if found.get(key) != fingerprint[key])
    except (OSError, ValueError, AttributeError):
        raise UserError(f"{folder / REQUEST} is damaged; give another --out, or delete {folder}") from None
    if different:
        raise UserError(
            f"{folder} holds {what} of another request (different: {', '.join(different)}); "
            "give another --out, or delete it"
        )


@contextlib.contextmanager
def _unfinished(out: Path, fingerprint: dict) -> Iterator[Path]:
    """The folder to work in, ours alone; kept for the same command where work would be lost. UserError."""
    folder = out.with_name(f".{out.name}.unfinished")
    try:
        check_new(out)
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "a")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None
    with lock, _sigterm_interrupts():
        _lock(lock, folder)
        if (folder / REQUEST).exists():
            _check_same_request(folder, fingerprint, "unfinished work")
        else:
            write_atomically(folder / REQUEST, json.dumps(fingerprint, indent=1) + "\n")
        try:
            yield folder
        except DamagedWork:
            raise
        except UserError as error:
            if (folder / STATE).exists():  # the hub or a file system may be away for a while only
                raise UserError(f"{error}; {_kept(folder)}") from error
            shutil.rmtree(folder)
            raise
        except OSError as error:  # a full disk, a dead worker
            raise OSError(f"{error}; {_kept(folder)}") from error
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; {_kept(folder)}") from None


def _kept(folder: Path) -> str:
    """What an unfinished folder is good for, in words."""
    if (folder / STATE).exists():
        return (
            f"{folder} keeps the finished shards: the same command goes on from there, for another delete it"
        )
    return "no shard was finished: the same command begins anew"


def _lock(lock, folder: Path) -> None:
    """Hold the lock until its file is closed; the system frees it when a process is killed. UserError."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the other may have finished and renamed the folder between opening and locking
        if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / LOCK)):
            return
    raise UserError(f"another `lomdm prepare` is at work in {folder}; wait for it, or give another --out")


@contextlib.contextmanager
def _sigterm_interrupts():
    """Within, SIGTERM is KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _totals(out: Path, splits: Iterable[str]) -> dict:
    """Counts over all splits."""
    manifests = [read_manifest(out / split) for split in splits]
    totals = {key: sum(getattr(m, key) for m in manifests) for key in ("sequences", "tokens", "documents")}
    facts = {key: getattr(manifests[0].tokenizer, key) for key in ("vocab_size", "mask_id", "eos_id")}
    kept = ("sequences", "tokens", "documents", "dropped_tokens")
    of_each = {m.split: {key: getattr(m, key) for key in kept} for m in manifests}
    return totals | facts | {"shards": sum(len(m.shards) for m in manifests), "splits": of_each}


def _make(request: Request, files: Files, folder: Path, workers: int) -> None:
    """Fill the folder, or what of it is still missing."""
    tokenizer = _tokenizer(request, files, folder / "tokenizer")
    facts = describe(tokenizer)
    never = {"mask": facts.mask_id, "EOS": facts.eos_id}
    if request.packing == "padded":
        never["padding"] = facts.pad_id
    dtype = token_dtype(facts.vocab_size)
    definition = tokenizer.backend_tokenizer.to_str()
    ends = bos_id(tokenizer), facts.eos_id
    work = Work(folder, request.splits, request.length, request.packing, request.shard_mib, facts, ends)
    if work.documents_in_all is None and (count := _count(request, files)):
        work.documents_in_all = count
        work.save()
    encoding = Encoding(definition, dtype, facts.eos_id, never, request.hashed_fraction)
    _encode(request, files, encoding, workers, work)
    recipe = RECIPES.get(request.recipe)
    official = {name: recipe.splits[name].official if recipe else name for name in request.splits}
    work.close(request.recipe, official, sorted(path.name for path in (folder / "tokenizer").iterdir()))


def _encode(request: Request, files: Files, encoding: Encoding, workers: int, work: Work) -> None:
    """Read, encode and pack all documents that were not packed before."""
    meter, size, tokens = Meter(), _size(files), 0
    documents = read_documents(request, files, meter, work.documents_in_all)
    if work.documents:
        tqdm.write(f"going on: {work.documents:,} documents were packed before", file=sys.stderr)
        for _ in _watched("skip", itertools.islice(documents, work.documents), meter, files):
            pass
    results = encode_in_order(_batches(documents), encoding, workers)
    unit = "B" if size else " tokens"
    with (
        contextlib.closing(results),
        tqdm(desc="prepare", total=size, unit=unit, unit_scale=True, disable=None) as bar,
    ):
        for split, encoded in results:
            work.add(split, encoded)
            tokens += len(encoded.ids)
            bar.update(meter.bytes - bar.n if size else len(encoded.ids))
            if size and not bar.disable:
                rate = tokens / max(bar.format_dict["elapsed"], 1e-3)
                bar.set_postfix_str(
                    f"{tqdm.format_sizeof(tokens)} tokens, {tqdm.format_sizeof(rate)} tokens/s", False
                )


def _tokenizer(request: Request, files: Files, folder: Path):
    """Made once and then loaded from its folder, so that going on later has the same one."""
    if not folder.exists():
        if request.tokenizer in TRAINED:
            meter = Meter()
            documents = _watched("tokenizer", read_documents(request, files, meter), meter, files)
            fraction = request.hashed_fraction
            train = (
                text
                for split, text in documents
                if split == "train" or (split is None and not in_valid(text, fraction))
            )
            tokenizer = train_tokenizer(request.tokenizer, train, request.vocab_size)
        else:
            tokenizer = load_tokenizer(request.tokenizer)
            if request.packing == "padded":
                ensure_pad(tokenizer)
        partial = folder.with_name(f".{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    return load_tokenizer(folder)


def read_documents(
    request: Request, files: Files, meter: Meter, in_all: int | None = None
) -> Iterator[tuple[str | None, str]]:
    """(split, text) of all non-empty documents, in order; split None where the text's hash decides."""
    for split, text in _read_splits(request, files, meter, in_all):
        text = clean_unicode(text)
        if text and not text.isspace():
            yield split, text


def _read_splits(request: Request, files: Files, meter: Meter, in_all: int | None):
    if request.recipe == TEXT:
        for split, names in files.items():
            for name in names:
                for text in read_any(name, meter, request.text_field, request.sample_by):
                    yield None if split == TEXT else split, text
    elif last := RECIPES[request.recipe].valid_from_the_end:
        for number, text in enumerate(_read_whole(request, files, meter)):
            split = "train" if number < in_all - last else "valid"
            if split in request.splits:
                yield split, text
    else:
        for split in request.splits:
            for text in read(request.recipe, split, files.get(split), meter):
                yield split, text


def _read_whole(request: Request, files: Files, meter: Meter) -> Iterator[str]:
    """The texts of a recipe whose validation split is the end of the one data set."""
    split = request.splits[0]
    return read(request.recipe, split, files.get(split), meter)


def _count(request: Request, files: Files) -> int | None:
    """Documents of a recipe whose validation split is the end of it, empty ones too; else None. UserError."""
    last = RECIPES[request.recipe].valid_from_the_end if request.recipe != TEXT else 0
    if not last:
        return None
    meter, source = Meter(), RECIPES[request.recipe].splits[request.splits[0]]
    count = None if files else count_hub(source.hub, source.hub_config)
    if count is None:
        count = sum(1 for _ in _watched("count", _read_whole(request, files, meter), meter, files))
    if count < 2 * last:
        raise UserError(
            f"{request.recipe} has {count:,} documents in these files; the last {last:,} are its validation "
            f"split, and fewer than {last:,} would be left for training: give all of its files"
        )
    return count


def _size(files: Files) -> int | None:
    """Bytes of all files, None where all comes from the hub."""
    names = {name for names in files.values() for name in names if not name.startswith(HUB)}
    return sum(Path(name).stat().st_size for name in names) or None


def _watched(what: str, documents: Iterable, meter: Meter, files: Files) -> Iterator:
    """The documents, with a progress bar."""
    with tqdm(desc=what, total=_size(files), unit="B", unit_scale=True, disable=None) as bar:
        for document in documents:
            yield document
            if not bar.disable:
                bar.update(meter.bytes - bar.n)


def _batches(documents: Iterable[tuple[str | None, str]]) -> Iterator[tuple[str | None, list[str]]]:
    """Documents of one split each, bounded in number and in size."""
    for split, group in itertools.groupby(documents, key=lambda document: document[0]):
        batch, letters = [], 0
        for _, text in group:
            batch.append(text)
            letters += len(text)
            if letters >= LETTERS_A_BATCH or len(batch) == DOCUMENTS_A_BATCH:
                yield split, batch
                batch, letters = [], 0
        if batch:
            yield split, batch
