import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from lomdm_dist.cli import main
from lomdm_dist.data.inspect import inspect, reshard, verify
from lomdm_dist.data.prepare import Request, prepare
from lomdm_dist.data.shards import Manifest, ShardSet, read_manifest
from lomdm_dist.errors import UserError

TEXTS = [f"document {i}: " + "a word and another " * (i % 7) for i in range(1500)]


@pytest.fixture(scope="module", params=["packed", "padded"])
def made(request, tmp_path_factory) -> Path:
    """Some texts in several shards."""
    folder = tmp_path_factory.mktemp(request.param)
    text = folder / "text.txt"
    text.write_text("\n".join(TEXTS))
    asked = Request((str(text),), "bpe", 16, 300, request.param, 0.3, sample_by="line", shard_mib=0.001)
    prepare(asked, folder / "out", workers=1)
    return folder / "out"


@pytest.fixture
def copy(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "out"))


def rows(split: Path) -> np.ndarray:
    shards = ShardSet(split)
    return shards.rows(np.arange(len(shards)))


def test_what_is_whole_is_said_a_line_a_split(made, capsys):
    main(["prepare", "verify", str(made)])
    said = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in said] == ["whole: train", "whole: valid"]
    main(["prepare", "verify", str(made / "valid")])
    assert capsys.readouterr().out.splitlines() == said[1:]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1500] ^= 1
    path.write_bytes(content)


def rewrite(split: Path, **changes) -> None:
    """Change a manifest and sign it again."""
    manifest = read_manifest(split).model_dump() | changes | {"sha256": ""}
    Manifest(**manifest).write(split)


def other_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer/tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))


DAMAGE = {
    "shard gone": (lambda f: (f / "train/00001.tar").unlink(), r"train/00001\.tar is missing"),
    "cut": (lambda f: os.truncate(f / "valid/00000.tar", 1000), r"valid/00000\.tar has 1000 bytes"),
    "altered": (lambda f: flip(f / "train/00000.tar"), r"train/00000\.tar was altered"),
    "extra": (lambda f: shutil.copy(f / "train/00000.tar", f / "train/77.tar"), r"holds 77\.tar, which"),
    "edited": (
        lambda f: (f / "train/manifest.json").write_text(
            (f / "train/manifest.json").read_text().replace('"packing": "pa', '"packing":  "pa')
        ),
        None,
    ),
    "count edited": (
        lambda f: (f / "train/manifest.json").write_text(
            (f / "train/manifest.json").read_text().replace('"dropped_tokens": ', '"dropped_tokens": 1')
        ),
        "the file was edited",
    ),
    "documents": (
        lambda f: rewrite(f / "train", documents=read_manifest(f / "train").documents + 1),
        r"train holds [\d,]+ documents, its manifest.json says [\d,]+",
    ),
    "tokens": (
        lambda f: rewrite(f / "valid", tokens=7),
        r"valid holds [\d,]+ tokens, its manifest.json says 7",
    ),
    "manifest gone": (lambda f: (f / "valid/manifest.json").unlink(), "no token shards in .*valid"),
    "split gone": (lambda f: shutil.rmtree(f / "valid"), "no token shards in .*valid"),
    "no tokenizer": (lambda f: shutil.rmtree(f / "tokenizer"), "tokenizer.json is missing: put"),
    "other tokenizer": (other_tokenizer, "is not the one that was recorded"),
    "request": (lambda f: (f / "request.json").write_text("{"), r"request\.json is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_each_kind_of_damage_is_named(copy, kind):
    damage, message = DAMAGE[kind]
    damage(copy)
    if message is None:
        assert len(verify(copy)) == 2  # the content is what counts, not its spaces
    else:
        with pytest.raises(UserError, match=message):
            verify(copy)


def test_ids_that_are_not_text_are_named(copy):
    facts = read_manifest(copy / "valid").tokenizer.model_dump() | {
        "mask_id": int(rows(copy / "valid")[0, 0])
    }
    rewrite(copy / "valid", tokenizer=facts)
    with pytest.raises(UserError, match=r"holds ids that are not text .the mask's, \d+"):
        verify(copy)


def test_all_that_is_wrong_is_counted(copy):
    shards = sorted((copy / "train").glob("*.tar"))
    assert len(shards) > 3
    for path in shards:
        flip(path)
    (copy / "valid/00000.tar").unlink()
    wrong = len(shards) + 1
    with pytest.raises(UserError) as error:
        verify(copy)
    said = str(error.value)
    assert said.startswith(f"{wrong} things are wrong: ") and said.endswith(f"and {wrong - 3} more")
    assert all(f"train/{path.name} was altered" in said for path in shards[:3]) and "\n" not in said


def test_a_check_of_before_does_not_count(copy):
    """Same size and times, other content: only reading it tells."""
    verify(copy)
    rows(copy / "train")
    path = copy / "train/00000.tar"
    times = path.stat()
    flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(UserError, match="was altered"):
        verify(copy)


def test_inspect_tells_lengths_and_shows_text(made, capsys):
    contents = inspect(made)
    for split, here in zip(("train", "valid"), contents, strict=True):
        manifest, stream = here.manifest, rows(made / split)
        stream = stream[stream != here.manifest.tokenizer.pad_id] if manifest.packing == "padded" else stream
        lengths = np.diff(np.flatnonzero(stream.flatten() == manifest.tokenizer.eos_id), prepend=-1) - 1
        assert sum(count for *_, count in here.bins()) == manifest.documents - manifest.dropped_documents
        for least, most, count in here.bins():
            assert count == ((lengths >= least) & (lengths <= most)).sum()
        if manifest.packing == "packed":
            assert here.padding == 0
        else:
            assert here.padding == 1 - manifest.tokens / rows(made / split).size > 0
    main(["prepare", "inspect", str(made), "--json", str(made.with_name("result.json"))])
    said = capsys.readouterr().out
    assert "split train (train) of text" in said and "| document 0:" in said and "◆" in said
    assert ("padding)" in said) == (contents[0].manifest.packing == "padded")
    result = json.loads(made.with_name("result.json").read_text())
    assert result["splits"]["train"]["documents"] == contents[0].manifest.documents


def test_reshard_keeps_sequences_and_identity(made, tmp_path, capsys):
    main(["prepare", "reshard", str(made), "--out", str(tmp_path / "one"), "--shard-mib", "64"])
    assert capsys.readouterr().out.startswith("made: train, ")
    for split in ("train", "valid"):
        before, after = read_manifest(made / split), read_manifest(tmp_path / "one" / split)
        assert len(before.shards) > len(after.shards) == 1
        assert np.array_equal(rows(made / split), rows(tmp_path / "one" / split))
        changed = {"shards", "sha256"}
        assert before.model_dump(exclude=changed) == after.model_dump(exclude=changed)
    verify(tmp_path / "one")
    reshard(tmp_path / "one", tmp_path / "back", 0.001)
    for path in made.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "back" / path.relative_to(made)).read_bytes(), path


def test_reshard_of_one_split(made, tmp_path):
    reshard(made / "valid", tmp_path / "out", 64)
    assert sorted(os.listdir(tmp_path / "out")) == ["tokenizer", "valid"]
    assert [m.split for m in verify(tmp_path / "out")] == ["valid"]


def test_reshard_of_damaged_shards_leaves_nothing(copy, tmp_path):
    flip(copy / "valid/00000.tar")
    with pytest.raises(UserError, match=r"valid/00000\.tar was altered"):
        reshard(copy, tmp_path / "new", 64)
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(UserError, match="nothing is overwritten"):
        reshard(copy, copy, 64)
    with pytest.raises(UserError, match="--shard-mib 0: give more than 0"):
        reshard(copy, tmp_path / "new", 0)


def test_a_folder_without_shards_is_named(tmp_path):
    for act in (verify, inspect):
        with pytest.raises(
            UserError, match=r"no token shards in .*; give a folder that `lomdm prepare` made"
        ):
            act(tmp_path)
