"""Ten kinds of damage to the data, on two ranks: a named error, or a counted skip; never a hang."""

import hashlib
import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lomdm_dist.config import load_config
from lomdm_dist.data import store
from lomdm_dist.data.order import SourceOrder
from lomdm_dist.data.shards import Manifest, ShardSet, ShardWriter
from lomdm_dist.errors import UserError
from lomdm_dist.train.inputs import open_inputs
from tests.distributed.grids import command_line, ends_of
from tests.distributed.runs import ROOT, curve, finish, start, wait_for

SHARDS = 4


@pytest.fixture
def train(tiny_data, tmp_path) -> Path:
    """The tiny training split again, in four shards, with its tokenizer and validation beside it."""
    for name in ("valid", "tokenizer"):
        shutil.copytree(tiny_data / name, tmp_path / "data" / name)
    return write(tiny_data, tmp_path / "data/train")


def write(tiny_data: Path, out: Path) -> Path:
    whole = ShardSet(tiny_data / "train")
    rows = whole.rows(np.arange(len(whole)))
    writer = ShardWriter(out, whole.length, whole.tokenizer.vocab_size)
    for part in np.array_split(rows, SHARDS):
        writer._write(part)
    made = {"length", "dtype", "sequences", "index", "shards", "identity", "sha256"}
    writer.close(**whole.manifest.model_dump(exclude=made))
    return out


def sign(folder: Path, change) -> None:
    """Change a manifest as its maker would: with its own checksum made anew."""
    manifest = json.loads((folder / "manifest.json").read_text()) | {"sha256": ""}
    change(manifest)
    Manifest.model_validate(manifest).write(folder)


def replace_shard(folder: Path, content: bytes, **changes) -> None:
    """Another shard 1, which the manifest agrees with."""
    (folder / "00001.tar").write_bytes(content)
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} | changes
    sign(folder, lambda m: (m["shards"][1].update(facts), m.update(sequences=_sum(m))))


def flip(folder: Path) -> None:
    data = bytearray((folder / "00001.tar").read_bytes())
    data[1500] ^= 4
    (folder / "00001.tar").write_bytes(data)


def cut(folder: Path) -> None:
    (folder / "00001.tar").write_bytes((folder / "00001.tar").read_bytes()[:-3000])


def edit_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"documents": ', '"documents": 1'))


def wrong_dtype(folder: Path) -> None:
    rows = ShardSet(folder).rows(np.arange(50))
    other = ShardWriter(folder.parent / "other", rows.shape[1], 70_000)
    other._write(rows.astype("<u4"))
    replace_shard(folder, (folder.parent / "other/00000.tar").read_bytes(), sequences=50)


def _sum(manifest: dict) -> int:
    return sum(shard["sequences"] for shard in manifest["shards"])


def beyond_the_vocabulary(folder: Path) -> None:
    content = bytearray((folder / "00001.tar").read_bytes())
    content[640 + 20 : 640 + 22] = b"\xff\xff"
    replace_shard(folder, bytes(content))


def other_tokenizer(folder: Path) -> list[str]:
    shutil.copytree(folder, folder.parent / "second")
    sign(folder.parent / "second", lambda manifest: manifest["tokenizer"].update(sha256="0" * 64))
    return [f"data.train=[{{path: {folder}}}, {{path: {folder.parent / 'second'}}}]"]


def unreadable(folder: Path) -> list[str]:
    """A remote folder of which one file never comes."""
    (folder / "00001.tar").unlink()
    return [f"data.train=pipe:cat {folder}/{{}}", f"data.cache={folder.parent / 'cache'}"]


# what is done, what the error says, and whether `skip` can go on
DAMAGES = {
    "cut tar": (cut, r"00001\.tar has \d+ bytes, its manifest says", True),
    "flipped byte": (flip, r"00001\.tar was altered: its checksum", True),
    "missing shard": (lambda f: (f / "00001.tar").unlink(), r"00001\.tar is missing", True),
    "edited manifest": (edit_manifest, r"manifest\.json is damaged .*the file was edited", False),
    "extra shard": (
        lambda f: shutil.copy(f / "00001.tar", f / "00009.tar"),
        r"holds 00009\.tar, which",
        True,
    ),
    "wrong dtype": (wrong_dtype, r"00001\.tar has uint32 sequences of 16, its manifest says uint16", True),
    "empty file": (lambda f: (f / "00001.tar").write_bytes(b""), r"00001\.tar has 0 bytes", True),
    "unreadable URL": (unreadable, r"cannot read cat .*00001\.tar: the command ended with status 1", False),
    "two tokenizers": (other_tokenizer, "were made with different tokenizers", False),
    "id beyond the vocabulary": (beyond_the_vocabulary, r"00001\.tar holds ids that are not text", True),
}


def damage(kind: str, train: Path) -> list[str]:
    changed = DAMAGES[kind][0](train)
    return changed if isinstance(changed, list) else []


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("on_bad_shard", ["error", "skip"])
def test_what_two_ranks_say(kind, on_bad_shard, base, train, tmp_path, monkeypatch):
    """Both ranks one after the other, up to the end of an epoch, without the process groups."""
    monkeypatch.setattr(store, "SECONDS_BETWEEN", 0.0)
    _, message, can_skip = DAMAGES[kind]
    overrides = [
        f"data.train={train}",
        f"data.valid={train.parent / 'valid'}",
        f"train.run={tmp_path / 'run'}",
    ]
    overrides += [f"data.on_bad_shard={on_bad_shard}", *damage(kind, train)]
    config = load_config("configs/demo.yaml", [*base, *overrides])
    said, replaced, complaints = [], 0, []
    for rank in range(2):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        try:
            reader = open_inputs(config, None).train
            half = (len(reader) + 1) // 2
            replaced += reader.read(rank * half, half).replaced
            complaints += reader.bad[0].values()
        except UserError as error:
            said.append(str(error))
    if on_bad_shard == "error" or not can_skip:
        assert said and all(re.search(message, error) for error in said), said
    else:
        assert not said
        if kind != "extra shard":
            lost = ShardSet(train).manifest.shards[1].sequences
            assert abs(replaced - lost) <= 1 and all(re.search(message, c) for c in complaints) and complaints


@pytest.mark.slow
def test_a_stop_does_not_wait_for_data_that_do_not_come(base, train, tmp_path):
    """One shard a window, and the last of them never comes: the steps before are saved."""
    script = tmp_path / "slow.sh"
    order = SourceOrder([s.sequences for s in ShardSet(train).manifest.shards], seed=0, window=1)
    last = int(order.at(len(ShardSet(train)) - 1, 1)[0] // ShardSet(train).manifest.shards[0].sequences)
    script.write_text(f"case $1 in {last:05d}.tar) sleep 1000;; *) cat {train}/$1;; esac")
    run = tmp_path / "run"
    options = [f"data.train=pipe:sh {script} {{}}", f"data.valid={train.parent / 'valid'}", "data.window=1"]
    process = start(1, *base, *options, f"train.run={run}", f"data.cache={tmp_path / 'cache'}")
    wait_for(run / "metrics.jsonl", '"step": 2,', process)
    time.sleep(20)
    process.send_signal(signal.SIGTERM)
    said = finish(process, expect=75)
    done = max(curve(run))
    assert "stopped on request while waiting for data; saved" in said
    assert (run / "latest").read_text() == f"step-{done}\n"


REAL = [("flipped byte", "skip"), ("missing shard", "error")]
ALL = [(kind, mode) for kind in DAMAGES for mode in ("error", "skip")]


@pytest.mark.parametrize(
    ("kind", "on_bad_shard"),
    [pytest.param(*c, marks=[] if c in REAL else pytest.mark.slow) for c in ALL],
)
def test_two_processes_end_with_the_error_or_count(kind, on_bad_shard, base, train, tmp_path):
    run = tmp_path / "run"
    words = ["train", "--config", ROOT / "configs/demo.yaml", *base, f"train.run={run}", "train.steps=30"]
    words += [f"data.train={train}", f"data.valid={train.parent / 'valid'}"]
    words += [f"data.on_bad_shard={on_bad_shard}", *damage(kind, train)]
    ends = ends_of(2, tmp_path, command_line, words, seconds=120)
    statuses, said = [status for status, _ in ends], "".join(text for _, text in ends)
    _, message, can_skip = DAMAGES[kind]
    if on_bad_shard == "error" or not can_skip:
        assert statuses == [2, 2] and re.search(rf"error: .*{message}", said), said
        return
    assert statuses == [0, 0], said
    replaced = sum(curve(run, "replaced_sequences").values())
    if kind == "extra shard":
        assert replaced == 0
    else:
        assert replaced > 0 and re.search(rf"left out: .*{message}", said), said
        assert max(curve(run, "bad_shards").values()) == 1
    print(f"{kind}: {replaced} sequences replaced", file=sys.stderr)
