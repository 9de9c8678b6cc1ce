"""Nothing that a checkpoint, data, a config or an export carries runs code, or leads out of its folder.

And no secret leaves a run. Each test is an attack; docs/safety.md says what is promised, and what is not.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import lomdm_dist
from lomdm_dist.cli import main
from lomdm_dist.config import load_config
from lomdm_dist.convert.checkpoint import seal
from lomdm_dist.data.documents import Meter, read_hub, read_tar
from lomdm_dist.data.pack import STATE, DamagedWork, Work
from lomdm_dist.data.shards import BadShard, ShardSet
from lomdm_dist.data.tokenizer import load_tokenizer
from lomdm_dist.errors import UserError
from lomdm_dist.files import sha256
from lomdm_dist.secrets import hide
from lomdm_dist.train.checkpoint import Checkpoint, State, find_checkpoint
from lomdm_dist.train.metrics import _start_wandb
from lomdm_dist.train.safe_reader import read_metadata
from tests.distributed.grids import command_line, ends_of
from tests.distributed.runs import ROOT

DEMO = ROOT / "configs/demo.yaml"


class Opens:
    """A pickle that makes a file when it is read."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def refused(capsys, *arguments) -> str:
    """The one line that a mistake prints."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("error: ") and "Traceback" not in "".join(said)
    return said[-1]


@pytest.fixture
def mark(tmp_path) -> Path:
    """There when the attack has succeeded."""
    return tmp_path / "pwned"


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "id_rsa"
    path.write_text("my private key")
    return path


@pytest.fixture
def checkpoint(trained_run, tmp_path) -> Path:
    """A copy, free to be made a trap."""
    return Path(shutil.copytree(trained_run.run / "checkpoints/step-8", tmp_path / "step-8"))


@pytest.fixture
def data(tiny_data, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_data, tmp_path / "data"))


def sign(checkpoint: Path, **changes) -> None:
    """The checksums are the attacker's own; `changes` are of state.json."""
    path = checkpoint / "state.json"
    seal(checkpoint, State.model_validate_json(path.read_bytes()))
    values = json.loads(path.read_text()) | changes
    path.write_text(State.model_construct(**values).model_dump_json())


def every_reader(checkpoint: Path, out: Path, data: Path) -> list[list]:
    """Each command that opens a checkpoint."""
    return [
        ["sample", "--checkpoint", checkpoint],
        ["eval", "ppl", "--checkpoint", checkpoint, "--data", data / "valid"],
        ["convert", "to-hf", checkpoint, out],
        ["checkpoint", "inspect", checkpoint],
        ["checkpoint", "verify", checkpoint],
        ["checkpoint", "convert", checkpoint, out],
        ["train", "--config", checkpoint / "config.yaml", f"train.run={out}", "--resume", checkpoint],
    ]


# 1, 2. Pickles.


@pytest.mark.parametrize("where", ["alone", "inside", "in a class"])
def test_metadata_run_nothing(checkpoint, trained_run, tmp_path, mark, capsys, where):
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    if where == "in a class":  # sets an attribute of an allowed class itself, for all that come after
        name = "torch.distributed.checkpoint.metadata\nMetadataIndex\n"
        content = b"c" + name.encode() + b"(N(S'mine'\nI1\ndtb."
    else:
        metadata.planner_data = Opens(mark)
        content = pickle.dumps(Opens(mark) if where == "alone" else metadata)
    (checkpoint / ".metadata").write_bytes(content)
    sign(checkpoint)
    for arguments in every_reader(checkpoint, tmp_path / "out", trained_run.data):
        assert ".metadata" in refused(capsys, *arguments)
    assert not mark.exists() and not (tmp_path / "out").exists()
    assert not hasattr(dcp.metadata.MetadataIndex, "mine")


def test_weights_run_nothing(checkpoint, tmp_path, mark, capsys):
    (weights,) = checkpoint.glob("*.distcp")
    torch.save({"a": Opens(mark)}, weights)
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, weights.stat().st_size
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(checkpoint)
    assert "is damaged" in refused(capsys, "convert", "to-hf", checkpoint, tmp_path / "out")
    assert not mark.exists()


def test_objects_that_are_no_tensors_are_never_read(checkpoint, tmp_path, mark, capsys):
    dcp.save({"raw/phi.bias": Opens(mark)}, checkpoint_id=checkpoint, no_dist=True)
    sign(checkpoint)
    assert "BytesStorageMetadata" in refused(capsys, "checkpoint", "verify", checkpoint)
    assert not mark.exists()


def test_metadata_that_other_pythons_wrote(checkpoint, monkeypatch):
    """3.11.0 to 3.11.3 write a member of an enumeration by `getattr`."""
    kind = dcp.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(kind, "__reduce_ex__", lambda self, _: (getattr, (kind, self.name)))
    content = pickle.dumps(dcp.FileSystemReader(checkpoint).read_metadata())
    assert b"getattr" in content
    (checkpoint / ".metadata").write_bytes(content)
    sign(checkpoint)
    assert Checkpoint(checkpoint).build_model()


def test_metadata_are_those_that_dcp_reads(checkpoint):
    ours, theirs = (
        read_metadata(checkpoint, ["__0_0.distcp"]),
        dcp.FileSystemReader(checkpoint).read_metadata(),
    )
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


@pytest.mark.parametrize("name", ["../step-9/__0_0.distcp", "/etc/passwd"])
def test_no_piece_lies_in_a_file_of_elsewhere(checkpoint, capsys, name):
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = name
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(checkpoint)
    assert f"a piece in {name!r}" in refused(capsys, "checkpoint", "verify", checkpoint)


def objects(mark: Path) -> np.ndarray:
    return np.array([Opens(mark)], dtype=object)


def test_a_shard_of_objects_is_no_shard(data, mark):
    """Not even where its manifest asks for it, and nothing of it is checked."""
    shard = data / "train/00000.tar"
    block = io.BytesIO()
    np.save(block, objects(mark), allow_pickle=True)
    content = bytearray(shard.read_bytes())
    content[512 : 512 + len(block.getvalue())] = block.getvalue()
    shard.write_bytes(content)
    edit_manifest(data / "train", lambda m: m["shards"][0].update(sha256=sha256(shard)))
    with pytest.raises(BadShard, match="no shard of token blocks"):
        ShardSet(data / "train").rows(np.arange(1))
    assert not mark.exists()


def test_unfinished_work_with_objects_is_damaged(tmp_path, tiny_data, mark):
    np.savez(tmp_path / STATE, facts=objects(mark))
    with pytest.raises(DamagedWork, match="allow_pickle=False"):
        Work(tmp_path, ["train"], 16, "packed", 1.0, ShardSet(tiny_data / "train").tokenizer, (0, 0))
    assert not mark.exists()


# 3. Archives and shards.


def archive(path: Path, name: str, **facts) -> Path:
    member = tarfile.TarInfo(name)
    for key, value in facts.items():
        setattr(member, key, value)
    with tarfile.open(path, "w") as tar:
        content = b"a text" if member.isfile() else b""
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("../../texts/a.txt", {}, "leads out"),
        ("/root/.bashrc", {}, "leads out"),
        ("a/../../b.txt", {}, "leads out"),
        ("..", {"type": tarfile.DIRTYPE}, "leads out"),
        ("a.txt", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "a link to '/etc/passwd'"),
        ("a.txt", {"type": tarfile.LNKTYPE, "linkname": "../b.txt"}, "a link to"),
        ("a.txt", {"type": tarfile.CHRTYPE}, "a device"),
        ("a.txt", {"type": tarfile.FIFOTYPE}, "a device"),
    ],
)
def test_archives_of_texts_hold_plain_files_only(tmp_path, capsys, name, facts, message):
    path = archive(tmp_path / "texts.tar", name, **facts)
    options = ["--tokenizer", "bpe", "--vocab-size", 300, "--length", 8]
    said = refused(capsys, "prepare", "text", "--input", path, "--out", tmp_path / "out", *options)
    assert repr(name) in said and message in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["texts.tar"]


def test_folders_and_files_of_archives_are_read(tmp_path):
    assert list(read_tar(archive(tmp_path / "a.tar", "./folder..1/a..txt"), Meter())) == ["a text"]
    assert list(read_tar(archive(tmp_path / "a.tar", "./folder", type=tarfile.DIRTYPE), Meter())) == []


def edit_manifest(folder: Path, change) -> None:
    """Change a manifest and sign it anew."""
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    signed = json.dumps({key: value for key, value in values.items() if key != "sha256"}, sort_keys=True)
    values["sha256"] = hashlib.sha256(signed.encode()).hexdigest()
    path.write_text(json.dumps(values))


def test_names_in_shards_are_not_followed(data, tmp_path):
    """A shard is read by its index; what its members are called leads nowhere."""
    shard = data / "train/00000.tar"
    with tarfile.open(shard) as tar:
        member = tar.next()
    before = ShardSet(data / "train").rows(np.arange(9))
    member.name = "../../../outside.npy"
    content = bytearray(shard.read_bytes())
    content[:512] = member.tobuf(tarfile.USTAR_FORMAT)
    shard.write_bytes(content)
    edit_manifest(data / "train", lambda m: m["shards"][0].update(sha256=sha256(shard)))
    main(["prepare", "reshard", str(data / "train"), "--out", str(tmp_path / "deep/out"), "--shard-mib", "1"])
    assert (ShardSet(tmp_path / "deep/out/train").rows(np.arange(9)) == before).all()
    assert not list(tmp_path.rglob("outside*"))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"first": 2**62}, "reaches beyond the end"),
        ({"sequences_a_member": 10**6, "member_bytes": 1}, "members that overlap"),
        ({"member_bytes": 2**40}, "reaches beyond the end"),
    ],
)
def test_an_index_never_leads_out_of_its_shard(data, index, message):
    """Rows are read by address: beyond the file is the memory of the process."""
    edit_manifest(data / "train", lambda m: m["index"].update(index))
    with pytest.raises(UserError, match=message):
        ShardSet(data / "train")


def test_splits_lead_nowhere(data, tmp_path, capsys):
    options = ["--out", tmp_path / "deep/out", "--shard-mib", 1]
    edit_manifest(data / "train", lambda m: m.update(split="../../outside"))
    assert "split" in refused(capsys, "prepare", "reshard", data / "train", *options)
    request = data / "request.json"
    request.write_text(json.dumps(json.loads(request.read_text()) | {"splits": [str(data / "valid")]}))
    assert "request.json is damaged" in refused(capsys, "prepare", "reshard", data, *options)
    assert not (tmp_path / "outside").exists() and not (tmp_path / "deep").exists()


# 4. YAML.

CALL = "!!python/object/apply:builtins.open ['{}', w]"


@pytest.mark.parametrize("section", ["model", "data", "train"])
def test_yaml_makes_no_objects(tmp_path, mark, checkpoint, capsys, section):
    call = CALL.format(mark)
    for override in (f"{section}={call}", f"{section}.x={call}", f"{section}={{x: {call}}}"):
        with pytest.raises(UserError, match="not valid YAML"):
            load_config(DEMO, [override])
    path = tmp_path / "config.yaml"
    path.write_text(DEMO.read_text().replace(f"{section}:", f"{section}: {call}\nx:"))
    with pytest.raises(UserError, match="not valid YAML"):
        load_config(path)
    shutil.copy(path, checkpoint)
    sign(checkpoint)
    assert "not valid YAML" in refused(capsys, "convert", "to-hf", checkpoint, tmp_path / "out")
    load_config(DEMO, [f"train.run={call}"])  # a path is taken as it stands
    assert not mark.exists()


# 5. Links.


@pytest.mark.parametrize(
    "name", ["tokenizer/chat_template.jinja", "tokenizer/more", "tokenizer", "config.yaml", "__0_0.distcp"]
)
def test_a_link_in_a_checkpoint_is_not_followed(checkpoint, secret, tmp_path, trained_run, capsys, name):
    """A template's text would stand in the export, a folder's files in the converted checkpoint."""
    outside = tmp_path / "outside"
    outside.mkdir()
    path = checkpoint / name
    if path.exists():
        path.rename(outside / path.name)
    elif name.endswith("jinja"):
        secret.rename(outside / path.name)
    path.symlink_to(outside / ("" if name.endswith("more") else path.name))
    files = {n: sha256(checkpoint / n) for n in unlisted(checkpoint, name)}
    sign(checkpoint, files=files)
    for arguments in every_reader(checkpoint, tmp_path / "out", trained_run.data):
        assert f"{name} is a link" in refused(capsys, *arguments)
    assert not (tmp_path / "out").exists()


def unlisted(checkpoint: Path, name: str) -> list[str]:
    """Files of a checkpoint without those that lie elsewhere: of them the attacker has no checksum."""
    listed = json.loads((checkpoint / "state.json").read_text())["files"]
    return [file for file in listed if not file.startswith(name)]


def test_a_checkpoint_may_be_a_link_itself(checkpoint, tmp_path, capsys):
    (tmp_path / "other").symlink_to(checkpoint)
    main(["checkpoint", "verify", str(tmp_path / "other")])
    assert "whole" in capsys.readouterr().out


@pytest.mark.parametrize("absolute", [False, True])
def test_names_in_a_checkpoint_stay_in_it(checkpoint, secret, tmp_path, capsys, absolute):
    name = str(secret) if absolute else f"../{secret.name}"
    sign(checkpoint, files={name: sha256(secret)})
    assert "lies outside" in refused(capsys, "convert", "to-hf", checkpoint, tmp_path / "out")


def test_latest_names_a_checkpoint_of_its_run(checkpoint, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in (str(checkpoint), f"../../{checkpoint.name}"):
        (run / "latest").write_text(name + "\n")
        with pytest.raises(UserError, match="no step-N of that run"):
            find_checkpoint(run)


@pytest.mark.parametrize("direction", [["convert", "to-hf"], ["checkpoint", "convert"]])
def test_nothing_is_written_through_a_link_in_out(checkpoint, secret, tmp_path, capsys, direction):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.yaml").symlink_to(secret)
    assert "nothing is overwritten" in refused(capsys, *direction, checkpoint, out)
    assert secret.read_text() == "my private key"


def test_links_in_the_tokenizer_of_data_do_not_enter_checkpoints(data, secret, tmp_path, capsys, trained_run):
    (data / "tokenizer/chat_template.jinja").symlink_to(secret)
    places = [f"data.{split}={data / split}" for split in ("train", "valid")]
    config = ["--config", trained_run.run / "config.yaml", f"train.run={tmp_path / 'run'}"]
    assert "chat_template.jinja is a link" in refused(capsys, "train", *config, *places)
    options = ["--out", tmp_path / "out", "--shard-mib", 1]
    assert "chat_template.jinja is a link" in refused(capsys, "prepare", "reshard", data, *options)


# Code beside a tokenizer, a data set, a model.


def code(folder: Path, mark: Path, **settings) -> None:
    """A tokenizer class of its own in a tokenizer's folder."""
    content = f"open({str(mark)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Mine\n"
    (folder / "mine.py").write_text(content)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_tokenizers_run_no_code(data, mark, monkeypatch):
    """Not even where somebody at a terminal would say yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    code(data / "tokenizer", mark, tokenizer_class="Mine", auto_map={"AutoTokenizer": [None, "mine.Mine"]})
    with pytest.raises(UserError, match="cannot load tokenizer"):
        load_tokenizer(data / "tokenizer")
    assert not mark.exists()


def test_an_export_runs_and_holds_our_code_alone(checkpoint, tmp_path, mark):
    """An auto_map of the tokenizer would have the export's check, and all who load it, run what it names."""
    tokenizer = checkpoint / "tokenizer"
    there = f"{tokenizer}--mine.Mine"
    code(tokenizer, mark, auto_map={"AutoTokenizer": [None, there]}, chat_template="{{ mine }}")
    for name in ("modeling_lomdm.py", "configuration_lomdm.py"):
        shutil.copy(tokenizer / "mine.py", tokenizer / name)
    more = {"AutoConfig": there, "AutoModelForMaskedLM": there}
    (tokenizer / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": more}))
    sign(checkpoint)
    out = tmp_path / "out"
    main(["convert", "to-hf", str(checkpoint), str(out)])
    assert not mark.exists()
    ours = Path(lomdm_dist.__file__).parent / "convert/hf"
    found = {path.name: path.read_text() for path in out.rglob("*.py")}
    assert found == {
        name: (ours / name).read_text() for name in ("modeling_lomdm.py", "configuration_lomdm.py")
    }
    assert not any("mine" in path.read_text(errors="replace") for path in out.iterdir())


def test_data_sets_run_no_code(tmp_path, mark, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.py").write_text(f"open({str(mark)!r}, 'w')\nimport datasets\n")
    with pytest.raises(UserError, match="cannot load the data set"):
        next(iter(read_hub(str(folder), "text")))
    assert not mark.exists()


# 6. Secrets.

VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0*"), min_size=8)
KEY, TYPED, BEARER = "AKIA-key/of+mine=", "typed:into@a-url", "not-in-the-environment"


@given(value=VALUES, before=st.text(), after=st.text())
@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "pgpassword"])
def test_values_of_secret_variables_are_hidden_anywhere(name, value, before, after):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, name, value)
        assert value not in hide(before + value + after)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("s3://key:se@cr@bucket/a", "s3://***@bucket/a"),
        ("cannot read https://me:mine@host/{}: no", "cannot read https://***@host/{}: no"),
        ("https://a/b?X-Amz-Signature=c&d=e", "https://a/b?X-Amz-Signature=***&d=e"),
        ('pipe:curl -H "Authorization: Bearer abc" x/{}', 'pipe:curl -H "Authorization: Bearer ***" x/{}'),
        *(
            (text, text)
            for text in (
                "Authorization: Bearer $TOKEN x",
                "hf://a/b@main",
                "data/a@b",
                "me@host",
                "a://b, c@d",
                "model.mask_id=5",
            )
        ),
    ],
)
def test_what_is_hidden_in_addresses(text, hidden):
    assert hide(text) == hidden == hide(hidden)


def test_names_of_no_secrets_hide_nothing(monkeypatch):
    monkeypatch.setitem(os.environ, "TOKENIZERS_PARALLELISM", "a-long-value")
    monkeypatch.setitem(os.environ, "SHORT_KEY", "seven77")
    assert hide("a-long-value, seven77") == "a-long-value, seven77"


def test_wandb_is_told_no_secret(trained_run, tmp_path, monkeypatch):
    """It notes the command of the process by itself."""
    told = []

    def init(**options):
        told.append(str((options["config"], sys.argv)))
        return SimpleNamespace(define_metric=lambda *names, **options: None)

    monkeypatch.setitem(os.environ, "MY_STORE_KEY", KEY)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    overrides = [f"data.train=pipe:cat {{}} # {KEY} https://{TYPED}@host", "wandb.mode=offline"]
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    overrides.append(f"train.run={tmp_path}")
    _start_wandb(load_config(trained_run.run / "config.yaml", overrides), resumed=False)
    assert told[0].count("# *** https://***@host") == 2 and KEY not in told[0] and TYPED not in told[0]


def test_a_run_leaves_no_secret(trained_run, tmp_path, capsys, monkeypatch):
    """Nor does one that is resumed, or fails; nor an evaluation, nor the export."""
    monkeypatch.setitem(os.environ, "MY_STORE_KEY", KEY)
    run, split, printed = tmp_path / "run", trained_run.data / "train", []
    pipe = f'pipe:cat {split}/{{}} # {KEY} https://{TYPED}@host -H "Authorization: Bearer {BEARER}"'

    def call(expect: int, *words) -> str:
        ((status, said),) = ends_of(1, tmp_path, command_line, words, {"MY_STORE_KEY": KEY})
        printed.append(said)
        assert status == expect, said
        return said

    train = ["train", "--config", trained_run.run / "config.yaml", f"train.run={run}", f"data.train={pipe}"]
    train += ["--json", run.with_suffix(".json")]
    call(75, *train, "--stop-after", 2)
    call(0, *train, "--resume", "auto")
    assert "***" in (run / "config.yaml").read_text() and "***" in run.with_suffix(".json").read_text()

    evaluate = ["eval", "ppl", "--checkpoint", run, "--data", pipe.replace(str(split), str(tmp_path / "no"))]
    printed.append(refused(capsys, *evaluate))
    assert "***" in printed[-1]
    said = call(1, *evaluate, "--debug")
    assert "Traceback" in said and "***" in said
    main(["convert", "to-hf", str(run), str(tmp_path / "hf"), "--json", str(tmp_path / "hf.json")])
    assert "say it anew" in refused(capsys, "train", "--config", run / "config.yaml", "--resume", "auto")
    left = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for said in (*left, *(text.encode() for text in printed)):
        assert not any(secret.encode() in said for secret in (KEY, TYPED, BEARER))
