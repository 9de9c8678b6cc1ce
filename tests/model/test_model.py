import math
import subprocess
from pathlib import Path

import pytest
import torch

from lomdm_dist.config import Config, WindowObjective, load_config
from lomdm_dist.model import LoMDM
from lomdm_dist.model.lomdm import learned_schedule, permutation_of
from lomdm_dist.parallel.engine import Alone
from lomdm_dist.process import log_q
from lomdm_dist.train.step import Noise, backpropagate

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


def head_parameters(width: int, condition: int = 128) -> int:
    """Both heads: a block (2 norms, qkv, out, MLP with biases, adaLN), and a linear layer to a scalar."""
    block = 2 * width + 4 * width**2 + 8 * width**2 + 5 * width + (condition + 1) * 6 * width
    return 2 * (block + width + 1)


OBJECTIVES = ("mdlm", "genmd4", "left_to_right", "permutation", "blocks", "ar")
PARAMETERS = {
    "demo": 1_101_122,
    "evidence/base": 729_792,
    **{f"objectives/{name}": 729_792 + 512 * (name == "genmd4") for name in OBJECTIVES},
    "lm1b": 139_292_986 + head_parameters(768),
    "lm1b_unpacked": 139_292_986 + head_parameters(768),
    "owt": 169_627_218 + head_parameters(768),
    "ablation_512": 59_831_866 + head_parameters(512),
    "ablation_1024": 384_037_946 + head_parameters(1024),
    "1b": 1_141_251_412,
    "7b": 7_366_751_572,
    "13b": 13_896_081_748,
}


def tiny_config(**overrides) -> Config:
    values = {
        "model": {
            "vocab_size": 11,
            "mask_id": 4,
            "length": 8,
            "width": 16,
            "blocks": 2,
            "heads": 2,
            "dropout": 0.0,
        },
        "objective": {"name": "lomdm"},
        "data": {"train": "x", "valid": "x"},
        "train": {"run": "x", "steps": 1, "global_batch": 4, "micro_batch": 4},
    }
    for section, keys in overrides.items():
        values[section] = values.get(section, {}) | keys
    return Config.model_validate(values)


def randomised(config: Config, dtype=torch.float64) -> LoMDM:
    """A model whose gates, heads and output do not start at zero."""
    torch.manual_seed(0)
    model = LoMDM(config.model, config.objective, config.data.attend).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def noise(config: Config, batch: int, t: float | None = None) -> Noise:
    generator = torch.Generator().manual_seed(5)
    time = torch.rand(batch, 2, generator=generator, dtype=torch.float64)
    if t is not None:
        time[:, 0] = t
    shape = (batch, config.model.length)
    masks = [
        torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(config.objective.samples)
    ]
    return Noise(time, masks)


def test_every_config_file_is_tested():
    listed = subprocess.run(["git", "ls-files", "*.yaml"], cwd=CONFIGS, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: cannot tell the project's configs from a user's own")
    configs = {name.removesuffix(".yaml") for name in listed.stdout.split()}
    sweeps = {name for name in configs if name.startswith("sweeps/") or name == "evidence/sweep"}
    assert configs - sweeps == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_config_builds_with_its_parameter_count(name):
    config = load_config(CONFIGS / f"{name}.yaml")
    with torch.device("meta"):
        model = LoMDM(config.model, config.objective)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owt", 169_627_218),
        ("lm1b", 139_292_986),
        ("ablation_512", 59_831_866),
        ("ablation_1024", 384_037_946),
    ],
)
def test_mdlm_parameter_counts(name, expected):
    config = load_config(CONFIGS / f"{name}.yaml", ["objective={name: mdlm}"])
    with torch.device("meta"):
        model = LoMDM(config.model, config.objective)
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize(("vocab_size", "mask_id"), [(30522, 103), (50258, 50257)])
def test_a_new_model_is_uniform_over_all_but_the_mask_token(vocab_size, mask_id):
    config = tiny_config(model={"vocab_size": vocab_size, "mask_id": mask_id})
    model = LoMDM(config.model, config.objective)
    x = torch.randint(0, 100, (2, 8))
    masked = torch.ones(2, 8, dtype=torch.bool)
    ce, reverse, *_ = model.denoise(torch.full_like(x, mask_id), x, masked)
    assert ce.flatten().tolist() == pytest.approx([math.log(vocab_size - 1)] * 16, abs=1e-5)
    assert torch.allclose(reverse.exponent, torch.tensor(0.7, dtype=torch.float64))
    features, _, condition = model.see(x)
    assert (model.backbone.output(features, condition)[..., mask_id] == -torch.inf).all()


@pytest.mark.parametrize("head", ["transformer", "linear"])
@pytest.mark.parametrize("schedule", ["power", "polynomial"])
@pytest.mark.parametrize("stop_gradient", [True, False])
def test_gradients_reach_each_part_by_its_own_road(head, schedule, stop_gradient):
    """theta by CE, psi by hatA, phi by A and log q; without stop-gradient the last two reach theta too."""
    objective = {"head": head, "schedule": schedule, "stop_gradient": stop_gradient}
    config = tiny_config(objective={"name": "lomdm"} | objective)
    model = randomised(config)
    x = torch.randint(5, 11, (4, 8))
    backpropagate(Alone(model), x, None, noise(config, 4), config)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.abs().sum() > 0 for p in model.backbone.parameters())

    t = torch.full((4,), 0.4)
    masked = torch.rand(4, 8) < 0.5
    z = torch.where(masked, 4, x)

    def owners(function):
        model.zero_grad()
        function().backward()
        return {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}

    beside = set() if stop_gradient else {"backbone"}
    assert owners(lambda: model.order(x).velocity(t).std()) == {"phi"} | beside
    assert owners(lambda: log_q(masked, model.order(x), t).sum()) == {"phi"} | beside
    assert owners(lambda: model.denoise(z, x, masked).reverse.velocity(t).std()) == {"psi"} | beside
    assert owners(lambda: model.denoise(z, x, masked).total) == {"backbone"}


def test_gradients_of_genmd4_reach_the_exponents_of_the_tokens_in_the_text():
    config = tiny_config(objective={"name": "genmd4"})
    model = randomised(config)
    x = torch.randint(5, 9, (4, 8))
    backpropagate(Alone(model), x, None, noise(config, 4), config)
    gradient = model.token_exponents.theta.grad
    assert (gradient[5:9] != 0).all() and gradient[4] == 0  # 4 is the mask token
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_token_exponents_start_at_one():
    config = tiny_config(objective={"name": "genmd4"})
    model = LoMDM(config.model, config.objective)
    assert torch.allclose(model.token_exponents(), torch.ones(11), atol=1e-6)


@pytest.mark.parametrize("normalize", ["norm_sig", "softmax"])
def test_padding_has_no_part_in_the_order(normalize):
    config = tiny_config(objective={"normalize": normalize, "c1": 0.5, "c2": 0.3})
    logits = torch.randn(2, 8, 1, dtype=torch.float64)
    valid = torch.arange(8).expand(2, 8) < 5
    whole = learned_schedule(config.objective, logits[:, :5], None).exponent
    padded = learned_schedule(config.objective, logits, valid).exponent
    assert torch.allclose(padded[:, :5], whole, atol=1e-12)
    assert torch.allclose(padded[:, 5:], torch.tensor(0.5, dtype=torch.float64))


def test_permutations():
    drawn = [
        permutation_of(WindowObjective(name="window", order="permutation", permutation_seed=k), 9)
        for k in (0, 1)
    ]
    assert sorted(drawn[0].tolist()) == list(range(9)) and not torch.equal(*drawn)
    given = WindowObjective(name="window", order="permutation", permutation=[3, 0, 2, 1])
    assert permutation_of(given, 4).tolist() == [3, 0, 2, 1]
    assert permutation_of(given, 3).tolist() == [0, 2, 1]  # of a shorter text


def test_mdlm_is_lomdm_with_a_fixed_exponent_of_one():
    """The same x, t and z: c1 = 1, c2 = 0 gives MDLM's loss, no velocity term and no RLOO gradient."""
    mdlm = tiny_config(objective={"name": "mdlm"})
    fixed = tiny_config(objective={"name": "lomdm", "c1": 1.0, "c2": 0.0})
    model, x, draws = randomised(fixed), torch.randint(5, 11, (4, 8)), noise(fixed, 4)
    same = Noise(draws.time, [draws.masks[0]] * 2)
    stats = backpropagate(Alone(model), x, None, same, fixed)
    plain = LoMDM(mdlm.model, mdlm.objective).double()
    plain.backbone.load_state_dict(model.backbone.state_dict())
    expected = backpropagate(Alone(plain), x, None, Noise(draws.time, draws.masks[:1]), mdlm)
    assert stats["bound"].item() == pytest.approx(expected["bound"].item(), rel=1e-6)
    assert stats["velocity"].item() == stats["rloo"].item() == 0
    for name, parameter in plain.backbone.named_parameters():
        assert torch.allclose(parameter.grad, model.backbone.get_parameter(name).grad), name
    assert all(p.grad is None or (p.grad == 0).all() for p in model.phi.parameters())


def test_nothing_masked_gives_zero_loss_and_zero_gradients():
    config = tiny_config(objective={"name": "mdlm", "time": "uniform", "time_eps": 1e-9})
    model = randomised(config, torch.float32)
    x = torch.randint(5, 11, (4, 8))
    stats = backpropagate(Alone(model), x, None, noise(config, 4, t=0.0), config)
    assert stats["bound"].item() == 0
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())


def test_padding_changes_nothing():
    """A padded sequence has the CE, the exponents and the loss of the sequence without padding."""
    config = tiny_config(model={"length": 12})
    model = randomised(config).eval()
    x = torch.randint(5, 11, (3, 8))
    padded = torch.cat([x, torch.full((3, 4), 3)], dim=1)
    valid = torch.arange(12).expand(3, 12) < 8
    draws = noise(config, 3)
    short = Noise(draws.time * torch.tensor([1.0, 0.0]), [u[:, :8] for u in draws.masks])
    draws = Noise(short.time, draws.masks)
    mixture = tiny_config(model={"length": 8}, objective={"time": "uniform"})
    uniform = tiny_config(model={"length": 12}, objective={"time": "uniform"})
    plain = backpropagate(Alone(model), x, None, short, mixture)
    with_padding = backpropagate(Alone(model), padded, valid, draws, uniform)
    for name in plain:
        assert with_padding[name].item() == pytest.approx(plain[name].item(), rel=1e-9, abs=1e-12), name


def test_dropout_is_on_in_training_and_off_in_the_feature_pass_of_phi():
    config = tiny_config(model={"dropout": 0.5})
    model = randomised(config).train()
    x = torch.randint(5, 11, (2, 8))
    model.phi.block.dropout = 0.0
    assert torch.equal(model.order(x).exponent, model.order(x).exponent)
    assert model.backbone.training
    masked = torch.ones_like(x, dtype=torch.bool)
    assert not torch.equal(model.denoise(x, x, masked).ce, model.denoise(x, x, masked).ce)
