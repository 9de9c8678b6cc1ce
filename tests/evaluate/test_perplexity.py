import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from lomdm_dist.cli import main
from lomdm_dist.config import EvaluateConfig, load_config
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.evaluate.perplexity import estimate_bound
from lomdm_dist.model import LoMDM
from lomdm_dist.model.backbone import Context
from lomdm_dist.model.lomdm import Denoised
from lomdm_dist.ops.attention import Sight
from lomdm_dist.process import PowerSchedule
from lomdm_dist.train.checkpoint import Checkpoint
from tests.distributed.grids import on_processes
from tests.model.test_model import tiny_config
from tests.ranks import Ranks
from tests.table import MASK, TableBackbone, TableOutput, table_model
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


def measured(run, data, counts):
    """On one of several processes: the command, told its rank as by a launcher; the result of rank 0."""
    out = run.with_name(f"ppl-{counts}.json")
    where = ["--checkpoint", str(run), "--data", str(data), "--limit", "21", "--batch", str(8 // counts)]
    main(["eval", "ppl", *where, "--draws", "2", "--json", str(out)])
    return json.loads(out.read_text()) if os.environ.get("RANK", "0") == "0" else None


def test_the_command_gives_one_number_on_any_number_of_processes(random_run, trained_run):
    """21 sequences on 1, 2 and 4 real processes, and twice alone."""
    data = trained_run.data / "valid"
    first, again = measured(random_run, data, 1), measured(random_run, data, 1)
    numbers = [key for key, value in first.items() if isinstance(value, float | int)]
    assert [first[key] for key in numbers] == [again[key] for key in numbers]
    for count in (2, 4):
        shared = on_processes(count, measured, random_run, data, count)[0]
        assert shared["sequences"] == 21 and shared["tokens"] == 21 * 16
        for key in numbers:
            assert shared[key] == pytest.approx(first[key], rel=1e-6), (count, key)


# A joint distribution of two tokens, and networks that know it.

JOINT = torch.tensor([[0.30, 0.02, 0.08], [0.05, 0.20, 0.05], [0.10, 0.15, 0.05]], dtype=torch.float64)
PAIRS = torch.tensor([[a, b] for a in range(3) for b in range(3)])


class JointBackbone(TableBackbone):
    """Features of a text of two tokens: the logits of each position given the other, by the joint."""

    def __init__(self, causal: bool = False):
        nn.Module.__init__(self)
        self.causal, self.output = causal, TableOutput()
        self.anything = nn.Parameter(torch.zeros(1))  # a model is where its parameters are

    def context(self, shape, valid=None, documents=None, dropout=None):
        return Context(torch.zeros(1), None, Sight(self.causal, shape[1]), None, shape, None)

    def forward(self, tokens, context):
        rows = [self._position(text, place) for text in tokens.tolist() for place in range(len(text))]
        return torch.stack(rows)

    def _position(self, text, place):
        if self.causal:  # position k predicts token k from those before it; the first input is the mask
            seen = text[1 : place + 1]
            probs = JOINT.sum(1) if not seen else JOINT[seen[0]]
        else:
            other = text[1 - place]
            sides = JOINT if place else JOINT.T
            probs = sides.sum(0) if other == MASK else sides[other]
        psi, phi = torch.full((3,), 9.0 * place), torch.full((3,), -9.0 * place)  # two orders that disagree
        return torch.cat([probs.log(), torch.zeros(1), psi, phi])


class Pairs:
    length = 2

    def batch(self, indices, device):
        return PAIRS[torch.as_tensor(indices) % 9], None


@pytest.mark.parametrize(
    ("objective", "equal"),
    [
        ({"name": "mdlm"}, True),  # consistent conditionals: every order gives the chain rule
        ({"name": "lomdm", "c1": 0.7, "c2": 0.0}, True),
        ({"name": "window", "window_eps": 1e-6}, True),
        ({"name": "lomdm"}, False),  # phi and psi differ: the velocity term is paid
    ],
)
@pytest.mark.parametrize("time", ["pinned", "mixture"])
def test_the_bound_of_a_known_joint(objective, equal, time):
    """Never below -log p(x) of a text, by 3 standard errors; equal within them where theory says so."""
    model = table_model(objective)
    model.backbone = JointBackbone()
    config = tiny_config(objective=objective, model={"length": 2, "vocab_size": 4, "mask_id": 3})
    config = config.model_copy(update={"evaluate": EvaluateConfig(time=time)})
    for number, pair in enumerate(PAIRS):
        copies = np.full(64, number)
        result = estimate_bound(model, Pairs(), config, copies, draws=8, seed=number, batch=64)
        nll = -JOINT[tuple(pair)].log().item() / 2
        difference, error = result["nll_per_token"] - nll, 3 * result["standard_error"] + 1e-5
        assert difference > -error
        assert not equal or difference < error
        if time == "pinned" and not equal:
            assert difference > error


def test_ar_is_exact_on_a_known_joint():
    model = table_model({"name": "ar"})
    model.backbone = JointBackbone(causal=True)
    config = tiny_config(objective={"name": "ar"}, model={"length": 2, "vocab_size": 4, "mask_id": 3})
    result = estimate_bound(model, Pairs(), config, np.arange(9))
    assert result["nll_per_token"] == pytest.approx(-JOINT.log().mean().item() / 2, abs=1e-6)


MEMORY = """
import resource, sys
import numpy as np, torch
from lomdm_dist.config import load_config
from lomdm_dist.evaluate.perplexity import estimate_bound
from lomdm_dist.model import LoMDM
torch.set_num_threads(1)
vocabulary = ["model.vocab_size=50258", "model.mask_id=50257"]
config = load_config(sys.argv[1], [*vocabulary, "model.length=128", "model.width=8", "model.blocks=1"])
model = LoMDM(config.model, config.objective).eval()
class Text:
    length = 128
    def batch(self, indices, device):
        return torch.ones(len(indices), 128, dtype=torch.long), None
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
estimate_bound(model, Text(), config, np.arange(64), batch=32)
before = peak()
estimate_bound(model, Text(), config, np.arange(2000), batch=32)
print(peak() - before)
"""


@pytest.mark.slow
def test_the_memory_of_an_evaluation_does_not_grow(random_run):
    """2,000 sequences of 128 at V = 50,258: less than one batch of logits above 64 of them."""
    command = [sys.executable, "-c", MEMORY, str(random_run / "config.yaml")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"grown by {grown / 2**20:.0f} MiB")
    assert grown < 32 * 128 * 50258 * 4 / 8


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
    model.denoise = lambda z, x, masked, *_: Denoised(masked * ce, reverse, torch.zeros(()), None)
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
    assert "a trained model takes evaluate. and objective.c1 and objective.c2 only" in capsys.readouterr().err


def test_the_bound_of_the_same_weights_in_a_random_order(random_run, trained_run, tmp_path):
    """With c2 = 0 every exponent is c1, whatever the heads say: the same bound for each c1."""
    out = tmp_path / "ppl.json"
    where = ["--checkpoint", str(random_run), "--data", str(trained_run.data / "valid"), "--json", str(out)]
    found = {}
    for c1 in (0.3, 0.7, 1.3):
        main(["eval", "ppl", *where, f"objective.c1={c1}", "objective.c2=0"])
        found[c1] = json.loads(out.read_text())
        assert (found[c1]["convention"]["objective"]["c1"], found[c1]["config"]["objective"]["c2"]) == (c1, 0)
    main(["eval", "ppl", *where])
    ordered = json.loads(out.read_text())["nll_per_token"]
    assert found[0.7]["nll_per_token"] == pytest.approx(found[0.3]["nll_per_token"], rel=1e-5)
    assert found[0.7]["nll_per_token"] == pytest.approx(found[1.3]["nll_per_token"], rel=1e-5)
    assert abs(ordered - found[0.7]["nll_per_token"]) > 1e-3


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
