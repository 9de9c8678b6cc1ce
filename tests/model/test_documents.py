"""`data.attend: document`: a token sees its own document, and no other."""

import pytest
import torch

from lomdm_dist.parallel.engine import Alone
from lomdm_dist.train.step import backpropagate
from tests.model.test_model import noise, randomised, tiny_config

EOS, MASK = 3, 4


def config_of(name: str, attend: str = "document"):
    return tiny_config(
        model={"eos_id": EOS},
        objective={"name": name},
        data={"attend": attend},
        train={"precision": "fp32"},
    )


X = torch.tensor([[5, 6, EOS, 7, 8, 9, 10, EOS], [EOS, 5, 5, 6, EOS, 9, 8, 7]])
MASKED = torch.tensor([[1, 0, 1, 1, 0, 1, 0, 1], [1, 1, 0, 1, 0, 1, 1, 0]]).bool()
PIECES = [(0, 0, 3), (0, 3, 8), (1, 0, 1), (1, 1, 5), (1, 5, 8)]  # row, start, end of each document


@pytest.mark.parametrize("name", ["mdlm", "lomdm"])
def test_a_document_among_others_is_as_it_is_alone(name):
    """CE and, up to the mean over the sequence, both orders; rotary positions are relative."""
    model = randomised(config_of(name)).eval()
    z = X.masked_fill(MASKED, MASK)
    ce, reverse, *_ = model.denoise(z, X, MASKED)
    order = model.order(X).exponent.expand(X.shape)
    reverse = reverse.exponent.expand(X.shape)
    for row, start, end in PIECES:
        here = (slice(row, row + 1), slice(start, end))
        alone, reverse_alone, *_ = model.denoise(z[here], X[here], MASKED[here])
        order_alone = model.order(X[here]).exponent.expand(X[here].shape)
        assert torch.allclose(ce[here], alone, atol=1e-6)
        for among, by_itself in (
            (order, order_alone),
            (reverse, reverse_alone.exponent.expand(X[here].shape)),
        ):
            difference = among[here] - by_itself
            assert torch.allclose(difference, difference[:, :1].expand_as(difference), atol=1e-6)


@pytest.mark.parametrize("attend", ["sequence", "document"])
@pytest.mark.parametrize("name", ["lomdm", "ar"])
def test_what_another_document_says_matters_only_to_a_sequence(name, attend):
    model = randomised(config_of(name, attend)).eval()
    other = X.clone()
    other[0, :2] = torch.tensor([9, 5])
    if name == "ar":
        ces = [model.causal_ce(x)[0] for x in (X, other)]
    else:
        ces = [model.denoise(x.masked_fill(MASKED, MASK), x, MASKED).ce for x in (X, other)]
    assert torch.equal(ces[0][0, 3:], ces[1][0, 3:]) == (attend == "document")
    assert not torch.equal(ces[0][0, :3], ces[1][0, :3])


def test_ar_begins_a_document_at_the_end_of_the_one_before():
    model = randomised(config_of("ar")).eval()
    ce, _ = model.causal_ce(X)
    features, condition = model.predict_next(torch.tensor([[7, 8, 9, 10]]))
    assert torch.allclose(model.causal_ce(X[:, :3])[0][0], ce[0, :3], atol=1e-6)
    start = model.backbone(torch.tensor([[EOS, 7, 8, 9, 10]]), model.backbone.context((1, 5)))
    alone = -model.backbone.output(start, condition).log_softmax(-1).gather(1, X[0, 3:, None])[:, 0]
    assert torch.allclose(alone, ce[0, 3:], atol=1e-6)
    assert features[0].shape == start.shape


@pytest.mark.parametrize("name", ["lomdm", "ar"])
def test_padding_and_gradients_stay_finite(name):
    config = config_of(name)
    model = randomised(config)
    valid = torch.tensor([[1] * 3 + [0] * 5, [1] * 8]).bool()
    x = X.clone()
    x[0, 3:] = 0
    stats = backpropagate(Alone(model), x, valid, noise(config, 2), config)
    assert stats["bound"].isfinite() and all(
        p.grad.isfinite().all() for p in model.parameters() if p.grad is not None
    )
    if name == "lomdm":
        z = torch.where(MASKED & valid, MASK, x)
        ce = model.eval().denoise(z, x, MASKED & valid, valid).ce
        alone = model.denoise(z[:1, :3], x[:1, :3], MASKED[:1, :3]).ce
        assert torch.allclose(ce[:1, :3], alone, atol=1e-6) and (ce[0, 3:] == 0).all()
