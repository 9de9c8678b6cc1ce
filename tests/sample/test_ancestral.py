import json
import math
import shutil

import pytest
import torch
import yaml

from lomdm_dist.cli import main
from lomdm_dist.config import SamplerConfig, load_config
from lomdm_dist.data.tokenizer import encode_prompt, not_text
from lomdm_dist.model import LoMDM
from lomdm_dist.sample import sample
from lomdm_dist.sample.ancestral import reverse_step
from lomdm_dist.sample.look import Look
from lomdm_dist.sample.tokens import draw_tokens, restrict
from lomdm_dist.train.checkpoint import Checkpoint, find_checkpoint
from tests.tiny import randomize


@pytest.fixture(scope="module")
def model(trained_run):
    return Checkpoint(trained_run.run).build_model()


@pytest.mark.parametrize("steps", [1, 5, 40])
def test_samples_are_whole_and_repeat(model, steps):
    first = sample(model, 6, 16, steps, seed=3, never=(2,), batch=4)
    again = sample(model, 6, 16, steps, seed=3, never=(2,), batch=5)
    assert first.token_ids.shape == (6, 16) and first.network_calls <= min(steps, 16)
    assert torch.equal(first.token_ids, again.token_ids)
    assert not torch.isin(first.token_ids, torch.tensor([1, 2])).any()
    assert not torch.equal(first.token_ids, sample(model, 6, 16, steps, 4, (2,)).token_ids)


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


class Draws:
    """Noise for one step without keys: many sequences at once."""

    def __init__(self, count: int, seed: int):
        self.count, self.generator = count, torch.Generator().manual_seed(seed)

    def uniforms(self, masked):
        return torch.rand(2, self.count, masked.shape[1], generator=self.generator, dtype=torch.float64)

    def float32(self, counts, width: int):
        return torch.rand(int(counts.sum()), width, generator=self.generator)


def one_step(model, z, t, k, steps, noise, settings, step=reverse_step):
    """Step k of sequences that all have come so far: z [B, L] and t [B] after it."""
    look = Look(model, z, None, settings)
    reveal, tokens, s = step(look, look.masked, t, torch.full((len(z),), k), steps, noise)
    return z.masked_scatter(reveal, tokens), s


@pytest.mark.parametrize(
    ("dtype", "share", "positions"),
    [("float64", 1.0, 400_000), pytest.param("float32", 0.15, 20_000, marks=pytest.mark.slow)],
)
def test_the_first_of_1024_steps_reveals_its_share(trained_run, dtype, share, positions):
    """A uniform network over 50,257 tokens: all of it with exact draws, 15% of it with float32 noise."""
    vocabulary = ["model.vocab_size=50257", "model.mask_id=50256"]
    config = load_config(trained_run.run / "config.yaml", ["objective={name: mdlm}", *vocabulary])
    model, count = LoMDM(config.model, config.objective).eval(), 25
    settings = SamplerConfig(dtype=dtype)
    revealed = 0
    for part in range(positions // (count * 16)):
        z = torch.full((count, 16), 50_256)
        with torch.no_grad():
            z, s = one_step(model, z, torch.ones(count), 0, 1024, Draws(count, part), settings)
        revealed += int((z != 50_256).sum())
    nominal = positions / 1024
    assert s[0] == 1 - 1 / 1024
    assert abs(revealed - share * nominal) < 3 * math.sqrt(nominal * max(share, 0.15)) + 1


def test_the_command_follows_its_contract(trained_run, tmp_path, capsys):
    out = tmp_path / "samples.json"
    options = ["--num", "2", "--length", "12", "--steps", "6", "--seed", "1", "--json", str(out)]
    main(["sample", "--checkpoint", str(trained_run.run), *options])
    result = json.loads(out.read_text())
    fields = {"token_ids", "texts", "steps", "network_calls", "saved_calls", "seconds", "entropy"}
    assert fields | {"command", "versions", "machine", "config"} <= result.keys()
    assert (len(result["texts"]), len(result["token_ids"][0]), result["steps"]) == (2, 12, 6)
    assert result["texts"][0] in capsys.readouterr().out


def test_what_the_settings_leave_to_be_drawn():
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0]]).log_softmax(1)
    probs = logits.double().exp()

    def drawn(**settings):
        return restrict(logits.clone(), SamplerConfig(**settings), (3,)).softmax(1)

    without = torch.tensor([[1.0, 1.0, 1.0, 0.0]]) * probs
    assert torch.allclose(drawn(), without / without.sum())
    squared = without**2
    assert torch.allclose(drawn(temperature=0.5), squared / squared.sum())
    share = float(without[0, 0] / without.sum())
    assert drawn(top_p=share - 0.01)[0].tolist() == [1, 0, 0, 0]
    two = torch.tensor([[1.0, 1.0, 0.0, 0.0]]) * probs
    assert torch.allclose(drawn(top_p=share + 0.01), two / two.sum())
    assert drawn(top_p=1e-9)[0].tolist() == [1, 0, 0, 0] == drawn(temperature=1e-6)[0].tolist()


def run_sample(run, tmp_path, *options) -> dict:
    out = tmp_path / "samples.json"
    main(["sample", "--checkpoint", str(run), "--json", str(out), *options])
    return json.loads(out.read_text())


def test_prompts_stay_and_gaps_are_filled(trained_run, tmp_path):
    """A mask in the prompt is drawn, everything else of it stays, and the text goes on behind it."""
    checkpoint = Checkpoint(trained_run.run)
    tokenizer = checkpoint.tokenizer()
    ids = encode_prompt(tokenizer, "a list [MASK] of [PAD] ")
    assert ids.count(tokenizer.mask_token_id) == 1 and tokenizer.pad_token_id not in ids
    assert tokenizer.decode([i for i in ids if i != tokenizer.mask_token_id]) == "a list of [PAD] "
    code = encode_prompt(tokenizer, "def f(x):\n    [MASK]\n  [MASK] x")
    assert tokenizer.decode(code) == "def f(x):\n   [MASK]\n [MASK] x"  # the tokens bring a space each
    for settings in ([], ["sampler.grid=even"], ["sampler.final=argmax"], ["sampler.dtype=float32"]):
        options = ["--prompt", "a list [MASK] of", "--num", "3", "--steps", "4", *settings]
        found = run_sample(trained_run.run, tmp_path, *options)
        given = encode_prompt(tokenizer, "a list [MASK] of")
        for row in found["token_ids"]:
            assert len(row) == 16 and not {tokenizer.mask_token_id, tokenizer.pad_token_id} & set(row)
            kept = [(r, g) for r, g in zip(row, given, strict=False) if g != tokenizer.mask_token_id]
            assert all(r == g for r, g in kept)


def test_the_scheduler_can_be_switched_off(trained_run, tmp_path):
    run = randomize(trained_run.run, tmp_path / "step-8").folder  # its exponents differ from c1 at last
    learned, off, again = (
        run_sample(run, tmp_path, "--steps", "8", *options)["token_ids"]
        for options in ([], ["objective.c2=0"], ["objective.c1=0.7", "objective.c2=0.65"])
    )
    assert learned == again != off


def test_ids_that_no_token_has_are_never_drawn(trained_run):
    tokenizer = Checkpoint(trained_run.run).tokenizer()
    assert not_text(tokenizer, 300) == (tokenizer.pad_token_id,)
    assert not_text(tokenizer, 303) == (tokenizer.pad_token_id, 300, 301, 302)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "17"], "the model was trained at 16"),
        (["--prompt", "a list of " * 9], "--length is 16"),
        (["--prompt", "caf\udce9"], "the prompt is not UTF-8 text"),
        (["sampler.top_k=3"], "unknown key sampler.top_k; did you mean sampler.top_p?"),
        (["sampler.top_p=0"], "sampler.top_p: input should be greater than 0"),
        (["objective.c2=0.8"], "c1 > c2 >= 0 keeps every exponent positive"),
        (["model.width=64"], "a trained model takes sampler. and objective.c1 and objective.c2 only"),
        (["--num", "0"], "--num 0: give 1 to 1,000,000"),
        (["--steps", "1000000000"], "--steps 1000000000: give 1 to 100,000"),
        (["--batch", "0"], "--batch 0: give 1 or more"),
        (["--checkpoint", "nowhere"], "no checkpoint in nowhere"),
    ],
)
def test_mistakes_are_one_line(trained_run, capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        main(["sample", "--checkpoint", str(trained_run.run), *options])
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("error: ") and message in said[-1]


@pytest.mark.parametrize("objective", [{"name": "mdlm"}, {"name": "lomdm", "schedule": "polynomial"}])
def test_a_pace_is_refused_where_there_is_none(objective, trained_run, tmp_path, capsys):
    """c1 and c2 would be ignored: of a polynomial, or of an order without exponents."""
    folder = shutil.copytree(find_checkpoint(trained_run.run), tmp_path / "step-8")
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {"objective": objective}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))  # read before its checksum is
    with pytest.raises(SystemExit):
        main(["sample", "--checkpoint", str(folder), "objective.c2=0"])
    assert "only lomdm's exponents have c1 and c2" in capsys.readouterr().err
