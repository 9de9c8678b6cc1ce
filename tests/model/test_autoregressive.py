"""`ar`: the causal baseline on the same blocks."""

import itertools

import pytest
import torch
from scipy import stats

from lomdm_dist.config import SamplerConfig
from lomdm_dist.errors import UserError
from lomdm_dist.model import LoMDM
from lomdm_dist.model.decode import Decoder
from lomdm_dist.parallel.engine import Alone
from lomdm_dist.sample import sample
from lomdm_dist.sample.ancestral import next_token
from lomdm_dist.train.step import backpropagate
from tests.model.test_model import noise, randomised, tiny_config
from tests.sample.test_ancestral import Draws

TINY = tiny_config(model={"vocab_size": 5, "mask_id": 2, "length": 3}, objective={"name": "ar"})
TOKENS = (0, 1, 3, 4)
TEXTS = torch.tensor(list(itertools.product(TOKENS, repeat=3)))


@pytest.fixture(scope="module")
def model() -> LoMDM:
    return randomised(TINY).eval()


def test_the_probabilities_of_all_texts_add_up_to_one(model):
    with torch.no_grad():
        nll = model.causal_ce(TEXTS)[0].double().sum(dim=1)
    assert nll.std() > 0.1
    assert (-nll).exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_no_position_sees_itself_or_what_follows():
    model = randomised(tiny_config(objective={"name": "ar"})).eval()
    x = torch.randint(5, 11, (4, 8))
    other = x.clone()
    other[:, 5:] = torch.randint(5, 11, (4, 3))
    ce, changed = model.causal_ce(x)[0], model.causal_ce(other)[0]
    assert torch.equal(ce[:, :5], changed[:, :5]) and not torch.equal(ce[:, 6], changed[:, 6])
    valid = torch.arange(8).expand(4, 8) < 5
    padded, _ = model.causal_ce(torch.where(valid, x, 3), valid)
    assert torch.allclose(padded[:, :5], ce[:, :5]) and (padded[:, 5:] == 0).all()


def test_loss_is_the_mean_nll_a_token_and_reaches_every_parameter():
    config = tiny_config(objective={"name": "ar"})
    model = randomised(config)
    x = torch.randint(5, 11, (4, 8))
    losses = []
    engine = Alone(model)
    engine.backward = lambda loss: losses.append(loss.item()) or loss.backward()
    stats = backpropagate(engine, x, None, noise(config, len(x)), config)
    assert losses == [pytest.approx(stats["bound"].item() / stats["tokens"].item())]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_samples_have_the_exact_distribution(model, dtype):
    count, noise = 20_000, Draws(20_000, 3)
    noise.float32 = lambda counts, width: torch.rand(count, width, generator=noise.generator)
    z, decoder = torch.full((count, 4), 2), Decoder(model, count, 3)  # the mask token stands first
    with torch.no_grad():
        for position in range(3):
            features = decoder(z[:, position : position + 1])
            logits = model.backbone.output(features, decoder.condition)
            z[:, position + 1] = next_token(logits, position, 3, noise, SamplerConfig(dtype=dtype))
        expected = count * (-model.causal_ce(TEXTS)[0].double().sum(dim=1)).exp()
    observed = (z[:, None, 1:] == TEXTS).all(dim=2).sum(dim=0)
    assert observed.sum() == count
    assert stats.chisquare(observed, expected * count / expected.sum()).pvalue > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("parts", [[1] * 9, [4, 1, 1, 3], [9]])
def test_kept_keys_and_values_change_nothing(parts):
    """Read in parts, of any size, each position is seen as in one pass over all of the text."""
    model = randomised(tiny_config(model={"length": 9}, objective={"name": "ar"})).eval()
    x = torch.randint(5, 11, (3, 8), generator=torch.Generator().manual_seed(0))
    whole, _ = model.predict_next(x)
    tokens, decoder, end = torch.cat([torch.full((3, 1), model.mask_id), x], dim=1), Decoder(model, 3, 9), 0
    for n in parts:
        features, end = decoder(tokens[:, end : end + n]), end + n
        assert torch.allclose(features, whole[:, end - 1], atol=1e-5)


def test_a_prompt_is_continued_and_a_gap_refused(model):
    given = torch.tensor([3, 2, 2])
    samples = sample(model, 5, 3, 99, 0, given=given)
    assert samples.network_calls == 2
    assert (samples.token_ids[:, 0] == 3).all() and not (samples.token_ids == 2).any()
    with pytest.raises(UserError, match="cannot fill a gap"):
        sample(model, 5, 3, 99, 0, given=torch.tensor([3, 2, 4]))
