import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from lomdm_dist.cli import main
from lomdm_dist.commands.eval_order import _check
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.errors import UserError
from lomdm_dist.evaluate.order import (
    BINS,
    PAIRS,
    TIMES,
    correlations,
    exponent_by_frequency,
    exponents,
    extreme_tokens,
    left_to_right,
    pearson,
    speech_shares,
)
from lomdm_dist.evaluate.perplexity import evaluation_noise
from lomdm_dist.evaluate.speech import find_tagger
from lomdm_dist.process import corrupt, draw_time
from lomdm_dist.sample import sample
from tests.model.test_model import randomised, tiny_config
from tests.ranks import Ranks

LENGTH, TEXTS, DRAWS = 12, 9, 3
LEARNED = {"lomdm": {"name": "lomdm"}, "genmd4": {"name": "genmd4"}}
OTHERS = {
    "mdlm": {"name": "mdlm"},
    "window": {"name": "window", "order": "blocks", "block": 4},
    "polynomial": {"name": "lomdm", "schedule": "polynomial"},
}


class Texts:
    """Stands in for shards: texts of 7 to 12 tokens, and padding."""

    length = LENGTH

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randint(5, 11, (TEXTS, LENGTH), generator=generator)
        self.valid = torch.arange(LENGTH) < torch.randint(7, LENGTH + 1, (TEXTS, 1), generator=generator)

    def batch(self, indices, device):
        return self.x[indices], self.valid[indices]


def model_of(objective: dict):
    return randomised(tiny_config(model={"length": LENGTH}, objective=objective)).eval()


def numbers(found) -> list[float]:
    return [number for pairs in found.values() for value in pairs.values() for number in value]


def varies(values: np.ndarray) -> bool:
    """Where all is masked, all positions look alike to psi and to the network."""
    return np.ptp(values) > 1e-6 * values.max()


def one_by_one(model) -> np.ndarray:
    """The correlations of each text, mean of its draws, [TEXTS, times, pairs]: a loop over scipy's."""
    texts, of_texts = Texts(), []
    for i in range(TEXTS):
        x, valid = texts.batch([i], None)
        schedule, of_draws = model.order(x, valid), []
        for draw in range(DRAWS):
            uniforms = evaluation_noise(0, draw, DRAWS, np.array([i]), TEXTS, LENGTH)
            t, _ = draw_time(schedule, uniforms[:, :2], "mixture", 1e-3)
            z = corrupt(x, schedule, t, uniforms[:, 2:], model.mask_id, valid)
            masked = (z == model.mask_id)[0]
            features, reverse, condition = model.see(z, valid)
            probs = model.backbone.output(features, condition).double().softmax(dim=-1)[0, masked]
            if model.token_exponents is None:
                velocity_hat = reverse.velocity(t)[0, masked]
            else:
                velocity_hat = probs @ model.token_exponents().double() / t
            three = [schedule.velocity(t)[0, masked], velocity_hat, probs.amax(dim=-1)]
            a, hat_a, confidence = (values.detach().numpy() for values in three)
            pairs = (a, hat_a), (a, confidence), (hat_a, confidence)
            rs = [pearsonr(*pair)[0] if len(a) > 2 and all(map(varies, pair)) else math.nan for pair in pairs]
            inside = [low < t <= high for low, high in TIMES.values()]
            of_draws.append([rs if here else [math.nan] * 3 for here in inside])
        of_texts.append(of_draws)
    with np.errstate(all="ignore"):
        return np.nanmean(np.array(of_texts), axis=1)


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("objective", LEARNED.values(), ids=LEARNED)
def test_correlations_are_those_of_a_plain_loop(objective):
    model = model_of(objective)
    found, expected = correlations(model, Texts(), np.arange(TEXTS), DRAWS), one_by_one(model)
    for k, time in enumerate(TIMES):
        for j, pair in enumerate(PAIRS):
            values = expected[:, k, j][~np.isnan(expected[:, k, j])]
            mean, error, count = found[time][pair]
            assert count == len(values) > 1
            assert mean == pytest.approx(values.mean(), abs=1e-9)
            assert error == pytest.approx(values.std(ddof=1) / count**0.5, abs=1e-9)
    assert found["all"]["A_hatA"].sequences >= TEXTS - 1


@pytest.mark.parametrize("objective", [*LEARNED.values(), OTHERS["polynomial"]])
def test_neither_batch_size_nor_ranks_change_a_number(objective):
    model = model_of(objective)
    alone = numbers(correlations(model, Texts(), np.arange(TEXTS), DRAWS))
    for size, batch in ((1, 1), (1, 4), (2, 4), (4, 2)):
        collected = []
        for rank in range(size):  # the last one has what all have
            grid = Ranks(rank, size, collected)
            shared = numbers(correlations(model, Texts(), np.arange(TEXTS), DRAWS, batch=batch, grid=grid))
        assert shared == pytest.approx(alone, rel=1e-6, nan_ok=True)


def test_a_fixed_order_has_what_there_is():
    every = np.arange(TEXTS)
    found = correlations(model_of(OTHERS["mdlm"]), Texts(), every, DRAWS)
    assert all(value.sequences == 0 and math.isnan(value.mean) for value in found["all"].values())
    found = correlations(model_of(OTHERS["window"]), Texts(), every, DRAWS)["all"]
    assert found["A_hatA"].mean == pytest.approx(1)
    assert abs(found["A_confidence"].mean) < 1 and found["A_confidence"].sequences
    assert (exponents(model_of(OTHERS["mdlm"]), Texts(), every) == 1).all()
    for name in ("window", "polynomial"):
        assert exponents(model_of(OTHERS[name]), Texts(), every) is None


def test_exponents_are_those_of_the_model():
    model, texts = model_of(LEARNED["lomdm"]), Texts()
    found = exponents(model, texts, np.arange(TEXTS), batch=2)
    assert torch.allclose(found, model.order(texts.x, texts.valid).exponent, atol=1e-12)


def test_pearson_over_some_positions():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 6, 30, generator=generator, dtype=torch.float64)
    where = torch.rand(6, 30, generator=generator) < 0.4
    where[4] = torch.arange(30) < 2
    a[5] = 0.1 + 1e-17 * a[5]  # the same, but for rounding
    a[where.logical_not()] = math.inf  # never looked at
    found = pearson(a, b, where)
    for row in range(4):
        assert found[row] == pytest.approx(pearsonr(a[row, where[row]], b[row, where[row]])[0])
    assert found[4:].isnan().all()


def test_left_to_right_is_plus_one_and_ties_share_their_rank():
    forth = torch.arange(1, 9).repeat(2, 1)
    assert left_to_right(forth)[:2] == pytest.approx((1, 0))
    assert left_to_right(-forth)[:2] == pytest.approx((-1, 0))
    steps = torch.tensor([[3, 1, 1, 2, 2, 2, 5, 9]])
    expected = spearmanr(steps[0], range(8))[0]
    assert left_to_right(steps).mean == pytest.approx(expected)
    where = torch.tensor([[True] * 5 + [False] * 3])
    assert left_to_right(steps, where).mean == pytest.approx(spearmanr(steps[0, :5], range(5))[0])
    assert left_to_right(torch.ones(2, 4)).sequences == 0


@pytest.mark.parametrize(("order", "sign"), [("left_to_right", 1), ("permutation", -1)])
def test_samples_of_a_fixed_order_show_it(order, sign):
    backwards = {"permutation": list(reversed(range(LENGTH)))} if order == "permutation" else {}
    model = model_of({"name": "window", "order": order, "window_eps": 1e-9, **backwards})
    samples = sample(model, 4, LENGTH, 4 * LENGTH, seed=0)
    assert left_to_right(samples.revealed_at).mean == pytest.approx(sign, abs=1e-9)


def test_exponents_by_frequency():
    """Token k occurs 2**k times, and its exponent is k: bins of rare tokens come first, none is lost."""
    ids = torch.cat([torch.full((2**k,), k) for k in range(10)])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    ids = torch.cat([ids, torch.tensor([99])]).view(32, 32)  # 99 is padding
    where, exponent = ids != 99, ids.double()
    rows = exponent_by_frequency(exponent, ids, where)
    assert len(rows) == BINS and sum(row["tokens"] for row in rows) == 1023
    assert sum(row["types"] for row in rows) == 10
    full = [row for row in rows if row["types"]]
    assert [row["exponent"] for row in full] == sorted(row["exponent"] for row in full)
    assert (full[-1]["exponent"], full[-1]["standard_error"]) == pytest.approx((9, 0), abs=1e-6)
    assert (full[-1]["least"], full[-1]["most"]) == (512, 512)
    assert full[0]["exponent"] == pytest.approx(
        sum(k * 2**k for k in range(full[0]["types"])) / full[0]["tokens"]
    )
    found = extreme_tokens(exponent, ids, where)
    assert [row["id"] for row in found["earliest"]] == [9, 8, 7, 6, 5, 4], "the others are rare"
    assert found["latest"][0] == {"id": 4, "exponent": 4.0, "occurrences": 16}


def test_shares_of_parts_of_speech():
    """Nouns in steps 1 to 16 and 112, verbs in 17 to 111 and after: the ends of the ranges are in."""
    steps = torch.arange(1, 129).repeat(3, 1)
    classes = [["noun" if s <= 16 or s == 112 else "verb" for s in row] for row in steps.tolist()]
    found = speech_shares(classes, steps, 128)
    assert found["early"]["steps"] == [1, 16] and found["late"]["steps"] == [112, 128]
    assert found["early"]["shares"]["noun"] == {"mean": 1.0, "standard_error": 0.0, "sequences": 3}
    assert found["late"]["shares"]["noun"]["mean"] == pytest.approx(1 / 17)
    assert found["late"]["shares"]["verb"]["mean"] == pytest.approx(16 / 17)
    assert found["late"]["tokens"] == 51
    classes[0] = ["verb"] * 128
    found = speech_shares(classes, steps, 128)["early"]["shares"]["noun"]
    assert found["mean"] == pytest.approx(2 / 3)
    assert found["standard_error"] == pytest.approx(np.std([0, 1, 1], ddof=1) / 3**0.5)


def order_of(run, data, *more) -> None:
    few = ["--limit", "40", "--num", "6", "--steps", "8", "--batch", "16"]
    main(["eval", "order", "--checkpoint", str(run), "--data", str(data), *few, *more])


def test_the_command_follows_its_contract(trained_run, tmp_path, capsys):
    pytest.importorskip("textblob")
    out, figure = tmp_path / "order.json", tmp_path / "order.png"
    data = trained_run.data / "valid"
    order_of(trained_run.run, data, "--tagger", "textblob", "--json", str(out), "--plot", str(figure))
    said, result = capsys.readouterr().out, json.loads(out.read_text())
    for words in ("A, hatA", "Left to right", "paper LoMDM 1-16", "occurrences", "earliest"):
        assert words in said
    assert set(result["correlations"]) == set(TIMES) and not result["missing"]
    assert result["correlations"]["all"]["A_hatA"]["sequences"] > 20
    assert abs(result["left_to_right"]["samples"]["mean"]) < 1
    early = result["speech"]["early"]
    assert early["steps"] == [1, 1] and sum(s["mean"] for s in early["shares"].values()) == pytest.approx(1)
    rows = result["exponent_by_frequency"]
    used = min(40, len(ShardSet(data)))
    assert sum(row["tokens"] for row in rows) == used * 16
    assert "textblob" in result["convention"]["tagger"] and figure.stat().st_size > 1000


def test_what_a_model_has_not_is_null_with_a_reason(trained_mdlm_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lomdm_dist.evaluate.speech.TAGGERS", {})
    find_tagger.cache_clear()  # an earlier test of this process may have found one
    out = tmp_path / "order.json"
    order_of(trained_mdlm_run.run, trained_mdlm_run.data / "valid", "--json", str(out))
    result = json.loads(out.read_text())
    assert set(result["missing"]) == {"correlations", "exponents", "speech"}
    assert result["correlations"]["all"]["A_confidence"]["mean"] is None
    assert result["exponent_by_frequency"] is result["speech"] is result["left_to_right"]["exponents"] is None
    assert "no speech: no tagger is installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--length", "17"], "--length 17: the model was trained at 16"),
        (["--num", "0"], "--num 0: give 1 to 1,000,000"),
        (["--plot", "x.gif"], "the name must end in .png, .pdf, .svg"),
        (["evaluate.time=uniform"], "a trained model takes sampler. only"),
    ],
)
def test_mistakes_are_said_before_the_work(more, message, trained_run, capsys):
    with pytest.raises(SystemExit) as stopped:
        order_of(trained_run.run, trained_run.data / "valid", *more)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_ar_is_refused():
    with pytest.raises(UserError, match="runs/ar is ar: it generates from left to right, one token a step"):
        _check(SimpleNamespace(checkpoint="runs/ar"), tiny_config(objective={"name": "ar"}))
