import json
import math

import numpy as np
import pytest
import torch

from lomdm_dist.cli import main
from lomdm_dist.config import EvaluateConfig, load_config
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.evaluate.perplexity import estimate_bound
from lomdm_dist.model import LoMDM
from lomdm_dist.model.lomdm import Denoised
from lomdm_dist.process import PowerSchedule
from lomdm_dist.train.checkpoint import Checkpoint
from tests.model.test_model import tiny_config
from tests.tiny import prepare_tiny, randomize


@pytest.fixture(scope="module")
def random_run(trained_run, tmp_path_factory):
    return randomize(trained_run.run, tmp_path_factory.mktemp("random") / "run").folder


@pytest.fixture(scope="module")
def model(random_run):
    return Checkpoint(random_run).build_model()


def bound(model, run, data, count=21, split="valid", **options):
    return estimate_bound(
        model, ShardSet(data / split), load_config(run / "config.yaml"), np.arange(count), **options
    )


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_neither_batch_size_nor_order_changes_the_number(model, trained_run, batch):
    first = bound(model, trained_run.run, trained_run.data, batch=7)
    again = bound(model, trained_run.run, trained_run.data, batch=batch)
    assert again["nll_per_token"] == pytest.approx(first["nll_per_token"], rel=1e-6)
    assert again["sequences"] == 21 and again["tokens"] == 21 * 16


class Ranks:
    """Stands in for the grid: collects the sums of each rank instead of reducing them."""

    def __init__(self, rank, size, collected):
        self.data_rank, self.data_size, self.device, self.collected = rank, size, "cpu", collected

    def sum(self, values):
        self.collected.append(values)
        return sum(self.collected)


@pytest.mark.parametrize("size", [2, 4])
def test_the_number_does_not_depend_on_the_ranks(model, trained_run, size):
    """21 sequences on 2 and 4 ranks: none twice, none lost."""
    alone = bound(model, trained_run.run, trained_run.data)
    collected = []
    for rank in range(size):
        shared = bound(model, trained_run.run, trained_run.data, batch=4, grid=Ranks(rank, size, collected))
    for key, value in alone.items():
        assert shared[key] == pytest.approx(value, rel=1e-6), key


def test_another_seed_draws_other_times_for_each_sequence(trained_run):
    """Left to right a time is a position: seeds that kept the strata would all give one number."""
    config = load_config(trained_run.run / "config.yaml", ["objective={name: window}"])
    torch.manual_seed(0)
    model = LoMDM(config.model, config.objective).eval()
    torch.nn.init.normal_(model.backbone.output.bias)  # its CE differs from token to token
    shards, few = ShardSet(trained_run.data / "valid"), np.arange(8)
    results = [estimate_bound(model, shards, config, few, seed=seed) for seed in range(60)]
    estimates = np.array([r["nll_per_token"] for r in results])
    many = estimate_bound(model, shards, config, few, draws=200, seed=99)["nll_per_token"]
    assert estimates.std() > 0.3 * np.mean([r["standard_error"] for r in results])
    assert abs(estimates.mean() - many) < 4 * estimates.std() / 60**0.5


def test_standard_error_is_that_of_the_draws(model, trained_run):
    """Over 40 seeds the estimates scatter by no more than their own standard error, and around one mean."""
    results = [bound(model, trained_run.run, trained_run.data, seed=seed) for seed in range(40)]
    estimates = np.array([r["nll_per_token"] for r in results])
    error = np.mean([r["standard_error"] for r in results])
    assert 0 < estimates.std() < 1.3 * error
    many = bound(model, trained_run.run, trained_run.data, draws=40, seed=99)
    assert abs(many["nll_per_token"] - estimates.mean()) < 4 * estimates.std() / math.sqrt(40) * 1.5
    assert many["standard_error"] < error


class ManySequences:
    """Stands in for shards: 16,384 sequences of 128 tokens."""

    length = 128

    def batch(self, indices, device):
        return torch.zeros(len(indices), 128, dtype=torch.long), None


@pytest.mark.parametrize("time", ["mixture", "uniform", "pinned"])
def test_constant_ce_and_exponents_of_0375(time):
    """The uncut bound is the CE; the cut at 1e-3 loses (1e-3)**0.375 = 7.5% of it, and says how much."""
    objective = {"name": "lomdm", "c1": 0.375, "c2": 0.0}
    config = tiny_config(model={"length": 128}, objective=objective)
    config = config.model_copy(update={"evaluate": EvaluateConfig(time=time)})
    model, ce, kept = LoMDM(config.model, config.objective).eval(), 5.0, 1 - 1e-3**0.375
    reverse = PowerSchedule(torch.tensor([[0.375]]))
    model.denoise = lambda z, x, masked, *_: Denoised(masked * ce, reverse, torch.zeros(()))
    result = estimate_bound(model, ManySequences(), config, np.arange(4096), batch=512)
    error = result["standard_error"]
    assert kept == pytest.approx(0.925, abs=1e-4)
    cut_error = error + 1e-4 * (time == "pinned")  # where the cut falls among the strata
    assert abs(result["nll_per_token_cut"] - kept * ce) < 3 * cut_error
    assert abs(result["nll_per_token_uncut"] - ce) < 3 * error
    assert abs(result["remainder"] - (1 - kept) * ce) < 3 * cut_error
    asked = "nll_per_token_cut" if time == "uniform" else "nll_per_token_uncut"
    assert result["nll_per_token"] == pytest.approx(result[asked])
    if time != "uniform":
        assert error < 0.008 * ce
    if time == "pinned":  # nothing but rounding is left, where the CE is constant
        assert error < 1e-6 * ce


def test_a_new_model_has_the_perplexity_of_a_guess(trained_run):
    """CE is ln(V - 1) everywhere and A = hatA: the uncut bound is ln(V - 1), the cut one too low."""
    config = load_config(trained_run.run / "config.yaml")
    new = LoMDM(config.model, config.objective).eval()
    result = bound(new, trained_run.run, trained_run.data, 400, split="train", draws=8)
    assert abs(result["nll_per_token"] - math.log(299)) < 4 * result["standard_error"]
    kept = 1 - 1e-3**0.7
    assert result["nll_per_token_cut"] == pytest.approx(kept * math.log(299), rel=0.02)
    assert result["ppl"] == pytest.approx(math.exp(result["nll_per_token"]))


def test_the_command_follows_its_contract(random_run, trained_run, tmp_path, capsys):
    out = tmp_path / "ppl.json"
    where = ["--checkpoint", str(random_run), "--data", str(trained_run.data / "valid")]
    main(["eval", "ppl", *where, "--preset", "bound", "--draws", "2", "--json", str(out)])
    result = json.loads(out.read_text())
    fields = {"nll_per_token", "standard_error", "ppl", "tokens", "sequences", "convention"}
    assert fields | {"command", "versions", "machine", "config"} <= result.keys()
    assert f"ppl {result['ppl']:.2f}" in capsys.readouterr().out
    assert result["convention"]["draws"] == 2 and result["convention"]["split"] == "valid"


def test_a_cut_asked_for_is_the_number_and_the_rest_stands_beside(random_run, trained_run, tmp_path, capsys):
    out = tmp_path / "ppl.json"
    where = ["--checkpoint", str(random_run), "--data", str(trained_run.data / "valid")]
    found = {}
    for time in ("mixture", "uniform", "pinned"):
        main(["eval", "ppl", *where, "--draws", "40", "--json", str(out), f"evaluate.time={time}"])
        found[time] = json.loads(out.read_text())
        said = "cut" if time == "uniform" else "uncut"
        assert f"({said}, time {time}; " in capsys.readouterr().out
        assert found[time]["nll_per_token"] == pytest.approx(found[time][f"nll_per_token_{said}"])
        assert found[time]["convention"]["time"] == time
    for time in ("mixture", "uniform"):
        difference = found[time]["nll_per_token_uncut"] - found["pinned"]["nll_per_token_uncut"]
        assert abs(difference) < 4 * found[time]["standard_error"]
    assert found["uniform"]["remainder"] > 0.01
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "ppl", *where, "train.steps=3"])
    assert stopped.value.code == 2
    assert "a trained model takes evaluate. only" in capsys.readouterr().err


def test_data_of_another_kind_is_refused(trained_run, tmp_path, capsys):
    padded = prepare_tiny(tmp_path / "padded", packing="padded")
    for data, message in (
        (padded / "valid", "their perplexities do not compare"),
        (tmp_path, "no token shards in"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["eval", "ppl", "--checkpoint", str(trained_run.run), "--data", str(data)])
        assert stopped.value.code == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("error: ") and message in said


def test_gradients_are_off(model, trained_run):
    bound(model, trained_run.run, trained_run.data, 4)
    assert all(p.grad is None for p in model.parameters()) and torch.is_grad_enabled()
