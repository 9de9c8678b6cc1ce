import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
import zstandard

from lomdm_dist.data.prepare import Request, prepare, read_documents
from lomdm_dist.data.shards import ShardSet
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


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


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
    [{"length": 8}, {"vocab_size": 310}, {"packing": "padded"}, {"tokenizer": "wordpiece", "vocab_size": 60}],
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
        assert list(read_documents(request(path))) == TEXTS, path
    assert len(list(read_documents(request(tmp_path / "a.txt", sample_by="document")))) == 1
    assert list(read_documents(request(tmp_path / "a.txt", sample_by="line"))) == TEXTS


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
    ],
)
def test_bad_input_is_named_and_nothing_is_left(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(request(tmp_path / name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ending", ["txt.gz", "txt.zst", "jsonl.zst"])
def test_a_compressed_file_that_was_cut_short_is_refused(tmp_path, ending):
    lines = [json.dumps({"text": text}) if "json" in ending else text for text in TEXTS * 2000]
    raw = "\n\n".join(lines).encode()
    whole = gzip.compress(raw) if ending.endswith("gz") else zstandard.compress(raw)
    (tmp_path / f"a.{ending}").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cannot read input .*a\."):
        list(read_documents(request(tmp_path / f"a.{ending}")))


def test_odd_characters_survive_or_are_replaced(tmp_path):
    texts = ["\ufeffstarts with a mark", "emoji \U0001f600 é", "half a pair \ud83d here", "null \x00 byte"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines)
    expected = [text.replace("\ud83d", "\ufffd") for text in texts]
    assert list(read_documents(request(tmp_path / "a.jsonl"))) == expected
    prepare(request(tmp_path / "a.jsonl", length=4, valid_fraction=0.5, vocab_size=260), tmp_path / "out")


@pytest.mark.parametrize("role", ["mask_token", "pad_token"])
def test_a_tokenizer_whose_specials_are_text_is_refused(tmp_path, corpus, role):
    tokenizer = train_tokenizer("wordpiece", iter(["the quick brown fox"]), 30)
    setattr(tokenizer, role, "[UNK]")  # which most of the corpus becomes
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=f"{role.split('_')[0]}.* token .* is also text"):
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
        ({"inputs": ("nowhere.txt",)}, "no input file nowhere.txt"),
        ({"vocab_size": None}, "give --vocab-size"),
        ({"tokenizer": "nowhere/tokenizer", "vocab_size": None}, "cannot load tokenizer nowhere/tokenizer"),
        ({"length": 1}, "a sequence has 2 to"),
        ({"vocab_size": -5}, "--vocab-size -5: give 8 to"),
        ({"vocab_size": 2**40}, "give 8 to"),
        ({"valid_fraction": 1.5}, "not between 0 and 1"),
        ({"length": 100_000}, "not one whole sequence of 100000 tokens"),
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
