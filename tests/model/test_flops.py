"""The count of floating-point operations is torch's own, of whole steps of every objective and config."""

import pytest
import torch
from torch.fx.experimental import _config as symbolic
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lomdm_dist.config import Config, load_config
from lomdm_dist.model import LoMDM
from lomdm_dist.model.bound import draw_masks
from lomdm_dist.model.flops import predicted_share, seen_pairs, step_flops, step_flops_a_sequence
from lomdm_dist.model.kernels import choose_kernels
from lomdm_dist.parallel.engine import Alone
from lomdm_dist.train.step import backpropagate, draw_noise
from tests.model.test_model import CONFIGS, PARAMETERS, tiny_config
from tests.train.test_step import OBJECTIVES

FORMS = {"split": {}, "joint": {"two_samples": "joint"}, "padded": {}, "plain": {}}
MORE = {
    "linear head": {"name": "lomdm", "head": "linear"},
    "linear into the backbone": {"name": "lomdm", "head": "linear", "stop_gradient": False},
    "polynomial into the backbone": {"name": "lomdm", "schedule": "polynomial", "stop_gradient": False},
}


def counted(config: Config, device: str, valid: torch.Tensor | None = None) -> tuple[int, int]:
    """torch's count of a micro-batch's forward and backward pass, and the positions that were projected."""
    with torch.device(device):
        model, rows = LoMDM(config.model, config.objective), []
        x = torch.full((config.train.micro_batch, config.model.length), 5)
    choose_kernels(model, config, torch.device("cpu"))
    model.backbone.output.norm.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    noise = draw_noise(config, 0, torch.arange(len(x)), device)
    # torch knows the plain products of attention, not the fused kernel of the CPU
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        backpropagate(Alone(model), x, valid, noise, config)
    return counter.get_total_flops(), sum(rows)


EACH = [(name, form) for name in [*OBJECTIVES, *MORE] for form in FORMS]


@pytest.mark.parametrize(
    ("name", "form"),
    [pytest.param(*e, marks=[] if e[0] == "lomdm" or e[1] == "padded" else pytest.mark.slow) for e in EACH],
)
def test_each_objective(name, form):
    sizes = {"vocab_size": 101, "length": 32, "width": 64, "heads": 4, "condition_width": 8}
    config = tiny_config(
        model=sizes,
        objective=(OBJECTIVES | MORE)[name],
        train={"micro_batch": 4, **FORMS[form]},
        kernels={"loss": "plain" if form == "plain" else "fused"},
    )
    lengths = torch.tensor([32, 20, 7, 1] if form == "padded" else 4 * [32])
    valid = torch.arange(32) < lengths[:, None] if form == "padded" else None
    flops, predicted = counted(config, "cpu", valid)
    # torch's count of causal attention is that of all pairs
    pairs = sum(seen_pairs(n, causal=False) for n in lengths.tolist())
    # and it does not count a matrix times a vector: <w, p>, in the plain form its gradient too
    uncounted = (4 if form == "plain" else 2) * 101 * predicted if name == "genmd4" else 0
    assert step_flops(config, int(lengths.sum()), pairs, predicted, 1) == flops + uncounted


ALL = [(name, None) for name in PARAMETERS]
ALL += [
    (name, other) for name in ("ablation_512", "owt", "ablation_1024") for other in ("mdlm", "ar", "genmd4")
]
QUICK = [("owt", None), ("owt", "ar")]


@pytest.mark.parametrize(
    ("name", "objective"), [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in ALL]
)
def test_each_config_in_its_real_size(name, objective):
    """On the meta device, which has shapes and computes nothing; there all positions are masked."""
    few = ["train.micro_batch=2", "train.global_batch=2", "model.dropout=0"]
    config = load_config(
        CONFIGS / f"{name}.yaml", [f"objective={{name: {objective}}}"] * bool(objective) + few
    )
    length = config.model.length
    with symbolic.patch(meta_nonzero_assume_all_nonzero=True):
        flops, predicted = counted(config, "meta")
    assert predicted == 2 * length * max(1, config.objective.samples)
    if config.objective.name == "genmd4":
        flops += 2 * config.model.vocab_size * predicted  # as above
    assert step_flops(config, 2 * length, 2 * length**2, predicted, 1) == flops
    causal = config.objective.name == "ar"
    hidden = 12 * config.model.blocks * config.model.width * (length**2 - seen_pairs(length, causal))
    assert 2 * (step_flops_a_sequence(config, every_position=True) + hidden) == pytest.approx(
        flops, rel=1e-12
    )


@pytest.mark.parametrize("time", ["uniform", "mixture", "pinned"])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "ar"])
def test_the_expected_share_of_predicted_positions(name, time):
    if time == "pinned" and name not in ("mdlm", "blocks"):
        pytest.skip("a learned order has no pinned times")
    of_time = {"time": time, "time_eps": 1e-6}
    config = tiny_config(
        model={"length": 6}, objective=OBJECTIVES[name] | of_time, train={"global_batch": 4096}
    )
    model, x = LoMDM(config.model, config.objective), torch.full((4096, 6), 5)
    noise = draw_noise(config, 0, torch.arange(4096), "cpu")
    with torch.no_grad():
        draw = draw_masks(model.order(x), x, None, noise.time, noise.masks, time, 1e-6, 4)
    assert float(draw.masked.float().mean()) == pytest.approx(predicted_share(config.objective, 6), abs=0.01)
