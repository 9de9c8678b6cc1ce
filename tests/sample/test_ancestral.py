import json
import math

import pytest
import torch

from lomdm_dist.cli import main
from lomdm_dist.config import load_config
from lomdm_dist.model import LoMDM
from lomdm_dist.process import keyed_uniforms
from lomdm_dist.sample import sample
from lomdm_dist.sample.ancestral import draw_tokens, reverse_step
from lomdm_dist.train.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def model(trained_run):
    return Checkpoint(trained_run.run).build_model()


@pytest.mark.parametrize("steps", [1, 5, 40])
def test_samples_are_whole_and_repeat(model, steps):
    first = sample(model, 6, 16, steps, seed=3, mask_id=1, never=(2,), batch=4)
    again = sample(model, 6, 16, steps, seed=3, mask_id=1, never=(2,), batch=5)
    assert first.token_ids.shape == (6, 16) and first.network_calls == steps
    assert torch.equal(first.token_ids, again.token_ids)
    assert not torch.isin(first.token_ids, torch.tensor([1, 2])).any()
    assert not torch.equal(first.token_ids, sample(model, 6, 16, steps, 4, 1, (2,)).token_ids)


def test_draws_have_the_distribution_of_the_logits():
    """Chi-square against the softmax, with impossible tokens at both ends."""
    logits = torch.tensor([-torch.inf, 1.0, -2.0, 0.5, -torch.inf, 3.0, -torch.inf])
    n = 100_000
    ids = draw_tokens(logits.expand(n, -1), torch.rand(n, dtype=torch.float64))
    counts = torch.bincount(ids, minlength=7).double()
    expected = logits.double().softmax(0) * n
    possible = expected > 0
    assert (counts[~possible] == 0).all()
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 18.5  # 0.999 quantile at 4 - 1 degrees of freedom is 16.3
    ends = draw_tokens(logits.expand(2, -1), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert ends.tolist() == [1, 5]


def test_first_step_reveals_its_nominal_share(trained_run):
    """V = 50,257 and 1,024 steps: float32 noise would reveal 15% of it."""
    config = load_config(trained_run.run / "config.yaml", ["model.vocab_size=50257", "model.mask_id=50256"])
    model = LoMDM(config.model, config.objective).eval()  # uniform over the vocabulary, exponent 0.7
    z = torch.full((2000, 16), 50_256)
    uniforms = keyed_uniforms(0, 2, 0, range(2000), 32)
    z = reverse_step(model, z, 1.0, 1 - 1 / 1024, uniforms, 50_256, ())
    share = -math.expm1(0.7 * math.log1p(-1 / 1024))
    revealed = (z != 50_256).double().mean().item()
    assert abs(revealed - share) < 3 * math.sqrt(share * (1 - share) / z.numel())


def test_the_command_follows_its_contract(trained_run, tmp_path, capsys):
    out = tmp_path / "samples.json"
    options = ["--num", "2", "--length", "12", "--steps", "6", "--seed", "1", "--json", str(out)]
    main(["sample", "--checkpoint", str(trained_run.run), *options])
    result = json.loads(out.read_text())
    fields = {"token_ids", "texts", "steps", "network_calls", "entropy"}
    assert fields | {"command", "versions", "machine", "config"} <= result.keys()
    assert (len(result["texts"]), len(result["token_ids"][0]), result["steps"]) == (2, 12, 6)
    assert result["texts"][0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "17"], "the model was trained at 16"),
        (["--num", "0"], "--num 0: give 1 or more"),
        (["--checkpoint", "nowhere"], "no checkpoint in nowhere"),
    ],
)
def test_mistakes_are_one_line(trained_run, capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        main(["sample", "--checkpoint", str(trained_run.run), *options])
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("error: ") and message in said[-1]
