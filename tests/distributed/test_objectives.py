"""Each objective from its own config on the demo corpus: 30 steps on two processes, evaluated, sampled."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from lomdm_dist.cli import main
from tests.distributed.grids import on_processes, train
from tests.distributed.runs import ROOT, assert_same, curve

CONFIGS = [ROOT / "configs" / "demo.yaml", *sorted((ROOT / "configs" / "objectives").glob("*.yaml"))]


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory) -> Path:
    """Shards of the demo corpus, as `make demo` prepares them."""
    folder = tmp_path_factory.mktemp("demo")
    corpus, data = folder / "demo.jsonl", folder / "data"
    subprocess.run([sys.executable, ROOT / "data_tools" / "demo_corpus.py", corpus], check=True)
    tokens = ["--tokenizer", "bpe", "--vocab-size", "512", "--length", "64"]
    main(["prepare", "text", "--input", str(corpus), "--out", str(data), *tokens])
    return data


@pytest.mark.parametrize(
    "config",
    # another order of the windows that left_to_right and blocks have
    [pytest.param(c, marks=pytest.mark.slow) if c.stem == "permutation" else c for c in CONFIGS],
    ids=lambda path: path.stem,
)
def test_each_objective_trains_evaluates_and_samples(config, demo_data, tmp_path):
    run = tmp_path / "run"
    data = [f"data.train={demo_data / 'train'}", f"data.valid={demo_data / 'valid'}"]
    more = ["train.steps=30", "train.log_every=1", "train.valid_every=0"]
    on_processes(2, train, [*data, *more, f"train.run={run}"], None, config)
    ppl, samples = tmp_path / "ppl.json", tmp_path / "samples.json"
    main(["eval", "ppl", "--checkpoint", str(run), "--data", str(demo_data / "valid"), "--limit", "128",
          "--draws", "2", "--json", str(ppl)])  # fmt: skip
    result = json.loads(ppl.read_text())
    assert result["nll_per_token"] < math.log(511) - 0.3, "it has learned nothing: a new model guesses"
    assert result["standard_error"] < 0.15 and math.isfinite(curve(run, "grad_norm")[30])
    assert ("nll_per_token_uncut" in result) == (config.stem != "ar")
    main(["sample", "--checkpoint", str(run), "--num", "2", "--steps", "8", "--json", str(samples)])
    result = json.loads(samples.read_text())
    assert [len(ids) for ids in result["token_ids"]] == [64, 64]
    assert not {1, 2} & {i for ids in result["token_ids"] for i in ids}, (
        "the mask and the pad token are no text"
    )


ABLATIONS = {
    "no_stop_gradient": ["objective.stop_gradient=false"],
    "linear_head": ["objective.head=linear"],
    "polynomial": ["objective.schedule=polynomial"],
    "genmd4": ["objective={name: genmd4}"],
    "ar": ["objective={name: ar}"],
}


# the others: on two tensor-parallel ranks, and with ZeRO 3 too, in test_grids.py
QUICK = ("linear_head", "polynomial", "ar")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in ABLATIONS]
)
def test_zero_3_on_two_processes_has_the_curve_of_one_process(name, base, tmp_path):
    """Ablations of the learned order, and what has parameters or a backward pass of its own."""
    options = [*base, *ABLATIONS[name], "train.steps=6"]
    grids = {1: ["parallel.zero_stage=0"], 2: ["parallel.zero_stage=3", "train.micro_batch=4"]}
    for processes, grid in grids.items():
        on_processes(processes, train, [*options, *grid, f"train.run={tmp_path / str(processes)}"])
    for key in ("loss", "grad_norm"):
        assert_same(curve(tmp_path / "2", key), curve(tmp_path / "1", key), range(1, 7), 1e-4)
