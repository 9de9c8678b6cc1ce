import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest

from lomdm_dist.config import load_config
from lomdm_dist.machine import to_json
from lomdm_dist.process import keyed_uniforms
from lomdm_dist.train.metrics import Reporter, _has_wandb_key, _keep_until
from lomdm_dist.train.saver import drop_old
from tests.tiny import REPOSITORY


def steps_left(folder, newest, keep) -> list[str]:
    drop_old(folder / f"step-{newest}", keep)
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_checkpoint_is_never_dropped(tmp_path):
    """A run resumed from step 4 of 4, 6, 8 saves step 5: the later ones are not newer."""
    for name in ("step-4", "step-5", "step-6", "step-8", "step-old1", ".step-9.partial"):
        (tmp_path / name).mkdir()
        shutil.copy(REPOSITORY / "configs/demo.yaml", tmp_path / name / "config.yaml")
    rest = [".step-9.partial", "step-6", "step-8", "step-old1"]
    assert steps_left(tmp_path, 5, keep=2) == sorted([*rest, "step-4", "step-5"])
    assert steps_left(tmp_path, 5, keep=1) == sorted([*rest, "step-5"])
    assert steps_left(tmp_path, 8, keep=1) == sorted([".step-9.partial", "step-8", "step-old1"])


def test_what_may_be_kept_for_good_is_not_dropped(tmp_path):
    """A checkpoint whose config this version cannot read does not tell whether it is one of every 7 steps."""
    keeps = load_config(REPOSITORY / "configs/demo.yaml", ["train.save_every=7", "train.keep_every=7"])
    for step in (6, 7, 8, 9):
        (tmp_path / f"step-{step}").mkdir()
        keeps.save(tmp_path / f"step-{step}/config.yaml")
    with open(tmp_path / "step-8/config.yaml", "a") as file:
        file.write("of_another_version: {}\n")
    (problem,) = drop_old(tmp_path / "step-9", 1)
    assert "step-8" in str(problem) and "of_another_version" in str(problem)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-7", "step-8", "step-9"]


def test_metrics_after_the_checkpoint_and_cut_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"step": 2}\n[1]\nnull\n\xff\n{"step": 3}\n' + b"[" * 10**5 + b'\n{"step": 2, "va'
    )
    _keep_until(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    _keep_until(tmp_path / "absent", 2)


def test_json_holds_no_number_that_is_none():
    assert json.loads(to_json({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}})) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": None},
    }


def test_wandb_that_fails_ends_nothing_and_is_said_once(tmp_path, capsys):
    """A service that takes one line, and no more, not even the end."""
    sent = []

    class Service:
        def log(self, metrics):
            if sent:
                raise ConnectionError("the server is gone\nand more")
            sent.append(metrics["step"])

        def finish(self):
            raise ConnectionError("the end")

    config = load_config(REPOSITORY / "configs/demo.yaml", [f"train.run={tmp_path}"])
    for lines in (4, 1):  # it fails at a line; at the end
        sent.clear()
        reporter = Reporter(config, 0, active=True)
        reporter._wandb = Service()
        for step in range(lines):
            reporter.report({"step": step + 1})
        reporter.close()
        path = tmp_path / "metrics.jsonl"
        why = "the server is gone" if lines > 1 else "the end"
        assert capsys.readouterr().out == f"wandb: {why}; no more is sent to it, {path} has everything\n"
        assert sent == [1] and len(path.read_text().splitlines()) == lines


def test_a_resumed_run_goes_on_in_its_wandb_run_and_a_new_one_does_not(tmp_path, monkeypatch):
    begun = []

    def init(**options):
        begun.append((options["id"], options["resume"]))
        return SimpleNamespace(define_metric=lambda *names, **options: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    config = load_config(REPOSITORY / "configs/demo.yaml", [f"train.run={tmp_path}", "wandb.mode=offline"])
    for resumed_at in (0, 5, 5, 0):
        Reporter(config, resumed_at, active=True).close()
    first, again, more, anew = begun
    assert first == again == more != anew and first[1] == "allow"


@pytest.mark.parametrize("netrc", [None, "machine elsewhere login me password it", "not a netrc"])
def test_wandb_without_a_key_of_its_own_does_not_ask(tmp_path, monkeypatch, netrc):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if netrc:
        (tmp_path / ".netrc").write_text(netrc)
    assert not _has_wandb_key()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key")
    (tmp_path / ".netrc").chmod(0o600)
    assert _has_wandb_key()


def test_large_seeds_stay_apart():
    draws = [keyed_uniforms(seed, 0, 0, [0], 1).item() for seed in (0, 1, 2**53, 2**53 + 1, 2**63 - 1)]
    assert len(set(draws)) == 5
