"""Looking again only where something was revealed gives what looking at every step gives."""

import pytest
import torch
from scipy import stats

from lomdm_dist.config import SamplerConfig
from lomdm_dist.errors import UserError
from lomdm_dist.model import LoMDM
from lomdm_dist.process import PowerSchedule, keyed_uniforms
from lomdm_dist.process.noise import Purpose, keyed_generator
from lomdm_dist.sample import sample
from lomdm_dist.sample.tokens import draw_tokens, race_float32, restrict
from tests.model.test_model import tiny_config

L, MASK = 10, 29
OBJECTIVES = {
    "lomdm": {"name": "lomdm"},
    "polynomial": {"name": "lomdm", "schedule": "polynomial"},
    "mdlm": {"name": "mdlm"},
    "genmd4": {"name": "genmd4"},
    "window": {"name": "window"},
    "ar": {"name": "ar"},
}
GAPS = torch.tensor([4, MASK, 5, 6, *[MASK] * 4, 7, MASK])
CASES = [
    ({}, None),
    ({}, GAPS),
    ({"grid": "even"}, GAPS),
    ({"top_p": 0.8, "temperature": 0.7}, None),
    ({"dtype": "float32"}, GAPS),
    ({"final": "argmax"}, None),
]


def random_model(name: str) -> LoMDM:
    config = tiny_config(
        model={"length": L, "vocab_size": MASK + 1, "mask_id": MASK}, objective=OBJECTIVES[name]
    )
    model = LoMDM(config.model, config.objective).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


@torch.no_grad()
def plain_sample(model, count: int, steps: int, seed: int, never, settings, given) -> torch.Tensor:
    """The reverse process as it is defined: the whole batch through the network at every step of time."""
    z = (torch.full((L,), MASK) if given is None else given).repeat(count, 1)
    t = torch.ones(count, dtype=torch.float64)
    revealed_at = torch.zeros_like(z)
    for k in range(steps):
        masked, left = z == MASK, steps - k
        features, reverse, condition = model.see(z)
        logits = restrict(model.backbone.output(features[masked], condition), settings, never)
        probs = logits.softmax(dim=1)
        w = None if model.token_exponents is None else model.token_exponents().double()

        def spread(values, masked=masked):
            return torch.ones(masked.shape, dtype=torch.float64).masked_scatter(masked, values)

        if w is not None:
            reverse = PowerSchedule(spread(probs @ w))

        def reveal_until(s, reverse=reverse, t=t, k=k):
            return reverse.log_keep_prob(s).exp() if k == 0 else reverse.reveal_prob(t, s)

        s = torch.full_like(t, (left - 1) / steps)
        if settings.grid == "even" and left > 1:
            low, high = torch.full_like(t, -700.0), torch.zeros_like(t)
            for _ in range(60):
                middle = (low + high) / 2
                share = (reveal_until(t * middle.exp()) * masked).sum(dim=1) / masked.sum(dim=1).clamp(min=1)
                low, high = (
                    torch.where(share > 1 / left, middle, low),
                    torch.where(share > 1 / left, high, middle),
                )
            s = t * high.exp()
        reveal_prob = reveal_until(s).expand(z.shape)
        if w is not None:
            of_token = -torch.expm1(w * (s / t).log().repeat_interleave(masked.sum(dim=1))[:, None])
            reveal_prob = spread((probs * of_token).sum(dim=1))
        if left == 1:
            reveal_prob = torch.ones(z.shape, dtype=torch.float64)
        if left == 1 and settings.final == "argmax":
            z = z.masked_scatter(masked, logits.argmax(dim=1))
        elif settings.dtype == "float32":
            stay = 1 - reveal_prob[masked][:, None]
            weights = probs * (of_token if w is not None and left > 1 else 1 - stay)
            noise = [
                keyed_generator(seed, Purpose.SAMPLE, k, b).random((int(n), MASK + 2), dtype="float32")
                for b, n in enumerate(masked.sum(dim=1))
            ]
            noise = torch.cat([torch.from_numpy(of_row) for of_row in noise])
            choice = race_float32(torch.cat([weights.float(), stay.float()], dim=1), noise)
            z = z.masked_scatter(masked, choice.where(choice <= MASK, MASK))
        else:
            to_reveal, for_token = keyed_uniforms(seed, Purpose.SAMPLE, k, range(count), 2 * L).chunk(2, 1)
            reveal = masked & (to_reveal < reveal_prob)
            of_revealed = logits[reveal[masked]]
            if w is not None and left > 1:
                of_revealed = of_revealed + of_token.log()[reveal[masked]]
            z = z.masked_scatter(reveal, draw_tokens(of_revealed, for_token[reveal]))
        revealed_at[masked & (z != MASK)] = k + 1
        t = s
    return z, revealed_at


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "ar"])
def test_the_same_ids_as_with_a_look_at_every_step(name):
    model, count, steps = random_model(name), 5, 4 * L
    for seed, (settings, given) in enumerate(CASES):
        settings = SamplerConfig(**settings)
        ids, revealed_at = plain_sample(model, count, steps, seed, (2,), settings, given)
        found = sample(model, count, L, steps, seed, (2,), settings, given, batch=3)
        assert torch.equal(found.token_ids, ids), settings
        assert torch.equal(found.revealed_at.long(), revealed_at), settings
        assert found.saved_calls >= 0.5
        assert found.saved_calls == pytest.approx(1 - found.network_calls / steps)


def test_a_call_is_a_pass_of_one_sequence(monkeypatch):
    """What is reported is what the network was given; of a text that is whole it sees nothing."""
    model, seen = random_model("lomdm"), []
    see = model.see
    monkeypatch.setattr(model, "see", lambda z, *rest: seen.append(z) or see(z, *rest))
    given = torch.stack([GAPS, torch.arange(L), torch.full((L,), MASK)])
    found = sample(model, 3, L, 30, 0, given=given)
    assert sum(map(len, seen)) == round(3 * found.network_calls)
    assert all(((z == MASK).sum(dim=1) > 0).all() for z in seen)
    steps_taken = [len(row.unique()) - int((row == 0).any()) for row in found.revealed_at]
    assert found.network_calls == pytest.approx(sum(steps_taken) / 3)


def test_exponents_are_those_seen_when_the_token_was_drawn():
    model = random_model("lomdm")
    found = sample(model, 4, L, 9, 0, given=GAPS)
    for ids, steps, exponents in zip(found.token_ids, found.revealed_at, found.exponents, strict=True):
        assert exponents[steps == 0].isnan().all()
        for k in steps[steps > 0].unique():
            before = torch.where(steps < k, ids, MASK)
            _, reverse, _ = model.see(before[None])
            assert torch.allclose(exponents[steps == k].double(), reverse.exponent[0][steps == k], atol=1e-5)
    assert sample(random_model("window"), 2, L, 9, 0).exponents is None
    assert sample(random_model("ar"), 2, L, 9, 0).exponents is None


@pytest.mark.parametrize("name", ["lomdm", "genmd4", "ar"])
def test_prompts_and_lengths_may_differ_in_a_batch(name):
    """Each sequence is what it is alone; behind its end nothing is drawn and nothing seen."""
    model = random_model(name)
    given = torch.full((4, L), MASK)
    for row, tokens in enumerate([[], [3], [4, 5, 6, 7, 8], list(range(L - 1))]):
        given[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
    lengths = torch.tensor([L, 7, 9, L])
    given[1, 7:], given[2, 9:] = 1, 2
    together = sample(model, 4, L, 20, 5, given=given, lengths=lengths)
    given[1, 7:] = 11  # not seen
    again = sample(model, 4, L, 20, 5, given=given, lengths=lengths)
    assert torch.equal(together.token_ids[:, :7], again.token_ids[:, :7])
    for row in range(4):
        alone = sample(model, torch.tensor([row]), L, 20, 5, given=given[row], lengths=lengths[row : row + 1])
        n = int(lengths[row])
        assert torch.equal(alone.token_ids[0, :n], together.token_ids[row, :n])
        assert not (together.token_ids[row, :n] == MASK).any()
        assert not together.revealed_at[row, n:].any()
    assert together.token_ids[1, 7:].unique().tolist() == [1]
    of_rows = [row[:n].double() for row, n in zip(together.token_ids, lengths.tolist(), strict=True)]
    entropies = [stats.entropy(row.unique(return_counts=True)[1]) for row in of_rows]
    assert together.entropy() == pytest.approx(sum(entropies) / 4)


def test_ar_fills_no_gaps():
    with pytest.raises(UserError, match="cannot fill a gap"):
        sample(random_model("ar"), 2, L, 0, 0, given=torch.stack([torch.full((L,), MASK), GAPS]))
