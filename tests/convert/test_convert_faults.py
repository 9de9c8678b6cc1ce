"""What is not whole, not exact or not what it says is refused, in either direction."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from lomdm_dist import files
from lomdm_dist.cli import main
from lomdm_dist.convert import to_hf as exporter
from lomdm_dist.train.checkpoint import Checkpoint

NAME = "backbone.blocks.0.qkv.weight"


@pytest.fixture(scope="module")
def export(trained_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "model"
    main(["convert", "to-hf", str(trained_run.run), str(out)])
    return out


@pytest.fixture
def copy(export, tmp_path):
    return shutil.copytree(export, tmp_path / "copy")


def mistake(capsys, *arguments) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(a) for a in arguments])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert stopped.value.code in (1, 2) and said.startswith("error: ")
    return said


@pytest.mark.parametrize("change", ["int8", "complex64", "float64", "nan"])
def test_weights_that_float32_does_not_hold(copy, tmp_path, change, capsys):
    tensors = safetensors.torch.load_file(copy / "model.safetensors")
    if change == "nan":
        tensors[NAME][0, 0] = torch.nan
    else:
        tensors[NAME] = tensors[NAME].to(getattr(torch, change))
    safetensors.torch.save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    said = mistake(capsys, "convert", "from-hf", copy, tmp_path / "out")
    assert NAME in said and ("not finite" if change == "nan" else f"is {change}") in said
    assert str(copy) in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("c1", 3.0),
        ("objective", "mdlm"),
        ("mask_token_id", 7),
        ("max_position_embeddings", 8),
        ("packing", 5),
    ],
)
def test_a_config_that_contradicts_the_other(copy, tmp_path, key, value, capsys):
    facts = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(facts | {key: value}))
    said = mistake(capsys, "convert", "from-hf", copy, tmp_path / "out")
    assert f"{key} {value!r}" in said


def test_a_tokenizer_that_was_used_is_the_same(trained_run, copy, tmp_path):
    """transformers saves with a tokenizer how it cut and padded last."""
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer(["one", "one two three"], truncation=True, max_length=4, padding=True)
    tokenizer.save_pretrained(copy)
    main(["convert", "from-hf", str(copy), str(tmp_path / "out")])
    assert (
        Checkpoint(tmp_path / "out").state.data.tokenizer == Checkpoint(trained_run.run).state.data.tokenizer
    )


def test_a_pickle_is_refused_without_advice_to_run_it(copy, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    torch.save({"state_dict": Evil()}, tmp_path / "evil.ckpt")
    said = mistake(
        capsys, "convert", "from-hf", tmp_path / "evil.ckpt", tmp_path / "out", "--tokenizer", copy
    )
    assert "weights_only" not in said and not (tmp_path / "ran").exists()


def test_a_full_disk_is_named(trained_run, export, tmp_path, monkeypatch, capsys):
    """Whatever the library that was writing calls it."""

    def full(*_, **__):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(exporter, "save_file", full)
    monkeypatch.setattr("lomdm_dist.convert.from_hf.save_tensors", full)
    usage = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage)
    for arguments in (["to-hf", trained_run.run], ["from-hf", export]):
        said = mistake(capsys, "convert", *arguments, tmp_path / "out")
        assert "No space left on device" in said and str(tmp_path / "out") in said
    assert not list(tmp_path.iterdir())


def test_an_interrupt_is_no_damage(trained_run, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lomdm_dist.train.safe_reader.SafeReader.read_data", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "to-hf", str(trained_run.run), str(tmp_path / "out")])
    assert stopped.value.code == 130 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "settings",
    [{"length": 17}, {"steps": 2.5}, {"temperature": float("inf")}, {"prompt": [1.5]}, {"prompt": [300]}],
)
def test_generate_refuses_what_cannot_be(export, settings):
    model = AutoModelForMaskedLM.from_pretrained(export, trust_remote_code=True)
    with pytest.raises(ValueError):
        model.generate(**settings)
    with pytest.raises(ValueError, match="draws 0"):
        model.nelbo(torch.ones(1, 16, dtype=torch.long), draws=0)
