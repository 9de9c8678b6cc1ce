"""Learning rates, and gradients that are clipped by parameter group."""

import pytest
import torch

from lomdm_dist.config import OptimConfig
from lomdm_dist.model import LoMDM
from lomdm_dist.parallel.optimizer import clip_gradients, gradient_norms, gradients_by_group
from lomdm_dist.train.optim import learning_rates, make_optimizer
from tests.model.test_model import tiny_config


@pytest.mark.parametrize(
    ("heads", "after"), [(None, [0.25, 0.5, 1, 1]), (0, [1, 1, 1, 1]), (7, [0.125, 0.25, 0.5, 1])]
)
def test_heads_warm_up_by_themselves(heads, after):
    config = OptimConfig(learning_rate=2.0, heads_learning_rate=8.0, warmup_steps=3, heads_warmup_steps=heads)
    rates = [learning_rates(config, step) for step in (0, 1, 3, 7)]
    assert rates == [[2 * warm, 8 * share] for warm, share in zip([0.25, 0.5, 1, 1], after, strict=True)]


def test_large_gradients_of_the_heads_leave_the_backbone_s_alone():
    config = tiny_config()
    model = LoMDM(config.model, config.objective)
    optimizer = make_optimizer(model, config.optim)
    backbone, heads = (list(group["params"]) for group in optimizer.param_groups)
    assert {id(p) for p in heads} == {id(p) for head in (model.phi, model.psi) for p in head.parameters()}
    for parameters, size in ((backbone, 1e-3), (heads, 10.0)):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, size)

    class Alone:
        device, tensor_size = torch.device("cpu"), 1

    layouts = {name: type("Whole", (), {"dim": None}) for name, _ in model.named_parameters()}
    groups = gradients_by_group(optimizer, model, layouts)
    norms = gradient_norms(groups, Alone)
    wanted = [
        size * sum(p.numel() for p in group) ** 0.5 for group, size in ((backbone, 1e-3), (heads, 10.0))
    ]
    assert norms == pytest.approx(wanted) and norms[0] < 1 < norms[1]
    for gradients, norm in zip(groups, norms, strict=True):
        clip_gradients([gradient for gradient, _ in gradients], norm, 1.0)
    assert all((p.grad == 1e-3).all() for p in backbone)
    assert gradient_norms(groups, Alone)[1] == pytest.approx(1.0)
