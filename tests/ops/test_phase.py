"""Which part of a step is at work: in what order that is said, and that saying it changes nothing."""

import pytest
import torch

from lomdm_dist.model import LoMDM
from lomdm_dist.ops.phase import listening
from lomdm_dist.parallel.engine import Alone
from lomdm_dist.train.step import backpropagate, draw_noise
from tests.model.test_model import tiny_config

ORDER = "data - loss features heads features loss"  # noise, the order, the draw
FORWARD = "z loss z heads z loss z loss z"  # velocity, the network, psi, projection, integrands
BACKWARD = "loss heads z loss"
EXPECTED = {
    ("lomdm", "split"): f"{ORDER} {FORWARD} {BACKWARD} {FORWARD} {BACKWARD} heads loss -",
    ("lomdm", "joint"): f"{ORDER} {FORWARD} {BACKWARD} heads loss -",
    ("mdlm", "split"): "data - loss z loss z loss z loss z loss z loss -",  # no features: no order to learn
    ("ar", "split"): "data - z loss z loss z -",
}


def one_step(objective: str, two_samples: str, listener=None) -> dict[str, torch.Tensor]:
    config = tiny_config(objective={"name": objective}, train={"two_samples": two_samples})
    model, x = LoMDM(config.model, config.objective), torch.full((4, 8), 5)
    with listening(listener):
        backpropagate(Alone(model), x, None, draw_noise(config, 0, torch.arange(4), "cpu"), config)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("objective", "two_samples"), EXPECTED)
def test_the_parts_of_a_step_and_their_backward_passes(objective, two_samples):
    said = []
    heard = one_step(objective, two_samples, said.append)
    unheard = one_step(objective, two_samples)
    assert heard.keys() == unheard.keys() and all(heard[name].equal(unheard[name]) for name in heard)
    numbered = iter(["z1", "z2"] if objective == "lomdm" else ["z1"])
    samples = [name for name in said if name and name.startswith("z")]
    assert list(dict.fromkeys(samples)) == (["z"] if two_samples == "joint" else list(numbered))
    assert (
        " ".join("z" if name in ("z1", "z2") else name or "-" for name in said)
        == EXPECTED[objective, two_samples]
    )
