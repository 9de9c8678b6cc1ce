import dataclasses
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard

from lomdm_dist.cli import main
from lomdm_dist.data import prepare as prepare_module
from lomdm_dist.data.documents import Meter
from lomdm_dist.data.encode import in_valid
from lomdm_dist.data.pack import pad
from lomdm_dist.data.prepare import Request, prepare, read_documents
from lomdm_dist.data.reader import Reader
from lomdm_dist.data.recipes import RECIPES
from lomdm_dist.data.shards import Manifest, ShardSet
from lomdm_dist.data.tokenizer import encode, load_tokenizer, open_tokenizer, train_tokenizer
from lomdm_dist.errors import UserError

TEXTS = [
    f"document {i}: the quick brown fox number {i * i} jumps [MASK] over <|endoftext|> it" for i in range(60)
]
CORPORA = Path(os.environ.get("LOMDM_CORPORA", Path(__file__).parents[3] / "shared/corpora"))


def request(path, **changes) -> Request:
    return Request(
        **({"inputs": (str(path),), "tokenizer": "bpe", "length": 16, "vocab_size": 300} | changes)
    )


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", TEXTS)


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    train_tokenizer("bpe", iter(TEXTS), 300).save_pretrained(folder)
    return str(folder)


def documents(request: Request) -> list[str]:
    return [text for _, text in read_documents(request, request.files(), Meter())]


def all_rows(folder) -> np.ndarray:
    shards = ShardSet(folder)
    return shards.rows(np.arange(len(shards)))


def test_every_document_survives_packing(corpus, tmp_path):
    """Decoded and cut at EOS, the two splits give back the documents, but for the dropped tail."""
    totals, reused = prepare(request(corpus), tmp_path / "out")
    assert not reused and totals["documents"] == len(TEXTS)
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer")
    found = []
    for split in ("train", "valid"):
        rows = all_rows(tmp_path / "out" / split).flatten()
        assert tokenizer.mask_token_id not in rows and tokenizer.pad_token_id not in rows
        ends = np.flatnonzero(rows == tokenizer.eos_token_id)
        starts = [0, *(ends + 1)]
        found += [tokenizer.decode(rows[a:b]) for a, b in zip(starts, ends, strict=False)]
    assert set(found) <= set(TEXTS) and len(found) >= len(TEXTS) - 2
    assert len(found) == len(set(found))


def test_padded_sequences_hold_one_document_each(corpus, tmp_path):
    prepare(request(corpus, packing="padded", length=64), tmp_path / "out")
    shards = ShardSet(tmp_path / "out/train")
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer")
    rows = shards.rows(np.arange(len(shards)))
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id}) == 3
    _, valid = shards.batch(np.arange(len(shards)), "cpu")
    assert valid.sum().item() == shards.manifest.tokens
    for row, real in zip(rows, valid.numpy(), strict=True):
        text = tokenizer.decode(row[real][:-1])
        assert row[real][-1] == tokenizer.eos_token_id and text in TEXTS
    assert len(shards) == shards.manifest.documents
    prepare(request(corpus, packing="padded", length=8), tmp_path / "short")  # long documents are cut
    assert ShardSet(tmp_path / "short/train").manifest.tokens == shards.manifest.tokens


def test_the_same_request_is_reused_and_gives_the_same_bytes_elsewhere(corpus, tmp_path):
    prepare(request(corpus), tmp_path / "a")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")}
    assert prepare(request(corpus), tmp_path / "a")[1]
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")}
    prepare(request(corpus), tmp_path / "b")
    for name in ("train/00000.tar", "valid/00000.tar", "train/manifest.json", "tokenizer/tokenizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize(
    "change",
    [
        {"length": 8},
        {"vocab_size": 310},
        {"packing": "padded"},
        {"tokenizer": "wordpiece", "vocab_size": 60},
        {"shard_mib": 2},
    ],
)
def test_another_request_never_overwrites(corpus, tmp_path, change):
    prepare(request(corpus), tmp_path / "out")
    with pytest.raises(UserError, match=f"another request .different: .*{next(iter(change))}"):
        prepare(request(corpus, **change), tmp_path / "out")
    corpus.write_text(corpus.read_text() + json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(UserError, match="different: inputs"):
        prepare(request(corpus), tmp_path / "out")


def test_a_foreign_folder_is_left_alone(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="nothing is overwritten"):
        prepare(request(corpus), tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["thesis.txt"]


def test_all_input_forms_hold_the_same_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    plain = "\n\n".join(TEXTS).encode()
    jsonl = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (tmp_path / "a.txt").write_bytes(plain)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(plain))
    (tmp_path / "a.jsonl").write_bytes(jsonl)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(jsonl))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "a.parquet")
    for path in tmp_path.iterdir():
        assert documents(request(path)) == TEXTS, path
    assert len(documents(request(tmp_path / "a.txt", sample_by="document"))) == 1
    assert documents(request(tmp_path / "a.txt", sample_by="line")) == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text":', "line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"line 1 has no field 'text' \(fields body\)"),
        ("a.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
        ("a.txt.gz", b"not gzip", "cannot read input"),
        ("a.parquet", b"not parquet", "cannot read parquet"),
        ("a.jsonl", b'{"text": 3}\n', "field 'text' is not text but int"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.txt", b"", "this text makes 259 bpe tokens"),
        ("a.jsonl", b'[{"text": "x"}]\n', "one object a line is wanted"),
        ("a.tar.zst", b"x", r"this kind of file is not read; give \.txt"),
        ("a.CSV", b"a,b", r"this kind of file is not read; give \.txt"),
        ("a.TAR", b"x", "cannot read archive"),
    ],
)
def test_bad_input_is_named_and_nothing_is_left(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(request(tmp_path / name), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == [name]


@pytest.mark.parametrize("ending", ["txt.gz", "txt.zst", "jsonl.zst"])
def test_a_compressed_file_that_was_cut_short_is_refused(tmp_path, ending):
    lines = [json.dumps({"text": text}) if "json" in ending else text for text in TEXTS * 2000]
    raw = "\n\n".join(lines).encode()
    whole = gzip.compress(raw) if ending.endswith("gz") else zstandard.compress(raw)
    (tmp_path / f"a.{ending}").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cannot read input .*a\."):
        documents(request(tmp_path / f"a.{ending}"))


def test_odd_characters_survive_or_are_replaced(tmp_path):
    texts = ["\ufeffstarts with a mark", "emoji \U0001f600 é", "half a pair \ud83d here", "null \x00 byte"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines)
    expected = [text.replace("\ud83d", "\ufffd") for text in texts]
    assert documents(request(tmp_path / "a.jsonl")) == expected
    prepare(request(tmp_path / "a.jsonl", length=4, valid_fraction=0.5, vocab_size=260), tmp_path / "out")


@pytest.mark.parametrize("role", ["mask_token", "pad_token", "eos_token"])
def test_a_tokenizer_whose_specials_are_text_is_refused(tmp_path, corpus, role):
    tokenizer = train_tokenizer("wordpiece", iter(["the quick brown fox"]), 30)
    setattr(tokenizer, role, "[UNK]")  # which most of the corpus becomes
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=f"(?i){role.split('_')[0]}.* token .* is also text"):
        prepare(
            request(corpus, tokenizer=str(tmp_path / "tokenizer"), vocab_size=None, packing="padded"),
            tmp_path / "out",
        )


def test_eos_and_mask_must_differ(tmp_path):
    tokenizer = train_tokenizer("bpe", iter(TEXTS), 300)
    tokenizer.mask_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match="one id for its EOS and its mask"):
        load_tokenizer(tmp_path / "tokenizer")


def test_what_is_reused_is_verified(corpus, tmp_path):
    prepare(request(corpus), tmp_path / "out")
    (tmp_path / "out/valid/00000.tar").unlink()
    with pytest.raises(UserError, match=r"00000\.tar is missing"):
        prepare(request(corpus), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": ("nowhere.txt",)}, "input nowhere.txt does not exist"),
        ({"vocab_size": None}, "give --vocab-size"),
        ({"tokenizer": "nowhere/tokenizer", "vocab_size": None}, "cannot load tokenizer nowhere/tokenizer"),
        ({"length": 1}, "a packed sequence has 2 to"),
        ({"vocab_size": -5}, "--vocab-size -5: give 8 to"),
        ({"vocab_size": 2**40}, "give 8 to"),
        ({"valid_fraction": 1.5}, "not between 0 and 1"),
        ({"length": 100_000}, "not one whole sequence of 100000 tokens"),
        ({"shard_mib": float("nan")}, "--shard-mib nan: give more than 0"),
        ({"inputs": ("README.md", "./README.md")}, "input ./README.md is given twice, as README.md too"),
        ({"inputs": ("README.md",), "valid_inputs": ("README.md",)}, "is given twice"),
        ({"inputs": ("hf:",)}, "input hf: names no data set"),
        ({"inputs": (".",)}, "input . is a folder: name its files"),
        ({"recipe": "ptb", "vocab_size": None}, "only `lomdm prepare text` trains one"),
    ],
)
def test_impossible_requests(corpus, tmp_path, change, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message):
        prepare(request(corpus, **change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "vocab_size", "mask_id"), [("gpt2", 50_258, 50_257), ("bert-base-uncased", 30_522, 103)]
)
def test_the_two_tokenizers_of_the_paper(tmp_path, corpus, name, vocab_size, mask_id):
    folder = CORPORA / "tokenizers" / name
    if not folder.exists():
        pytest.skip(f"no tokenizer in {folder}; set LOMDM_CORPORA to a folder with tokenizers/{name}")
    prepare(request(corpus, tokenizer=str(folder), vocab_size=None), tmp_path / "out")
    facts = ShardSet(tmp_path / "out/train").tokenizer
    assert (facts.vocab_size, facts.mask_id) == (vocab_size, mask_id)
    open_tokenizer(tmp_path / "out/tokenizer", facts)
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer")
    assert mask_id not in encode(tokenizer, ["a [MASK] in plain text, [SEP] and <|endoftext|>"])[0]
    prepare(request(corpus, tokenizer=str(folder), vocab_size=None, packing="padded"), tmp_path / "padded")
    facts = ShardSet(tmp_path / "padded/train").tokenizer
    assert len({facts.pad_id, facts.eos_id, facts.mask_id}) == 3
    open_tokenizer(tmp_path / "padded/tokenizer", facts)


# Packing.


def random_texts(number: int) -> list[str]:
    """Of one letter up to many sequences, with characters of one to four bytes."""
    random = np.random.default_rng(0)
    letters = list("abcdefg  \n.é漢\U0001f600")
    sizes = (random.pareto(0.7, number) * 4).astype(int).clip(1, 3000)
    return ["".join(random.choice(letters, size)) + str(i) for i, size in enumerate(sizes)]


def read_shuffled(folder: Path) -> np.ndarray:
    """One epoch as two ranks read it, stopped in the middle and gone on with by one; put back in order."""
    reader, batch = Reader([ShardSet(folder)], seed=1), 8
    steps = -(-len(reader) // batch)
    rows = [reader.stream(rank * 4, batch, 4, workers=rank) for rank in range(2)]
    first = [next(rows[rank]).ids for _ in range(steps // 2) for rank in range(2)]
    resumed = Reader([ShardSet(folder)], seed=1).stream(steps // 2 * batch, batch, batch, workers=1)
    second = [next(resumed).ids for _ in range(steps - steps // 2)]
    epoch = np.concatenate([ids.numpy() for ids in first + second])[: len(reader)]
    _, indices = reader.order.at(0, len(reader))
    assert not np.array_equal(indices, np.sort(indices))
    out = np.empty_like(epoch)
    out[indices] = epoch
    return out


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_thousand_random_documents_survive_packing(tmp_path, packing, monkeypatch):
    monkeypatch.setattr(prepare_module, "LETTERS_A_BATCH", 4000)
    texts = random_texts(1000)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    totals, _ = prepare(request(path, packing=packing, valid_fraction=0.2), tmp_path / "out", workers=2)
    assert totals["documents"] == 1000
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer")
    for split, here in (("train", False), ("valid", True)):
        expected = [text for text in texts if in_valid(text, 0.2) == here]
        shards = ShardSet(tmp_path / "out" / split)
        rows, manifest = read_shuffled(tmp_path / "out" / split), shards.manifest
        stream = rows[rows != shards.pad_id] if packing == "padded" else rows.flatten()
        ends = np.flatnonzero(stream == tokenizer.eos_token_id)
        found = [tokenizer.decode(ids[:-1]) for ids in np.split(stream, ends + 1)[:-1]]
        assert found == expected[: len(found)] and len(expected) == manifest.documents
        assert len(ends) == manifest.documents - manifest.dropped_documents
        assert manifest.tokens == len(stream) and manifest.dropped_tokens < 16
        if packing == "padded":
            assert len(found) == len(expected) and manifest.dropped_tokens == 0
            begins = np.concatenate([[True], (rows == tokenizer.eos_token_id).any(1)[:-1]])
            assert begins.sum() == len(expected)  # no document begins within a row


def test_padding_by_hand():
    rows = pad(np.array([5, 6, 0, 7, 0, 1, 2, 3, 4, 0, 0]), np.array([3, 2, 5, 1]), 4, 9)
    assert rows.tolist() == [[5, 6, 0, 9], [7, 0, 9, 9], [1, 2, 3, 4], [0, 9, 9, 9], [0, 9, 9, 9]]


# Workers, and going on after a kill.


@pytest.fixture
def many(tmp_path, tiny_tokenizer, monkeypatch) -> Request:
    """So much text in so small batches and shards that there are dozens of commits."""
    monkeypatch.setattr(prepare_module, "LETTERS_A_BATCH", 3000)
    path = write_jsonl(tmp_path / "many.jsonl", [f"{text} and {i}" for i, text in enumerate(TEXTS * 25)])
    return request(path, tokenizer=tiny_tokenizer, vocab_size=None, valid_fraction=0.3, shard_mib=0.001)


@pytest.fixture
def undisturbed(many, tmp_path) -> dict:
    prepare(many, tmp_path / "undisturbed", workers=1)
    assert len(list((tmp_path / "undisturbed").rglob("*.tar"))) > 10
    return content(tmp_path / "undisturbed")


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def at_commit(monkeypatch, number: int, action) -> None:
    """Do something right after a commit."""
    save, commits = prepare_module.Work.save, []

    def save_and_act(work):
        save(work)
        commits.append(work.documents)
        if len(commits) == number:
            action()

    monkeypatch.setattr(prepare_module.Work, "save", save_and_act)


def test_any_number_of_workers_gives_the_same_bytes(many, undisturbed, tmp_path):
    prepare(many, tmp_path / "out", workers=2)
    assert content(tmp_path / "out") == undisturbed


KILLED = """
import os, signal, sys
from pathlib import Path
from lomdm_dist.data import prepare as module
from lomdm_dist.data.shards import ShardWriter

request, out, owner, name, number = eval(sys.argv[1], vars(module)), *sys.argv[2:]
owner, times = {"work": module.Work, "writer": ShardWriter}[owner], []
original = getattr(owner, name)

def and_kill(*arguments):
    original(*arguments)
    times.append(0)
    if len(times) == int(number):
        os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, name, and_kill)
module.LETTERS_A_BATCH = 3000
module.prepare(request, Path(out), workers=2)
"""


def processes_of(mark: str) -> list[int]:
    """Those that have the mark in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def kill_at(request: Request, out: Path, owner: str, name: str, number: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "LOMDM_TEST_MARK": str(out)}
    command = [sys.executable, "-c", KILLED, repr(request), str(out), owner, name, str(number)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    until = time.monotonic() + 20
    while alive := processes_of(f"LOMDM_TEST_MARK={out}"):
        assert time.monotonic() < until, f"workers {alive} outlive their parent"
        time.sleep(0.05)


def test_killed_twice_and_gone_on_gives_the_same_bytes(many, undisturbed, tmp_path, monkeypatch):
    """Once right after a commit, once between a shard and its commit; no worker stays behind."""
    out, folder = tmp_path / "out", tmp_path / ".out.unfinished"
    kill_at(many, out, "work", "save", 3)
    assert not out.exists() and (folder / prepare_module.STATE).exists()
    kill_at(many, out, "writer", "_write", 4)
    encoded = []
    original = prepare_module.encode_in_order

    def count_and_encode(batches, *rest):
        return original((encoded.extend(texts) or (key, texts) for key, texts in batches), *rest)

    monkeypatch.setattr(prepare_module, "encode_in_order", count_and_encode)
    totals, _ = prepare(many, out, workers=1)
    assert content(out) == undisturbed and not folder.exists()
    assert 0 < len(encoded) < 0.9 * totals["documents"]


def test_a_dead_worker_is_an_error_and_the_work_goes_on(many, undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_commit(patch, 2, lambda: multiprocessing.active_children()[0].kill())
        with pytest.raises(OSError, match=r"encoding worker died.*the same command goes on from there"):
            prepare(many, tmp_path / "out", workers=2)
    assert not (tmp_path / "out").exists()
    prepare(many, tmp_path / "out", workers=2)
    assert content(tmp_path / "out") == undisturbed


def test_sigterm_and_a_full_disk_keep_the_work(many, undisturbed, tmp_path, monkeypatch):
    def fill_the_disk():
        raise OSError(28, "No space left on device")

    before = signal.getsignal(signal.SIGTERM)
    for error, action in (
        (KeyboardInterrupt, lambda: os.kill(os.getpid(), signal.SIGTERM)),
        (OSError, fill_the_disk),
    ):
        with monkeypatch.context() as patch:
            at_commit(patch, 2, action)
            with pytest.raises(error, match="unfinished keeps the finished shards: the same command goes on"):
                prepare(many, tmp_path / "out", workers=1)
    assert signal.getsignal(signal.SIGTERM) == before
    prepare(many, tmp_path / "out", workers=1)
    assert content(tmp_path / "out") == undisturbed


def test_a_stop_at_the_very_end_loses_nothing(many, undisturbed, tmp_path, monkeypatch):
    """After one split's manifest, and before OUT has its name: then nothing is read again."""
    out, write, rename = tmp_path / "out", Manifest.write, Path.rename

    def write_and_stop(manifest, folder):
        write(manifest, folder)
        raise KeyboardInterrupt

    def stop_before_the_end(path, target):
        if target == out:
            raise KeyboardInterrupt
        rename(path, target)

    for owner, name, stop in ((Manifest, "write", write_and_stop), (Path, "rename", stop_before_the_end)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stop)
            with pytest.raises(KeyboardInterrupt):
                prepare(many, out, workers=1)
        assert not out.exists()
    (tmp_path / ".out.unfinished/.request.json.123").touch()  # of a kill amid writing
    monkeypatch.setattr(prepare_module, "_make", None)
    prepare(many, out, workers=1)
    assert content(out) == undisturbed


def test_unfinished_work_of_another_request_is_left_alone(many, tmp_path, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    at_commit(monkeypatch, 1, stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(many, tmp_path / "out", workers=1)
    before = content(tmp_path / ".out.unfinished")
    message = r"\.out\.unfinished holds unfinished work of another request .different: length.*delete it"
    with pytest.raises(UserError, match=message):
        prepare(dataclasses.replace(many, length=8), tmp_path / "out", workers=1)
    assert content(tmp_path / ".out.unfinished") == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / prepare_module.STATE).write_bytes(b"junk"),
        lambda folder: (folder / prepare_module.STATE).write_bytes(
            (folder / prepare_module.STATE).read_bytes()[:300]
        ),
        lambda folder: (folder / "train/00000.tar").unlink(),
        lambda folder: (folder / "train/00000.tar").write_bytes(b"x" * 10_240),
    ],
)
def test_damaged_unfinished_work_is_named_and_never_published(many, tmp_path, damage):
    out, folder = tmp_path / "out", tmp_path / ".out.unfinished"
    kill_at(many, out, "work", "save", 3)
    damage(folder)
    with pytest.raises(UserError, match=r"(is damaged .*|is missing or altered): delete "):
        prepare(many, out, workers=1)
    assert not out.exists()


def test_what_does_not_belong_into_unfinished_work_goes(many, undisturbed, tmp_path):
    out, folder = tmp_path / "out", tmp_path / ".out.unfinished"
    kill_at(many, out, "work", "save", 3)
    (folder / "train/zzz.tar").write_bytes(b"")
    prepare(many, out, workers=1)
    assert content(out) == undisturbed


def test_validation_files_of_ones_own_and_no_validation(tmp_path, tiny_tokenizer):
    train = write_jsonl(tmp_path / "train.jsonl", TEXTS[:40])
    valid = write_jsonl(tmp_path / "valid.jsonl", TEXTS[40:])
    given = {"tokenizer": tiny_tokenizer, "vocab_size": None, "length": 64, "packing": "padded"}
    prepare(request(train, valid_inputs=(str(valid),), **given), tmp_path / "both")
    prepare(request(train, splits=("train",), valid_fraction=0.0, **given), tmp_path / "one")
    assert texts_of(tmp_path / "both/train") == texts_of(tmp_path / "one/train") == TEXTS[:40]
    assert texts_of(tmp_path / "both/valid") == TEXTS[40:]
    assert not (tmp_path / "one/valid").exists()
    new = request(train, valid_inputs=(str(valid),), length=4)  # a tokenizer is trained on train alone
    prepare(new, tmp_path / "new")
    prepare(request(train, splits=("train",), valid_fraction=0.0, length=4), tmp_path / "alone")
    trained = [(tmp_path / out / "tokenizer/tokenizer.json").read_bytes() for out in ("new", "alone")]
    assert trained[0] == trained[1]


def test_two_at_the_same_time_are_refused(many, undisturbed, tmp_path, monkeypatch):
    def again():
        with pytest.raises(UserError, match="another `lomdm prepare` is at work in"):
            prepare(many, tmp_path / "out", workers=1)

    at_commit(monkeypatch, 1, again)
    prepare(many, tmp_path / "out", workers=1)
    assert content(tmp_path / "out") == undisturbed


def test_bad_input_after_a_commit_says_where_the_work_lies(many, tmp_path):
    path = Path(many.inputs[0])
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(UserError, match=r"is not JSON: .*; .*\.out\.unfinished keeps the finished shards"):
        prepare(many, tmp_path / "out", workers=1)


# Recipes.


def texts_of(split: Path) -> list[str]:
    """Of padded sequences."""
    shards = ShardSet(split)
    tokenizer = load_tokenizer(split.parent / "tokenizer")
    rows = shards.rows(np.arange(len(shards)))
    return [tokenizer.decode(row[(row != shards.pad_id) & (row != tokenizer.eos_token_id)]) for row in rows]


def recipe_request(name: str, folder: Path | None, tokenizer: str, *splits: str) -> Request:
    inputs = (str(folder),) if folder else ()
    return Request(inputs, tokenizer, 256, packing="padded", recipe=name, splits=splits)


def test_a_zero_shot_recipe_end_to_end(tmp_path, tiny_tokenizer, capsys):
    folder, out = tmp_path / "ptb", tmp_path / "out"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"ptb.{split}.txt").write_text(f" the {split} index fell N <unk> \n" * 30)
    command = [
        "prepare",
        "ptb",
        "--input",
        folder,
        "--tokenizer",
        tiny_tokenizer,
        "--length",
        8,
        "--out",
        out,
    ]
    main([str(word) for word in [*command, "--json", tmp_path / "r.json", "--splits", "test", "valid"]])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"prepared {out}: ") and said[1].startswith(
        "  valid: 82 sequences, 656 tokens, 30"
    )
    assert said[3].endswith(f"model.length=8 data.valid={out}/valid")
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["documents"] == 60 and not result["reused"] and result["config"]["recipe"] == "ptb"
    manifest = ShardSet(out / "test").manifest
    assert (manifest.recipe, manifest.split, manifest.official_split) == ("ptb", "test", "test")
    assert ShardSet(out / "valid").manifest.official_split == "validation"
    assert manifest.tokenizer_files == sorted(os.listdir(out / "tokenizer"))
    assert sorted(os.listdir(out)) == ["request.json", "test", "tokenizer", "valid"]
    tokenizer = load_tokenizer(out / "tokenizer")
    assert tokenizer.decode(all_rows(out / "test").flatten()).startswith(
        "the test index fell 1 ?<|endoftext|>"
    )
    main([str(word) for word in [*command, "--splits", "valid", "test"]])
    assert capsys.readouterr().out.startswith(f"reused {out}")


def test_a_recipe_from_the_hub(tmp_path, tiny_tokenizer, monkeypatch):
    import datasets

    passages = [{"text": f"passage {i}"} for i in range(5)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter(passages))
    prepare(recipe_request("lambada", None, tiny_tokenizer, "test"), tmp_path / "out")
    assert texts_of(tmp_path / "out/test") == [f"passage {i}" for i in range(5)]


@pytest.mark.parametrize("splits", [("train", "valid"), ("valid",), ("train",)])
def test_the_last_pages_of_openwebtext_are_validation(tmp_path, tiny_tokenizer, monkeypatch, splits):
    import datasets

    monkeypatch.setitem(RECIPES, "owt", dataclasses.replace(RECIPES["owt"], valid_from_the_end=5))
    pages = [f"page {i}" if i != 16 else "" for i in range(18)]  # an empty one counts, as in the original
    write_jsonl(tmp_path / "train.jsonl", pages)
    prepare(recipe_request("owt", tmp_path, tiny_tokenizer, *splits), tmp_path / "out")
    expected = {"train": pages[:13], "valid": [*pages[13:16], pages[17]]}
    assert {split: texts_of(tmp_path / "out" / split) for split in splits} == {s: expected[s] for s in splits}

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([{"text": page} for page in pages]))
    info = SimpleNamespace(splits={"train": SimpleNamespace(num_examples=18)})  # the hub has counted
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: SimpleNamespace(info=info))
    prepare(recipe_request("owt", None, tiny_tokenizer, *splits), tmp_path / "hub")
    assert {split: texts_of(tmp_path / "hub" / split) for split in splits} == {s: expected[s] for s in splits}

    write_jsonl(tmp_path / "train.jsonl", pages[:9])
    message = "owt has 9 documents in these files; the last 5 are its validation split, and fewer than 5"
    with pytest.raises(UserError, match=message):
        prepare(recipe_request("owt", tmp_path, tiny_tokenizer, *splits), tmp_path / "less")
