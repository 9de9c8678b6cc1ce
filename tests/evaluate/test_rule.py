"""The likelihood of a deterministic order's sampler: it is one, and it is that of the samples."""

import itertools
import json

import numpy as np
import pytest
import torch
from scipy import stats

from lomdm_dist.cli import main
from lomdm_dist.config import OBJECTIVES, SamplerConfig
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.errors import UserError
from lomdm_dist.evaluate.rule import check_exact, estimate_rule, sequence_nll
from lomdm_dist.model import LoMDM
from lomdm_dist.sample.ancestral import rule_step
from lomdm_dist.train.checkpoint import Checkpoint
from tests.model.test_model import tiny_config
from tests.ranks import Ranks
from tests.sample.test_ancestral import Draws, one_step
from tests.table import FAMILY, MASK, L, V, table_model
from tests.tiny import randomize

TEXTS = torch.tensor(list(itertools.product(range(V), repeat=L)))
RULES = [
    ("mdlm", "confidence"),
    ("lomdm", "confidence"),
    ("lomdm", "exponent"),
    ("lomdm", "left_to_right"),
    ("genmd4", "exponent"),
]


def probabilities(model, texts, steps, never=(), **settings):
    return (-sequence_nll(model, texts, None, steps, SamplerConfig(**settings), never)[0]).exp()


@pytest.mark.parametrize(("name", "rule"), RULES)
@pytest.mark.parametrize("k", [1, 2, L])
def test_likelihoods_sum_to_one_and_are_those_of_200_000_samples(name, rule, k):
    model, count, steps = table_model(FAMILY[name], seed=2), 200_000, -(-L // k)
    exact = probabilities(model, TEXTS, steps, rule=rule)
    assert exact.sum().item() == pytest.approx(1, abs=1e-9)
    z, t, noise = torch.full((count, L), MASK), torch.ones(count), Draws(count, 7)
    with torch.no_grad():
        for step in range(steps):
            z, t = one_step(model, z, t, step, steps, noise, SamplerConfig(rule=rule), rule_step)
    observed = torch.bincount((z * torch.tensor([V**2, V, 1])).sum(dim=1), minlength=V**L)
    assert stats.chisquare(observed, exact / exact.sum() * count).pvalue > 1e-3
    other = probabilities(table_model(FAMILY[name], seed=3), TEXTS, steps, rule=rule)
    assert stats.chisquare(observed, other / other.sum() * count).pvalue < 1e-9


def small_model(objective: str) -> LoMDM:
    config = tiny_config(model={"length": 4, "vocab_size": 5, "mask_id": 4}, objective={"name": objective})
    model = LoMDM(config.model, config.objective).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.4)
    return model


@pytest.mark.parametrize(
    ("name", "rule", "settings"),
    [
        ("lomdm", "confidence", {}),
        ("lomdm", "exponent", {}),
        ("lomdm", "left_to_right", {}),
        ("mdlm", "confidence", {"temperature": 0.5}),
        ("genmd4", "exponent", {}),
        ("lomdm", "confidence", {"top_p": 0.7}),
    ],
)
def test_likelihoods_of_a_real_network_sum_to_one(name, rule, settings):
    """256 texts of 4 tokens; with one id never drawn the texts without it have all of the probability."""
    model, texts = small_model(name), torch.tensor(list(itertools.product(range(4), repeat=4)))
    for steps in (4, 2, 1):
        exact = probabilities(model, texts, steps, rule=rule, **settings)
        assert exact.sum().item() == pytest.approx(1, abs=1e-6) and exact.std() > 1e-3
    without = probabilities(model, texts, 2, never=(2,), rule=rule, **settings)
    assert without.sum().item() == pytest.approx(1, abs=1e-6)
    assert (without[(texts == 2).any(dim=1)] == 0).all()


def test_left_to_right_one_at_a_time_is_the_chain_rule():
    model = small_model("lomdm")
    x, expected = torch.tensor([[3, 0, 2, 1]]), 0.0
    with torch.no_grad():
        for i in range(4):
            features, _, condition = model.see(torch.where(torch.arange(4) < i, x, 4))
            expected -= model.backbone.output(features, condition)[0, i].log_softmax(0)[x[0, i]].item()
    nll, impossible, calls = sequence_nll(model, x, None, 4, SamplerConfig(rule="left_to_right"))
    assert nll.item() == pytest.approx(expected, rel=1e-6)
    assert (impossible.item(), calls.item()) == (0, 4)


@pytest.mark.parametrize("rule", ["confidence", "exponent"])
def test_padding_changes_nothing(rule):
    """A short text beside a long one has the likelihood that it has alone, whatever its padding is."""
    model, settings = small_model("lomdm"), SamplerConfig(rule=rule)
    x = torch.tensor([[3, 0, 0, 0], [1, 2, 3, 0]])
    valid = torch.tensor([[True, True, False, False], [True] * 4])
    nll, _, calls = sequence_nll(model, x, valid, 3, settings)
    alone = sequence_nll(model, x[:1, :2], None, 3, settings)[0]
    assert nll[0].item() == pytest.approx(alone.item(), rel=1e-6)
    assert calls.tolist() == [2, 3]


@pytest.fixture(scope="module")
def random_run(trained_run, tmp_path_factory):
    return randomize(trained_run.run, tmp_path_factory.mktemp("random") / "run").folder


def test_neither_ranks_nor_batches_change_the_number(random_run, trained_run):
    model, shards = Checkpoint(random_run).build_model(), ShardSet(trained_run.data / "valid")
    settings = SamplerConfig(rule="confidence")

    def estimate(**options):
        result = estimate_rule(model, shards, np.arange(21), 6, settings, **options)
        del result["seconds"]
        return result

    alone = estimate()
    assert (alone["sequences"], alone["tokens"], alone["network_calls"]) == (21, 21 * 16, 6)
    assert estimate(batch=4) == pytest.approx(alone, rel=1e-6)
    for size in (2, 4):
        collected = []
        for rank in range(size):
            shared = estimate(batch=4, grid=Ranks(rank, size, collected))
        assert shared == pytest.approx(alone, rel=1e-6)


def test_the_command_follows_its_contract(random_run, trained_run, tmp_path, capsys):
    out = tmp_path / "rule.json"
    where = ["--checkpoint", str(random_run), "--data", str(trained_run.data / "valid"), "--json", str(out)]
    options = ["--rule", "exponent", "--steps", "4", "--limit", "9"]
    main(["eval", "rule", *where, *options])
    result = json.loads(out.read_text())
    fields = {"nll_per_token", "standard_error", "ppl", "tokens", "sequences", "network_calls", "seconds"}
    assert fields | {"convention", "command", "versions", "machine", "config"} <= result.keys()
    said = capsys.readouterr().out
    assert f"ppl {result['ppl']:.2f}" in said and "the bound of `eval ppl` speaks of the random" in said
    assert result["convention"]["tokens_a_step"].startswith("4 of 16")
    main(["eval", "rule", *where, *options, "sampler.top_p=0.05"])
    result = json.loads(out.read_text())
    assert result["nll_per_token"] is None and result["impossible_tokens"] > 0
    assert "are never drawn under top_p 0.05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["sampler.final=argmax"], "give sampler.final=draw"),
        (["sampler.grid=even"], "no times to reveal at"),
        (["sampler.rule=random"], "a trained model takes sampler.temperature and"),
        (["--steps", "0"], "--steps 0: give 1 to 100,000"),
    ],
)
def test_mistakes_are_one_line(trained_run, capsys, options, message):
    where = ["--checkpoint", str(trained_run.run), "--data", str(trained_run.data / "valid")]
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "rule", *where, "--rule", "confidence", *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_ar_is_sent_to_eval_ppl():
    with pytest.raises(UserError, match="`eval ppl` gives its exact likelihood"):
        check_exact(SamplerConfig(rule="left_to_right"), OBJECTIVES["ar"](name="ar"))
