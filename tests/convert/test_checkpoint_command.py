"""`lomdm checkpoint`: inspect reads no weights, verify finds every damage, convert changes the form alone."""

import itertools
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lomdm_dist.cli import main
from lomdm_dist.config import load_config
from lomdm_dist.convert import checkpoint as command
from lomdm_dist.convert.checkpoint import seal, wrong_pieces
from lomdm_dist.errors import UserError
from lomdm_dist.train.checkpoint import Checkpoint, State
from tests.distributed.grids import on_processes
from tests.distributed.runs import curve

DATA, EMBEDDING = "__0_0.distcp", "backbone.embedding.weight"
ALL, WEIGHTS = {"raw", "ema", "exp_avg", "exp_avg_sq"}, {"raw", "ema"}


def lomdm(*arguments) -> None:
    main([str(argument) for argument in arguments])


def refused(capsys, *arguments) -> str:
    """The one line that a mistake prints."""
    with pytest.raises(SystemExit) as stopped:
        lomdm(*arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("error: ")
    return said[0]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, read with DCP alone."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(t.size, dtype=t.properties.dtype) for name, t in saved.items()}
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def assert_equal(ours: dict, theirs: dict):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def original(trained_run) -> Path:
    return trained_run.run / "checkpoints/step-8"


@pytest.fixture(scope="module")
def tensors(original) -> dict[str, torch.Tensor]:
    return tensors_of(original)


def write(out: Path, original: Path, tensors: dict) -> Path:
    """A copy of a checkpoint with other tensors, as one process writes them; checksums and all are right."""
    shutil.copytree(original, out, ignore=shutil.ignore_patterns("*.distcp", ".metadata"))
    dcp.save(tensors, checkpoint_id=out, no_dist=True)
    seal(out, Checkpoint(original).state)
    return out


@pytest.fixture(scope="module")
def old(original, tensors, tmp_path_factory) -> Path:
    """The trained checkpoint in format 1: every parameter a vector, no checksum of the state."""
    flat = {name: tensor.flatten() for name, tensor in tensors.items()}
    out = write(tmp_path_factory.mktemp("format") / "old", original, flat)
    state = json.loads((out / "state.json").read_text()) | {"format": 1}
    del state["checksum"]
    (out / "state.json").write_text(json.dumps(state))
    return out


@pytest.fixture(scope="module")
def converted(old) -> Path:
    out = old.with_name("converted")
    lomdm("checkpoint", "convert", old, out, "--json", out.with_suffix(".json"))
    return out


@pytest.fixture(scope="module")
def weights_only(old) -> Path:
    out = old.with_name("weights")
    lomdm("checkpoint", "convert", old, out, "--weights-only")
    return out


@pytest.fixture
def copy(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def edit_pieces(folder: Path, change) -> None:
    """Change what .metadata says of where the pieces of the embedding lie; checksums stay right."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    pieces = metadata.state_dict_metadata[f"raw/{EMBEDDING}"].chunks
    pieces[:] = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in change]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder, State.model_validate_json((folder / "state.json").read_bytes()))


# Inspect.


def test_inspect_tells_all_without_the_weights(copy, tensors, capsys):
    edit_pieces(copy, [((0, 0), (100, 32)), ((100, 0), (200, 32))])
    path = copy / DATA
    path.write_bytes(path.read_bytes()[:100])
    lomdm("checkpoint", "inspect", copy, "--json", copy.with_suffix(".json"))
    result = json.loads(copy.with_suffix(".json").read_text())
    raw = {name.removeprefix("raw/"): t for name, t in tensors.items() if name.startswith("raw/")}
    files = [path.stat().st_size for path in copy.rglob("*") if path.is_file()]
    assert (result["files"], result["bytes"], result["weight_files"]) == (len(files), sum(files), 1)
    assert result["parameters"] == sum(t.numel() for t in raw.values()) and set(result["kinds"]) == ALL
    assert {row["name"]: row["shape"] for row in result["table"]} == {n: [*t.shape] for n, t in raw.items()}
    pieces = {row["name"]: row["pieces"] for row in result["table"]}
    assert pieces.pop(EMBEDDING) == {kind: 2 if kind == "raw" else 1 for kind in ALL}
    assert all(row == dict.fromkeys(ALL, 1) for row in pieces.values())
    state = json.loads((copy / "state.json").read_text())
    assert result["state"] == {k: v for k, v in state.items() if k not in ("files", "checksum")}
    assert result["config"]["parallel"]["engine"] == "deepspeed"
    said = capsys.readouterr().out
    assert "step 8, 88,174 parameters" in said and "engine=deepspeed zero_stage=1" in said
    assert [line.split() for line in said.splitlines() if EMBEDDING in line] == [
        [EMBEDDING, "300", "x", "32", "1", "or", "2"]
    ]


@pytest.mark.parametrize("name", [".metadata", "config.yaml", DATA])
def test_inspect_says_what_is_missing_or_altered(copy, capsys, name):
    path = copy / name
    path.unlink() if name == DATA else path.write_bytes(path.read_bytes()[:-9])
    said = refused(capsys, "checkpoint", "inspect", copy)
    assert f"({name} is {'missing' if name == DATA else 'cut short or altered'})" in said


# Verify.


def test_whole_checkpoints_are_whole(trained_run, old, converted, weights_only, tmp_path, capsys):
    for path, kinds in ((trained_run.run, ALL), (old, ALL), (converted, ALL), (weights_only, WEIGHTS)):
        lomdm("checkpoint", "verify", path, "--json", tmp_path / "v.json")
        (result,) = json.loads((tmp_path / "v.json").read_text())["checkpoints"]
        assert result["whole"] and set(result["kinds"]) == kinds and result["parameters"] == 88_174
        assert capsys.readouterr().out.startswith("whole: ")


def flip_a_bit(folder: Path):
    content = bytearray((folder / DATA).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / DATA).write_bytes(content)


def edit_state(**changes):
    def edit(folder: Path):
        path = folder / "state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def other_tokenizer(folder: Path):
    state = State.model_validate_json((folder / "state.json").read_bytes())
    state.data.tokenizer.eos_id = 5
    seal(folder, state)


FILES = {
    "a bit": (flip_a_bit, f"{DATA} is cut short or altered"),
    "no data": (lambda folder: (folder / DATA).unlink(), f"{DATA} is missing"),
    "no tokenizer": (
        lambda f: (f / "tokenizer/tokenizer.json").unlink(),
        "tokenizer/tokenizer.json is missing",
    ),
    "a file more": (
        lambda f: (f / "tokenizer/state.json").write_text("{}"),
        "holds tokenizer/state.json, which",
    ),
    "a step": (edit_state(step=9), "state.json: it was edited"),
    "a version": (edit_state(versions={}), "state.json: it was edited"),
    "a format": (edit_state(format=1), "state.json: it was edited"),
    "tokenizer": (other_tokenizer, "is not the one that was recorded"),
}


@pytest.mark.parametrize("name", FILES)
def test_verify_finds_damaged_files(copy, capsys, name):
    damage, message = FILES[name]
    damage(copy)
    assert message in refused(capsys, "checkpoint", "verify", copy)


def holding(value: float):
    return lambda t: t["exp_avg_sq/phi.weight"].view(-1)[7].fill_(value)


def rename(kind: str, name: str, new: str):
    return lambda t: t.update({f"{kind}/{new}": t.pop(f"{kind}/{name}")})


TENSORS = {
    "nan": (holding(float("nan")), "exp_avg_sq/phi.weight holds a number that is not finite"),
    "infinity": (holding(float("-inf")), "exp_avg_sq/phi.weight holds a number that is not finite"),
    "name": (
        rename("ema", "phi.bias", "phi.bia"),
        "ema/phi.bia is not of the model; ema/phi.bias is missing",
    ),
    "kind": (lambda t: t.update({"emo/a": torch.zeros(1)}), "emo/a is not of the model"),
    "moment": (lambda t: t.pop("exp_avg/psi.bias"), "exp_avg/psi.bias is missing"),
    "shape": (
        lambda t: t.update({f"raw/{EMBEDDING}": t[f"raw/{EMBEDDING}"].T.contiguous()}),
        f"raw/{EMBEDDING} has the shape [32, 300], not [300, 32]",
    ),
    "dtype": (
        lambda t: t.update({"raw/phi.bias": t["raw/phi.bias"].double()}),
        "raw/phi.bias is torch.float64, not torch.float32",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_verify_finds_wrong_tensors(original, tensors, tmp_path, capsys, name):
    change, message = TENSORS[name]
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    change(changed)
    assert f"({message})" in refused(
        capsys, "checkpoint", "verify", write(tmp_path / "wrong", original, changed)
    )


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "9,600 of 9,600 elements are in none"),
        ([((0, 0), (299, 32))], "32 of 9,600 elements are in none"),
        ([((0, 0), (300, 32)), ((7, 3), (1, 1))], "two overlap"),
        ([((1, 0), (300, 32))], "one reaches beyond it"),
    ],
)
def test_verify_finds_gaps_and_overlaps(copy, capsys, pieces, message):
    edit_pieces(copy, pieces)
    said = refused(capsys, "checkpoint", "verify", copy)
    assert f"(raw/{EMBEDDING} is not covered by its pieces: {message})" in said


def test_pieces_are_judged_as_by_counting():
    """Cuts of a whole, in any order, often with one moved or dropped, against a count of each element."""
    random, seen = np.random.default_rng(0), set()
    for _ in range(600):
        size = tuple(random.integers(1, 4, 3))
        cuts = [sorted({0, n, *random.integers(0, n, 1)}) for n in size]
        boxes = [np.array(box) for box in itertools.product(*(itertools.pairwise(cut) for cut in cuts))]
        random.shuffle(boxes)
        if random.random() < 0.5:
            boxes[0][random.integers(3), random.integers(2)] += random.integers(-1, 2)
        if random.random() < 0.2:
            del boxes[-1]
        count = np.zeros(size, dtype=int)
        inside = all((box[:, 0] >= 0).all() and (box[:, 1] <= size).all() for box in boxes)
        inside = inside and all((box[:, 0] < box[:, 1]).all() for box in boxes)
        for box in boxes if inside else ():
            count[tuple(slice(*span) for span in box)] += 1
        pieces = [ChunkStorageMetadata(torch.Size(b[:, 0]), torch.Size(b[:, 1] - b[:, 0])) for b in boxes]
        tiles = inside and bool((count == 1).all())
        assert (wrong_pieces(torch.Size(size), pieces) is None) == tiles, (size, boxes)
        seen.add((tiles, inside, count.max() > 1))
    assert len(seen) == 4  # whole, with a gap, with an overlap, beyond


def test_verify_all_judges_each(trained_run, tmp_path, capsys):
    run = Path(shutil.copytree(trained_run.run, tmp_path / "run"))
    for step in (10, 12):
        shutil.copytree(run / "checkpoints/step-8", run / f"checkpoints/step-{step}")
    lomdm("checkpoint", "verify", run, "--all")
    assert capsys.readouterr().out.count("whole: ") == 3
    flip_a_bit(run / "checkpoints/step-10")
    lomdm("checkpoint", "verify", run)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        lomdm("checkpoint", "verify", run, "--all", "--json", tmp_path / "v.json")
    said = capsys.readouterr()
    assert stopped.value.code == 2 and f"1 of 3 checkpoints of {run} are not whole" in said.err
    assert [line.split(":")[0] for line in said.out.splitlines()] == ["whole", "not whole", "whole"]
    results = json.loads((tmp_path / "v.json").read_text())["checkpoints"]
    assert [result["whole"] for result in results] == [True, False, True]
    assert DATA in results[1]["problem"]
    assert "no checkpoints/step-N" in refused(
        capsys, "checkpoint", "verify", run / "checkpoints/step-8", "--all"
    )


# Convert.


@pytest.mark.parametrize("kind", ["raw", "ema"])
def test_format_1_is_read_as_it_was(old, original, kind):
    assert Checkpoint(old).state.format == 1
    assert_equal(
        Checkpoint(old).build_model(kind).state_dict(), Checkpoint(original).build_model(kind).state_dict()
    )


def test_converting_changes_the_form_alone(converted, original, tensors):
    assert_equal(tensors_of(converted), tensors)
    kept, state = Checkpoint(original).state, Checkpoint(converted).state
    assert state.format == 2 and kept.format == 2
    assert state.model_copy(update={"files": kept.files}) == kept
    names = {str(path.relative_to(converted)) for path in converted.rglob("*") if path.is_file()}
    assert names == {*state.files, "state.json"} and sum(name.endswith(".distcp") for name in names) == 1
    assert (converted / "config.yaml").read_bytes() == (original / "config.yaml").read_bytes()
    assert json.loads(converted.with_suffix(".json").read_text())["parameters"] == 88_174


def test_weights_only_are_evaluated_and_exported(weights_only, tensors, trained_run, tmp_path):
    kept = {name: tensor for name, tensor in tensors.items() if name.partition("/")[0] in WEIGHTS}
    assert_equal(tensors_of(weights_only), kept)
    results = []
    for path in (weights_only, trained_run.run):
        options = ["--data", trained_run.data / "valid", "--limit", 8, "--json", tmp_path / "ppl.json"]
        lomdm("eval", "ppl", "--checkpoint", path, *options)
        results.append(json.loads((tmp_path / "ppl.json").read_text())["nll_per_token"])
    assert results[0] == results[1]
    lomdm("convert", "to-hf", weights_only, tmp_path / "hf")
    assert (tmp_path / "hf/model.safetensors").exists()


def test_weights_only_cannot_be_resumed(weights_only, trained_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    options = ["--config", weights_only / "config.yaml", f"train.run={tmp_path / 'run'}", "train.steps=9"]
    said = refused(capsys, "train", *options, "--resume", weights_only)
    assert "holds weights only" in said and str(weights_only) in said and not (tmp_path / "run").exists()


def test_nothing_is_overwritten_and_nothing_damaged_converted(converted, copy, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in converted.rglob("*")}
    assert "nothing is overwritten" in refused(capsys, "checkpoint", "convert", copy, converted)
    assert before == {path: path.stat().st_mtime_ns for path in converted.rglob("*")}
    flip_a_bit(copy)
    assert DATA in refused(capsys, "checkpoint", "convert", copy, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_a_result_that_is_not_whole_is_not_published(copy, tmp_path, monkeypatch):
    def save_less(folder, shapes, read):
        save(folder, {name: shape for name, shape in shapes.items() if name != "raw/phi.bias"}, read)

    save = command.save_tensors
    monkeypatch.setattr(command, "save_tensors", save_less)
    with pytest.raises(UserError, match=r"raw/phi\.bias is missing"):
        command.convert(copy, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def go_on(checkpoint: Path, overrides: list[str]) -> None:
    from lomdm_dist.train.loop import train

    train(load_config(checkpoint / "config.yaml", overrides), resume=str(checkpoint))


def test_both_forms_continue_alike(old, converted, tmp_path):
    """Two steps on: the second depends on the moments, what is saved then on the average."""
    runs = {checkpoint: tmp_path / checkpoint.name for checkpoint in (old, converted)}
    for path, run in runs.items():
        on_processes(1, go_on, path, [f"train.run={run}", "train.steps=10"])
    assert curve(runs[old]) == curve(runs[converted]) and len(curve(runs[old])) == 2
    assert_equal(*(tensors_of(run / "checkpoints/step-10") for run in runs.values()))
