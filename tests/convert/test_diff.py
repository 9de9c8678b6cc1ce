"""What differs between checkpoints and exports."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lomdm_dist.cli import main
from lomdm_dist.convert import diff as differences
from tests.tiny import randomize


@pytest.fixture(scope="module")
def made(trained_run, tmp_path_factory) -> Path:
    """A checkpoint `start`, other raw than ema, its `export` (ema), and that `back` again."""
    folder = tmp_path_factory.mktemp("diff")
    randomize(trained_run.run, folder / "start")
    main(["convert", "to-hf", str(folder / "start"), str(folder / "export")])
    main(["convert", "from-hf", str(folder / "export"), str(folder / "back")])
    return folder


def compare(a: Path, b: Path, capsys, *options: str) -> tuple[dict, list[str]]:
    capsys.readouterr()
    out = Path(str(b) + ".diff.json")
    main(["convert", "diff", str(a), str(b), *options, "--json", str(out)])
    return json.loads(out.read_text()), capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("a", "b"), [("start", "export"), ("export", "back"), ("back", "back")])
def test_equal_is_one_line(a, b, made, capsys):
    result, said = compare(made / a, made / b, capsys)
    assert result["equal"] and len(said) == 1 and said[0].startswith("equal:")
    assert result["max_difference"] == 0 and result["changed"] == 0


def test_raw_and_average_differ_everywhere_by_as_much_as_they_do(made, capsys):
    """The imported one has the average as its raw weights; against plain sums over the whole tensors."""
    from lomdm_dist.train.checkpoint import Checkpoint

    result, said = compare(made / "start", made / "back", capsys, "--weights", "raw")
    ours = dict(Checkpoint(made / "start").build_model("raw").named_parameters())
    theirs = dict(Checkpoint(made / "start").build_model("ema").named_parameters())
    assert not result["equal"] and result["changed"] == len(ours) == len(result["parameters"])
    for row in result["parameters"]:
        a, b = ours[row["name"]].detach().double(), theirs[row["name"]].detach().double()
        assert row["shape"] == list(a.shape)
        assert row["max_difference"] == pytest.approx((a - b).abs().max().item(), rel=1e-6)
        assert row["relative_difference"] == pytest.approx(((a - b).norm() / a.norm()).item(), rel=1e-6)
    assert len(said) == 2 + len(ours) + 1


def test_chunks_are_the_whole(monkeypatch):
    a = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[3, 2] += 0.5
    whole = differences._difference(a, b)
    monkeypatch.setattr(differences, "CHUNK", 4)
    assert differences._difference(a, b) == pytest.approx(whole)
    assert whole[0] == pytest.approx(0.5)
    b[6, 4] = torch.nan
    assert differences._difference(a, b)[0] != differences._difference(a, b)[0]  # nan


def test_names_shapes_config_and_tokenizer(made, trained_mdlm_run, tmp_path, capsys):
    import shutil

    result, _ = compare(made / "start", trained_mdlm_run.run, capsys)
    assert result["config_differs"]["objective.name"] == ["lomdm", "mdlm"]
    assert {name.partition(".")[0] for name in result["only_in_a"]} == {"phi", "psi"}
    assert result["only_in_b"] == [] and result["tokenizer_differs"] == {}

    shutil.copytree(made / "export", tmp_path / "export")
    file = tmp_path / "export/model.safetensors"
    tensors = load_file(file)
    tensors["phi.weight"] = torch.zeros(3, 32)
    tensors["more"] = torch.zeros(1)
    save_file(tensors, file)
    settings = tmp_path / "export/tokenizer.json"
    settings.write_text(settings.read_text().replace("[MASK]", "[MAST]"))
    result, said = compare(made / "export", tmp_path / "export", capsys)
    [row] = [row for row in result["parameters"] if row["max_difference"] != 0]
    assert (row["name"], row["shape"], row["other_shape"]) == ("phi.weight", [1, 32], [3, 32])
    assert result["only_in_b"] == ["more"] and "sha256" in result["tokenizer_differs"]
    assert any("1 x 32 | 3 x 32" in line for line in said)
    result, _ = compare(made / "start", file, capsys)  # a file alone: weights are all there is to compare
    assert result["config_differs"] == {} and result["changed"] == 1


def test_what_is_no_checkpoint_is_said(made, tmp_path, capsys):
    for path, said in ((tmp_path, "no weights in"), (tmp_path / "nowhere", "there is no")):
        with pytest.raises(SystemExit) as stopped:
            main(["convert", "diff", str(made / "start"), str(path)])
        assert stopped.value.code == 2 and said in capsys.readouterr().err
