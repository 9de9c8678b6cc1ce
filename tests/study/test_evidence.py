"""The evidence's sweep, and the sums of its report."""

import contextlib
import json
import os

import pytest

from benchmarks import evidence, evidence_report
from lomdm_dist.errors import UserError
from lomdm_dist.study.sweep import load_sweep
from tests.tiny import REPOSITORY


def test_every_row_has_as_many_denoiser_rows_a_step(monkeypatch):
    """The paper's rule: half the texts where an objective takes two samples of each."""
    monkeypatch.chdir(REPOSITORY)
    points = load_sweep(evidence.SWEEP, []).points
    rows = {point.config.train.global_batch * max(1, point.config.objective.samples) for point in points}
    assert rows == {64}
    assert {point.group for point in points} >= {
        *evidence.SEEDS,
        *evidence_report.DRAWN,
        *evidence_report.LONG,
        *sum(evidence_report.BASES, ()),
    }
    assert {*evidence.LOOKED_AT} <= {point.name for point in points}


def row(bounds: list[float], group: str, seed: int = 0, flops: float = 1.0) -> dict:
    curve = [[10 * (k + 1), bound, None, None, None] for k, bound in enumerate(bounds)]
    return {
        "group": group,
        "objective": {"name": group.partition("_")[0], "time": "mixture"},
        "seed": seed,
        "curve": curve,
        "steps": 10 * len(bounds),
        "flops_a_step": flops,
    }


@pytest.mark.parametrize(("bound", "step"), [(5.0, 10), (4.5, 15), (3.0, 30), (2.9, None), (9.0, 10)])
def test_the_step_at_which_a_curve_is_at_a_bound(bound, step):
    assert evidence_report.step_of(row([5.0, 4.0, 3.0], "lomdm")["curve"], bound) == step


def test_what_a_row_lacks_at_mdlm_s_budget_and_when_it_is_there():
    groups = {
        "mdlm": [row([5.0, 4.0], "mdlm", 0), row([5.0, 3.0], "mdlm", 1)],
        "lomdm": [row([4.5, 3.5], "lomdm", 0, 2.0), row([5.0, 3.5], "lomdm", 1, 2.0)],
    }
    said = evidence_report.budgets(groups, {"mdlm": 1.0, "lomdm": 1.25})
    assert said.splitlines()[2:] == [
        "| lomdm | steps | 0.000 +- 0.500 | 0.75 (1 of 2) |",
        "| lomdm | seconds | 0.500 +- 0.600 | 0.94 (1 of 2) |",
        "| lomdm | FLOPs | 1.250 +- 0.750 | 1.50 (1 of 2) |",
    ]
    groups["lomdm"] = [row([9.0, 8.0], "lomdm", 0)]
    assert "| lomdm | steps | 4.000 | never |" in evidence_report.budgets(groups, {"mdlm": 1.0, "lomdm": 1.0})


def ended(group: str, seed: int, uncut: float, cut: float, unordered: float | None = None) -> dict:
    signals = [[20, None, None, 0.1, None, None, None]]
    numbers = {"nll_per_token": uncut, "nll_per_token_cut": cut}
    variants = {"unordered": {"nll_per_token": unordered}} if unordered else {}
    return row([uncut], group, seed) | {"signals": signals, "variants": variants} | numbers


def test_what_an_order_changes():
    """Against MDLM of the same seed; and against the same weights without it."""
    groups = {
        "mdlm": [ended("mdlm", 0, 4.0, 3.9), ended("mdlm", 1, 3.0, 2.9)],
        "lomdm": [ended("lomdm", 0, 4.1, 3.6, 4.3), ended("lomdm", 1, 3.3, 2.8, 3.3)],
        "ar": [ended("ar", 1, 2.5, None)],
    }
    assert evidence_report.differences(groups, ("mdlm",)).splitlines()[2:] == [
        "| lomdm | 2 | 0.2000 +- 0.1000 | -1.071 to 1.471 | -0.2000 +- 0.1000 |",
        "| ar | 1 | -0.5000 | - | - |",
    ]
    assert evidence_report.worth(groups).splitlines()[2:] == [
        "| lomdm | 2 | 0.100 +- 0.000 | 0.1000 +- 0.1000 |"
    ]


def test_rows_of_two_texts_are_not_kept_together(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(evidence, "DATA", tmp_path / "data")
    monkeypatch.setattr(evidence, "unigram_nats", lambda: 5.0)
    monkeypatch.chdir(REPOSITORY)
    about = {point.name: evidence.about(point) for point in evidence.points()}
    for sequences, name, said in (
        (7, "lomdm-s0", ""),
        (7, "ar-s1", ""),
        (8, "mdlm-s0", "another text"),
        (7, "", "no row"),
    ):
        data = {"splits": {"train": {"sequences": sequences}}, "command": ["lomdm", "prepare"]}
        (tmp_path / "data.json").write_text(json.dumps(data))
        with pytest.raises(SystemExit, match=said) if said else contextlib.nullcontext():
            evidence.keep({name: about[name]} if name else {})
    assert list(evidence.read_kept()["rows"]) == ["ar-s1", "lomdm-s0"]
    data["splits"]["train"]["sequences"] = 7
    (tmp_path / "data.json").write_text(json.dumps(data))
    for name, row in (("gone-s0", about["ar-s1"]), ("ar-s2", about["ar-s2"] | {"steps": 7})):
        evidence.write_kept({"rows": {name: row}, "data": data})
        with pytest.raises(SystemExit, match=f"{name} in kept.json are no rows of"):
            evidence.keep({"ar-s1": about["ar-s1"]})


def test_a_row_is_what_its_run_has_left(tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    monkeypatch.chdir(tmp_path)
    point = next(p for p in load_sweep(evidence.SWEEP, []).points if p.name == "lomdm-s1")
    folder = point.run / f"checkpoints/step-{point.config.train.steps}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"versions": {"commit": "abc"}}))
    lines = [
        {"step": 20, "loss": 5.0, "tokens": 7, "exponent_std": 0.1},
        {"step": 20, "valid_nll_per_token": 4.0},
    ]
    (point.run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"nll_per_token": 3.5, "command": ["/somewhere/cli.py", "eval"], "versions": {}, "machine": {}}
    (point.run / "ppl.json").write_text(json.dumps(result))
    row = evidence.row_of(point)
    assert (row["group"], row["seed"], row["tokens"], row["nll_per_token"]) == ("lomdm", 1, 7, 3.5)
    assert row["curve"] == [[20, 4.0, None, None, None]] and len(row["signals"]) == 1
    assert row["trained_with"] == {"commit": "abc"} and row["commands"][1] == ["lomdm", "eval"]
    assert str(tmp_path) not in json.dumps(row)


def test_a_result_of_fewer_steps_or_a_damaged_one_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    point = next(p for p in load_sweep(evidence.SWEEP, []).points if p.name == "ar-s1")
    state = point.run / f"checkpoints/step-{point.config.train.steps}/state.json"
    state.parent.mkdir(parents=True)
    state.touch()
    result = point.run / "ppl.json"
    assert not evidence.is_made(result, point)
    result.write_text('{"nll_per_token"')
    assert evidence.is_made(result, point)
    with pytest.raises(UserError, match=r"ppl.json is damaged .*: delete it"):
        evidence.row_of(point)
    later = result.stat().st_mtime + 60
    os.utime(state, (later, later))
    assert not evidence.is_made(result, point)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}'])
def test_damaged_rows_are_named(text, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "KEPT", tmp_path / "kept.json")
    (tmp_path / "kept.json").write_text(text)
    with pytest.raises(UserError, match=r"kept.json is damaged"):
        evidence.read_kept()
