"""Algorithm 1 in its forms: the same gradients, whatever is kept, recomputed or done side by side."""

import pytest
import torch

from lomdm_dist.model.backbone import Block
from lomdm_dist.parallel.engine import Alone
from lomdm_dist.train.step import backpropagate, draw_noise
from tests.model.test_model import randomised, tiny_config

OBJECTIVES = {
    "lomdm": {"name": "lomdm"},
    "polynomial": {"name": "lomdm", "schedule": "polynomial"},
    "softmax": {"name": "lomdm", "normalize": "softmax", "c1": 0.3, "c2": 2.0},
    "into the backbone": {"name": "lomdm", "stop_gradient": False},
    "genmd4": {"name": "genmd4"},
    "mdlm": {"name": "mdlm"},
    "blocks": {"name": "window", "order": "blocks", "block": 3},
    "ar": {"name": "ar"},
}
PADDING = torch.arange(8) < torch.tensor([[8], [5], [1], [8]])


def outcome(objective: dict, dtype, padded: bool = False, change=None, **train) -> dict[str, torch.Tensor]:
    """Statistics and gradients of one micro-batch, with dropout."""
    config = (
        tiny_config(model={"dropout": 0.2}, objective={"time": "uniform"} | objective, train=train)
        if objective["name"] != "ar"
        else tiny_config(model={"dropout": 0.2}, objective=objective, train=train)
    )
    model = randomised(config, dtype).train()
    for block in model.modules():
        if isinstance(block, Block):
            block.recompute, block.offload = config.train.recompute, config.train.offload_activations
    if change:
        change(model)
    x = torch.randint(5, 11, (4, 8), generator=torch.Generator().manual_seed(3))
    valid = PADDING if padded else None
    noise = draw_noise(config, 3, torch.arange(4), torch.device("cpu"))
    stats = backpropagate(Alone(model), x, valid, noise, config)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value for name, value in stats.items() if not value.isnan()} | gradients


def assert_close(ours: dict, theirs: dict, tolerance: float) -> None:
    """Each to `tolerance` of its norm, or of a thousandth of the largest: some are zero by symmetry."""
    assert ours.keys() == theirs.keys()
    least = 1e-3 * max(float(value.double().norm()) for value in theirs.values())
    for name, value in theirs.items():
        value = value.double()
        difference = float((ours[name].double() - value).norm() / value.norm().clamp(min=least))
        assert difference <= tolerance, name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", ["lomdm", "polynomial", "softmax", "into the backbone", "genmd4"])
def test_split_and_joint_have_the_same_gradients(name, dtype, tolerance):
    split, joint = (outcome(OBJECTIVES[name], dtype, two_samples=form) for form in ("split", "joint"))
    assert_close(split, joint, tolerance)


@pytest.mark.parametrize("recompute", ["attention", "block"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["lomdm", "into the backbone", "ar"])
def test_recomputing_and_offloading_change_nothing(name, recompute, offload):
    plain = outcome(OBJECTIVES[name], torch.float64, padded=True)
    change = {"recompute": recompute, "offload_activations": offload}
    assert_close(outcome(OBJECTIVES[name], torch.float64, padded=True, **change), plain, 1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_plain_loss_is_the_fused_one(name):
    """All positions projected, by torch's own functions."""

    def plainly(model):
        model.backbone.output.plain = True

    for padded in (False, True):
        fused = outcome(OBJECTIVES[name], torch.float64, padded)
        assert_close(outcome(OBJECTIVES[name], torch.float64, padded, plainly), fused, 1e-9)


@pytest.mark.parametrize("name", ["lomdm", "ar"])
def test_tokens_filled_up_to_a_multiple_change_nothing(name):
    """As sequence parallelism needs it: 22 tokens, on three or four processes."""
    for multiple in (3, 4):

        def fill(model, multiple=multiple):
            model.backbone.multiple = multiple

        filled = outcome(OBJECTIVES[name], torch.float64, True, fill)
        assert_close(filled, outcome(OBJECTIVES[name], torch.float64, True), 1e-12)
