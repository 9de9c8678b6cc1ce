"""`lomdm bench step`: what its rows and floors are. Not how fast: speed lives in benchmarks/."""

import json

import pytest

from lomdm_dist.cli import main
from lomdm_dist.config import load_config
from lomdm_dist.model.flops import step_flops_a_sequence
from lomdm_dist.study.bench import cases
from tests.distributed.runs import ROOT

SMALL = ["model.width=32", "model.blocks=2", "model.heads=2", "model.length=32", "model.vocab_size=300"]
SMALL += ["train.precision=fp32", "model.dropout=0"]


def bench(*more: str) -> None:
    main(["bench", "step", "--config", str(ROOT / "configs/demo.yaml"), *SMALL, *more])


def test_rows_ratios_and_floors(tmp_path, capsys):
    rows = ["lomdm", "lomdm, joint", "lomdm, all logits", "mdlm", "mdlm, all logits"]
    out, plot = tmp_path / "step.json", tmp_path / "step.png"
    bench("--sequences", "4", "--rounds", "2", "--rows", *rows, "--json", str(out), "--plot", str(plot))
    result = json.loads(out.read_text())
    found = {row["name"]: row for row in result["rows"]}
    assert list(found) == rows and plot.stat().st_size > 0
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in rows)
    # the same masks; split computes the condition, a row, once more
    assert found["lomdm"]["flops"] == pytest.approx(found["lomdm, joint"]["flops"], rel=0.03)
    assert found["lomdm"]["flops"] < found["lomdm, all logits"]["flops"]
    assert found["lomdm"]["peak_activation_bytes"] < found["lomdm, joint"]["peak_activation_bytes"]
    config, mdlm = (
        load_config(
            ROOT / "configs/demo.yaml",
            [
                *SMALL,
                f"train.micro_batch={texts}",
                f"train.global_batch={texts}",
                "train.two_samples=split",
                *more,
            ],
        )
        for texts, more in ((2, []), (4, ["objective={name: mdlm}"]))
    )
    floor = step_flops_a_sequence(config) / 2 / step_flops_a_sequence(mdlm, every_position=True)
    ratio = result["floor"]["ratios"]["lomdm / mdlm, all logits"]
    assert ratio["floor"] == pytest.approx(floor)
    assert ratio["floor_of_these_masks"] == pytest.approx(floor, rel=0.1)
    for name, kept in result["floor"]["bytes"].items():
        assert kept == pytest.approx(found[name]["peak_activation_bytes"], rel=0.05), name


def test_the_floors_of_the_paper_s_model():
    """The numbers of docs/speed.md, for 12 and 4 blocks."""
    for blocks, expected in ((12, (1.21, 1.10, 1.27)), (4, (1.26, 1.04, 1.41))):
        size = [f"model.blocks={blocks}"]
        lomdm = load_config(ROOT / "configs/owt.yaml", size)
        mdlm = load_config(ROOT / "configs/owt.yaml", [*size, "objective={name: mdlm, time: uniform}"])

        def of(config, samples, everywhere):
            return step_flops_a_sequence(config, everywhere) / samples

        ratios = of(lomdm, 2, True) / of(mdlm, 1, True), of(lomdm, 2, False) / of(mdlm, 1, True)
        assert (*ratios, of(lomdm, 2, False) / of(mdlm, 1, False)) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--sequences", "3"], "--sequences 3 is odd"),
        (["--rows", "nothing"], "no row is called 'nothing'; there are 'lomdm', 'lomdm, joint'"),
        (["objective={name: mdlm}"], "objective.name is mdlm"),
        (["--rounds", "0"], "--rounds 0: give 1 or more"),
        (["--plot", "step.foo"], "--plot step.foo: the name must end in .png, .pdf, .svg"),
        (["train.recompute=auto"], "train.recompute is auto: say what to measure"),
        (["model.heads=2", "parallel.tensor_parallel=2"], "parallel.tensor_parallel is 2"),
    ],
)
def test_mistakes_are_one_line(more, said, capsys):
    with pytest.raises(SystemExit) as status:
        bench(*more)
    assert status.value.code == 2 and said in capsys.readouterr().err


def test_one_round_has_no_spread_and_one_row_is_its_own_measure(tmp_path, capsys):
    bench("--sequences", "2", "--rounds", "1", "--rows", "mdlm", "--json", str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["spread"] == 0
    assert "of mdlm" in (said := capsys.readouterr().out) and "of lomdm" not in said


def test_each_case_changes_one_thing():
    import torch

    names = [case.name for case in cases(torch.device("cpu"))]
    assert len(set(names)) == len(names) and names[0] == "lomdm"
    assert all(len(case.changes) <= 1 for case in cases(torch.device("cpu")) if "no trick" not in case.name)
