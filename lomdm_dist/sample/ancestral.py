"""Sampling: from time 1, all masks, to time 0, all text. For `ar`, from left to right.

The network depends on the masked text and not on the time. So a sequence is looked at again only after a
step that revealed something in it; the steps before that need no more than its reverse schedule.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lomdm_dist.config import SamplerConfig
from lomdm_dist.errors import UserError
from lomdm_dist.model.decode import Decoder
from lomdm_dist.process.noise import Purpose, keyed_generator
from lomdm_dist.sample.look import DEFAULT, Look, scatter
from lomdm_dist.sample.rules import check_rule, choose
from lomdm_dist.sample.tokens import draw_tokens, race_float32, restrict

BISECTIONS = 60  # of log(s / t), for the even grid
SMALLEST_LOG_RATIO = -700.0


@dataclass(frozen=True)
class Samples:
    """Texts, and how they came about.

    token_ids      [N, L] int64, on the CPU
    revealed_at    [N, L] int32: the step, 1 to `steps`, in which a position got its token; 0: it was given.
                   What was revealed never changes, so these two are the whole trajectory
    exponents      [N, L] float32: of the reverse schedule, as seen when the token was drawn (nan: given);
                   GenMD4's are means over the tokens, under the network. None where the objective has
                   none (`ar`, window and polynomial schedules)
    steps          of time, or of the rule; for `ar` of tokens
    network_calls  forward passes a sequence, in the mean
    saved_calls    share of the steps that needed none
    seconds        that drawing them took
    lengths        [N] int64: what lies behind is no text; None where all are L long
    """

    token_ids: Tensor
    revealed_at: Tensor
    exponents: Tensor | None
    steps: int
    network_calls: float
    saved_calls: float = 0.0
    seconds: float = math.nan
    lengths: Tensor | None = None

    def tokens_per_second(self) -> float:
        """Tokens drawn, those given left out."""
        return int((self.revealed_at > 0).sum()) / self.seconds

    def entropy(self) -> float:
        """Mean over samples of the entropy of a sample's own token frequencies, in nats."""
        lengths, entropies = [len(row) for row in self.token_ids], []
        if self.lengths is not None:
            lengths = self.lengths.tolist()
        for row, length in zip(self.token_ids, lengths, strict=True):
            share = torch.unique(row[:length], return_counts=True)[1].double() / length
            entropies.append(-(share * share.log()).sum())
        return float(torch.stack(entropies).mean())


@dataclass(frozen=True)
class StepNoise:
    """The uniforms of one step of each of the sequences at `indices` [B]: of their steps `steps` [B]."""

    seed: int
    steps: Tensor
    indices: Tensor
    device: torch.device

    def uniforms(self, masked: Tensor) -> tuple[Tensor, Tensor]:
        """To reveal and for the tokens, each [B, L], float64; 0 for sequences without a masked position."""
        both = torch.zeros(len(masked), 2 * masked.shape[1], dtype=torch.float64)
        for b in masked.any(dim=1).nonzero()[:, 0].tolist():
            both[b] = torch.from_numpy(self._generator(b).random(both.shape[1]))
        return both.to(self.device).chunk(2, dim=1)

    def float32(self, counts: Tensor, width: int) -> Tensor:
        """For counts[b] positions of each sequence: [sum of counts, width], float32."""
        rows = [
            self._generator(b).random((n, width), dtype=np.float32) for b, n in enumerate(counts.tolist())
        ]
        return torch.from_numpy(np.concatenate(rows)).to(self.device)

    def _generator(self, b: int) -> np.random.Generator:
        return keyed_generator(self.seed, Purpose.SAMPLE, int(self.steps[b]), int(self.indices[b]))


class Run(NamedTuple):
    """What all batches of a call of `sample` share."""

    steps: int
    seed: int
    never: tuple[int, ...]
    settings: SamplerConfig
    on_step: Callable[[Tensor, Tensor], None] | None


@torch.no_grad()
def sample(
    model,
    count: int | Tensor,
    length: int,
    steps: int,
    seed: int,
    never: tuple[int, ...] = (),
    settings: SamplerConfig = DEFAULT,
    given: Tensor | None = None,
    batch: int = 16,
    progress: bool = False,
    on_step: Callable[[Tensor, Tensor], None] | None = None,
    lengths: Tensor | None = None,
) -> Samples:
    """Draw `count` sequences of `length` tokens, in `steps`; `ar` takes one a free position.

    given [length] or, where they differ, [N, length] holds tokens that stay, and the mask id where one is
    to be drawn; without it all are. lengths [N], by default `length`: what `given` holds behind them stays,
    and is not seen. `never` lists ids that are not text (padding); the mask token never comes out of a text.
    on_step(indices [B], z [B, L]) sees each batch after each step that revealed something.

    Sample i depends on (seed, i) and what is given for it alone, but for rounding: the network's last digits
    may vary with the batch. A process that draws some of many gives their indices [N] as `count`.
    Raises UserError where `ar` is asked to fill a gap, or the objective lacks the order of `settings.rule`.
    """
    check_rule(settings.rule, model.objective)
    device, start = next(model.parameters()).device, time.perf_counter()
    indices = torch.arange(count) if isinstance(count, int) else count
    z = torch.full((length,), model.mask_id) if given is None else given
    z = z.to(device).expand(len(indices), length)
    valid = torch.ones_like(z, dtype=torch.bool)
    if lengths is not None:
        valid = torch.arange(length, device=device) < lengths.to(device)[:, None]
    causal = model.objective.name == "ar"
    if causal:
        steps = _free_tokens(z, valid, model.mask_id)
    run, parts = Run(steps, seed, never, settings, on_step), []
    with tqdm(total=len(z) * steps, desc="sample", unit="step", disable=None if progress else True) as bar:
        for rows in torch.arange(len(z)).split(batch):
            draw = _continue if causal else _denoise
            parts.append(draw(model, z[rows], valid[rows], indices[rows], run, bar))
    z, revealed_at, exponents, calls = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    if exponents[revealed_at > 0].isnan().all():
        exponents = None
    calls, seconds = calls.double().mean().item(), time.perf_counter() - start
    return Samples(z, revealed_at, exponents, steps, calls, 1 - calls / max(steps, 1), seconds, lengths)


def _denoise(model, z: Tensor, valid: Tensor, indices: Tensor, run: Run, bar) -> tuple:
    """A batch [B, L], from masks to text -> z, revealed_at, exponents, network calls [B]."""
    z = z.clone()
    t = torch.ones(len(z), dtype=torch.float64, device=z.device)
    k, calls = torch.zeros(2, len(z), dtype=torch.int64, device=z.device)
    revealed_at = torch.zeros(z.shape, dtype=torch.int32, device=z.device)
    exponents = torch.full(z.shape, torch.nan, device=z.device)
    everywhere = bool(valid.all())  # then the network need not hear of it
    while len(rows := ((z == model.mask_id) & valid).any(dim=1).nonzero()[:, 0]):
        look = Look(model, z[rows], None if everywhere else valid[rows], run.settings, run.never)
        before = k[rows]
        filled, t[rows], k[rows] = leap(look, t[rows], before, indices[rows.cpu()], run)
        new = filled != z[rows]
        z[rows] = filled
        revealed_at[rows] = torch.where(new, k[rows, None].int(), revealed_at[rows])
        if look.exponents() is not None:
            exponents[rows] = torch.where(new, look.exponents().float(), exponents[rows])
        calls[rows] += 1
        if run.on_step is not None:
            run.on_step(indices, z)
        bar.update(int((k[rows] - before).sum()))
    return z, revealed_at, exponents, calls


def leap(look: Look, t: Tensor, k: Tensor, indices: Tensor, run: Run) -> tuple:
    """Steps of each sequence until one reveals something: so long holds what the network says.

    t [B] and k [B], the times and the numbers of steps done -> z [B, L], t and k after that.
    """
    z, masked = look.z, look.masked
    step = reverse_step if look.settings.rule == "random" else rule_step
    while (open_rows := masked.any(dim=1)).any():
        reveal, tokens, s = step(look, masked, t, k, run.steps, StepNoise(run.seed, k, indices, z.device))
        z = z.masked_scatter(reveal, tokens)
        t, k = torch.where(open_rows, s, t), k + open_rows
        masked = masked & ~reveal.any(dim=1, keepdim=True)
    return z, t, k


def reverse_step(look: Look, masked: Tensor, t: Tensor, k: Tensor, steps: int, noise) -> tuple:
    """Step k [B] of `steps`, at times t [B] -> what is revealed, [B, L] bool; its tokens [N]; the next times.

    Of the positions masked [B, L] each is revealed with the reverse schedule's probability, its token
    drawn from the network. GenMD4 has a probability for each token: v comes out with p_v (1 - (s/t)**w_v).
    """
    settings, reverse, w = look.settings, look.reverse, look.token_exponents
    first, last = (k == 0)[:, None], (k == steps - 1)[:, None]
    any_first = bool(first.any())

    def reveal_prob_until(s: Tensor) -> Tensor:
        later = reverse.reveal_prob(t, s)
        # the first step is from all masks, where a schedule may only come near
        return torch.where(first, reverse.log_keep_prob(s).exp(), later) if any_first else later

    s = next_time(reveal_prob_until, masked, t, k, steps, settings.grid)
    by_token = w is not None
    if by_token or settings.dtype == "float32":
        logits = look.logits(masked)
        probs = logits.softmax(dim=1)  # [N, V]
    if by_token:
        token_prob = -torch.expm1(w * (s / t).log().repeat_interleave(masked.sum(dim=1))[:, None])  # [N, V]
        reveal_prob = scatter(masked, (probs * token_prob).sum(dim=1))
    else:
        reveal_prob = reveal_prob_until(s)
    reveal_prob = torch.where(last, 1.0, reveal_prob).expand(masked.shape)

    if settings.dtype == "float32":
        stay = 1 - reveal_prob[masked][:, None]
        weights = torch.cat([probs * (token_prob if by_token else 1 - stay), stay], dim=1).float()
        choice = race_float32(weights, noise.float32(masked.sum(dim=1), weights.shape[1]))
        reveal = masked.masked_scatter(masked, choice < probs.shape[1])
        drawn, logits = choice[reveal[masked]], logits[reveal[masked]]
    else:
        to_reveal, for_token = noise.uniforms(masked)
        reveal = masked & (to_reveal < reveal_prob)
        logits = look.logits(reveal)
        if by_token:
            logits = logits + token_prob.log()[reveal[masked]]
        drawn = draw_tokens(logits, for_token[reveal])
    return reveal, _final(drawn, logits, last, reveal, settings), s


def rule_step(look: Look, masked: Tensor, t: Tensor, k: Tensor, steps: int, noise) -> tuple:
    """The same for a deterministic order: its share of what is masked, tokens drawn from the network."""
    reveal = choose(look, look.settings.rule, masked, steps - k)
    logits = look.logits(reveal)
    drawn = draw_tokens(logits, noise.uniforms(masked)[1][reveal])
    return reveal, _final(drawn, logits, (k == steps - 1)[:, None], reveal, look.settings), t


def _final(drawn: Tensor, logits: Tensor, last: Tensor, reveal: Tensor, settings: SamplerConfig) -> Tensor:
    """The tokens [N] of the positions revealed; in a last step as `sampler.final` wants them."""
    if settings.final == "draw":
        return drawn
    return torch.where(last.expand(reveal.shape)[reveal], logits.argmax(dim=1), drawn)


def next_time(reveal_prob, masked: Tensor, t: Tensor, k: Tensor, steps: int, grid: str) -> Tensor:
    """The end of step k, [B]: equal steps, or where the expected number of masks to reveal is equal.

    The latter follows each sequence: of what is masked now, a fraction 1 / (steps left) is revealed.
    reveal_prob(s) is that of a step to s, [B, L]; for GenMD4 that of the mean exponent, which is near.
    """
    left = steps - k
    if grid == "uniform":
        return (left - 1).double() / steps
    count = masked.sum(dim=1).clamp(min=1)
    low, high = torch.full_like(t, SMALLEST_LOG_RATIO), torch.zeros_like(t)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        share = (reveal_prob(t * middle.exp()) * masked).sum(dim=1) / count
        too_many = share > 1 / left
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    return torch.where(left == 1, 0.0, t * high.exp())


def _free_tokens(z: Tensor, valid: Tensor, mask_id: int) -> int:
    """`ar`: tokens to draw, the most of a sequence. UserError where they do not all follow what is given."""
    free = (z == mask_id) & valid
    given = valid.sum(dim=1) - free.sum(dim=1)
    if free[torch.arange(z.shape[1], device=z.device) < given[:, None]].any():
        raise UserError("an ar model continues a text and cannot fill a gap: give a prompt without masks")
    return int(free.sum(dim=1).max())


def _continue(model, z: Tensor, valid: Tensor, indices: Tensor, run: Run, bar) -> tuple:
    """`ar`: a batch [B, L], position by position -> as `_denoise`."""
    z, free = z.clone(), (z == model.mask_id) & valid
    given = valid.sum(dim=1) - free.sum(dim=1)
    revealed_at = torch.zeros(z.shape, dtype=torch.int32, device=z.device)
    decoder, first = Decoder(model, *z.shape), int(given.min())
    unread = torch.cat([z.new_full((len(z), 1), model.mask_id), z[:, :first]], dim=1)
    for position in range(first, int(valid.sum(dim=1).max())):
        features = decoder(unread)
        rows = free[:, position].nonzero()[:, 0]
        if len(rows):
            step = position - given[rows]
            noise = StepNoise(run.seed, step, indices[rows.cpu()], z.device)
            logits = restrict(
                model.backbone.output(features[rows], decoder.condition), run.settings, run.never
            )
            z[rows, position] = next_token(logits, position, z.shape[1], noise, run.settings)
            revealed_at[rows, position] = step.int() + 1
            bar.update(len(rows))
            if run.on_step is not None:
                run.on_step(indices, z)
        unread = z[:, position : position + 1]
    return z, revealed_at, torch.full(z.shape, torch.nan), free.sum(dim=1)


def next_token(logits: Tensor, position: int, length: int, noise, settings: SamplerConfig) -> Tensor:
    """`ar`: the tokens [B] at a position of `length`, drawn by their logits [B, V]."""
    if settings.dtype == "float32":
        counts = torch.ones(len(logits), dtype=torch.long)
        return race_float32(logits.softmax(dim=1).float(), noise.float32(counts, logits.shape[1]))
    everywhere = torch.ones(len(logits), length, dtype=torch.bool)
    return draw_tokens(logits, noise.uniforms(everywhere)[1][:, position])
