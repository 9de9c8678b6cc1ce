"""`auto`: a run trains with what the planner chooses for the devices at hand; its losses do not change."""

import json

import pytest
import yaml

from lomdm_dist.config import load_config
from lomdm_dist.errors import UserError
from lomdm_dist.train import auto
from lomdm_dist.train.loop import train
from tests.distributed.runs import ROOT
from tests.tiny import tiny_config

AUTO = ["train.micro_batch=auto", "train.two_samples=auto", "train.recompute=auto"]


def config_of(tiny_data, run, *overrides: str):
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tiny_config(tiny_data, run)))
    return load_config(path, ["train.steps=3", *overrides])


def losses(run) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_auto_is_the_run_without(tiny_data, tmp_path, capsys):
    train(config_of(tiny_data, tmp_path / "said", "train.micro_batch=2"))
    train(config_of(tiny_data, tmp_path / "auto", *AUTO))
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "said"), rel=1e-5)
    saved = yaml.safe_load((tmp_path / "auto/config.yaml").read_text())["train"]
    assert (saved["micro_batch"], saved["two_samples"], saved["recompute"]) == (8, "joint", "none")
    assert "micro_batch 8: all that a rank has" in capsys.readouterr().out


def test_what_the_config_says_stays(tiny_data, tmp_path):
    train(config_of(tiny_data, tmp_path / "run", "train.micro_batch=auto", "train.recompute=block"))
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["train"]
    assert (saved["micro_batch"], saved["two_samples"], saved["recompute"]) == (8, "split", "block")


def test_too_little_memory_is_refused_with_the_arithmetic(tiny_data, tmp_path, monkeypatch):
    real = auto.device_here
    monkeypatch.setattr(
        auto, "device_here", lambda processes: real(processes).__class__("cpu", memory_gib=1e-4)
    )
    with pytest.raises(UserError, match=r"nothing fits 1 x cpu: the smallest plan, train\.micro_batch=1 "):
        train(config_of(tiny_data, tmp_path / "run", *AUTO))


def test_the_batch_still_divides():
    with pytest.raises(UserError, match="does not divide over 3"):
        load_config(ROOT / "configs/demo.yaml", AUTO).accumulation(3)
