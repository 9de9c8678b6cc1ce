"""Ancestral sampling: from time 1, all masks, to time 0, all text. For `ar`, from left to right."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lomdm_dist.config import SamplerConfig
from lomdm_dist.errors import UserError
from lomdm_dist.process import PowerSchedule, keyed_uniforms
from lomdm_dist.process.noise import Purpose, keyed_generator
from lomdm_dist.sample.tokens import draw_tokens, race_float32, restrict

DEFAULT = SamplerConfig()
BISECTIONS = 60  # of log(s / t), for the even grid
SMALLEST_LOG_RATIO = -700.0


@dataclass(frozen=True)
class Samples:
    """Texts, and how they came about.

    token_ids      [N, L] int64, on the CPU
    revealed_at    [N, L] int32: the step, 1 to `steps`, in which a position got its token; 0: it was given.
                   What was revealed never changes, so these two are the whole trajectory
    exponents      [N, L] float32: of the reverse schedule, as seen when the token was drawn (nan: given);
                   None where the objective has none (`ar`, window and polynomial schedules)
    steps          of time; for `ar` of tokens
    network_calls  forward passes a sequence, in the mean
    """

    token_ids: Tensor
    revealed_at: Tensor
    exponents: Tensor | None
    steps: int
    network_calls: float

    def entropy(self) -> float:
        """Mean over samples of the entropy of a sample's own token frequencies, in nats."""
        entropies = []
        for row in self.token_ids:
            share = torch.unique(row, return_counts=True)[1].double() / len(row)
            entropies.append(-(share * share.log()).sum())
        return float(torch.stack(entropies).mean())


@dataclass(frozen=True)
class StepNoise:
    """The uniforms of one step, of the sequences at `indices` [B]: [B, L] float64, float32 ones on demand."""

    seed: int
    step: int
    indices: Tensor
    device: torch.device

    def uniforms(self, length: int) -> tuple[Tensor, Tensor]:
        """To reveal and for the tokens, each [B, L], float64."""
        both = keyed_uniforms(self.seed, Purpose.SAMPLE, self.step, self.indices, 2 * length)
        return both.to(self.device).chunk(2, dim=1)

    def float32(self, counts: Tensor, width: int) -> Tensor:
        """For counts[b] positions of each sequence: [sum of counts, width], float32."""
        rows = [
            keyed_generator(self.seed, Purpose.SAMPLE, self.step, int(index)).random(
                (int(n), width), dtype=np.float32
            )
            for index, n in zip(self.indices, counts, strict=True)
        ]
        return torch.from_numpy(np.concatenate(rows)).to(self.device)


@torch.no_grad()
def sample(
    model,
    count: int,
    length: int,
    steps: int,
    seed: int,
    never: tuple[int, ...] = (),
    settings: SamplerConfig = DEFAULT,
    given: Tensor | None = None,
    batch: int = 16,
    progress: bool = False,
    on_step: Callable[[Tensor, Tensor], None] | None = None,
) -> Samples:
    """Draw `count` sequences of `length` tokens; `steps` of time, or for `ar` one a free position.

    given [length] holds tokens that stay, and the mask id where one is to be drawn; without it all
    are. `never` lists ids that are not text (padding); the mask token never comes out. Sample i
    depends on (seed, i) alone. on_step(indices [B], z [B, L]) sees each batch after each step. Raises
    UserError where `ar` is asked to fill a gap.
    """
    device = next(model.parameters()).device
    start = torch.full((length,), model.mask_id) if given is None else given
    free = start == model.mask_id
    causal = model.objective.name == "ar"
    if causal:
        steps = int(free.sum())
        if free[: length - steps].any():
            raise UserError("an ar model continues a text and cannot fill a gap: give a prompt without masks")
    batches = torch.arange(count).split(batch)
    rows, steps_of = [], []
    with tqdm(total=steps * len(batches), desc="sample", disable=None if progress else True) as bar:
        for indices in batches:
            z = start.to(device).repeat(len(indices), 1)
            t = torch.ones(len(indices), dtype=torch.float64, device=device)
            revealed_at = torch.zeros(z.shape, dtype=torch.int32, device=device)
            for k in range(steps):
                noise, hidden = StepNoise(seed, k, indices, device), z == model.mask_id
                if causal:
                    z = next_token(model, z, length - steps + k, noise, never, settings)
                else:
                    z, t = reverse_step(model, z, t, k, steps, noise, never, settings)
                revealed_at[hidden & (z != model.mask_id)] = k + 1
                if on_step is not None:
                    on_step(indices, z)
                bar.update()
            rows.append(z.cpu())
            steps_of.append(revealed_at.cpu())
    return Samples(torch.cat(rows), torch.cat(steps_of), None, steps, steps)


def reverse_step(
    model, z: Tensor, t: Tensor, k: int, steps: int, noise, never: tuple[int, ...] = (), settings=DEFAULT
) -> tuple[Tensor, Tensor]:
    """Step k of `steps`: z [B, L] at times t [B] -> z at the next times s, and s [B].

    A masked position is revealed with the reverse schedule's probability, its token drawn from the
    network. GenMD4 has a probability for each token: v comes out with p_v (1 - (s/t)**w_v).
    """
    masked, last = z == model.mask_id, k == steps - 1
    features, reverse, condition = model.see(z, None)

    def logits_at(positions: Tensor) -> Tensor:
        return restrict(model.backbone.output(features[positions], condition), settings, never)

    by_token, float32 = model.token_exponents is not None, settings.dtype == "float32"
    if by_token or float32:
        probs = logits_at(masked).softmax(dim=1)  # [N, V]
    if by_token:
        w = model.token_exponents().double()
        reverse = PowerSchedule(_scatter(masked, probs @ w))

    def reveal_prob_until(s: Tensor) -> Tensor:
        if k == 0:
            return reverse.log_keep_prob(s).exp()  # from all masks, where a schedule may only come near
        return reverse.reveal_prob(t, s)

    s = next_time(reveal_prob_until, masked, t, k, steps, settings.grid)
    if last:
        reveal_prob = torch.ones_like(z, dtype=torch.float64)
    elif by_token:
        token_prob = -torch.expm1(w * (s / t).log().repeat_interleave(masked.sum(dim=1))[:, None])  # [N, V]
        reveal_prob = _scatter(masked, (probs * token_prob).sum(dim=1))
    else:
        reveal_prob = reveal_prob_until(s)

    if last and settings.final == "argmax":
        return z.masked_scatter(masked, logits_at(masked).argmax(dim=1)), s
    if float32:
        stay = 1 - reveal_prob.expand(z.shape)[masked][:, None]
        weights = probs * (token_prob if by_token and not last else 1 - stay)
        uniforms = noise.float32(masked.sum(dim=1), weights.shape[1] + 1)
        choice = race_float32(torch.cat([weights.float(), stay.float()], dim=1), uniforms)
        return z.masked_scatter(masked, choice.where(choice < weights.shape[1], model.mask_id)), s
    to_reveal, for_token = noise.uniforms(z.shape[1])
    reveal = masked & (to_reveal < reveal_prob)
    logits = logits_at(reveal)
    if by_token and not last:
        logits = logits + token_prob.log()[reveal[masked]]
    return z.masked_scatter(reveal, draw_tokens(logits, for_token[reveal])), s


def _scatter(masked: Tensor, values: Tensor) -> Tensor:
    """values [N] of the masked positions -> [B, L], 1 elsewhere."""
    return torch.ones(masked.shape, dtype=values.dtype, device=values.device).masked_scatter(masked, values)


def next_time(reveal_prob, masked: Tensor, t: Tensor, k: int, steps: int, grid: str) -> Tensor:
    """The end of step k, [B]: equal steps, or where the expected number of masks to reveal is equal.

    The latter follows each sequence: of what is masked now, a fraction 1 / (steps left) is revealed.
    reveal_prob(s) is that of a step to s, [B, L]; for GenMD4 that of the mean exponent, which is near.
    """
    left = steps - k
    if grid == "uniform" or left == 1:
        return torch.full_like(t, (left - 1) / steps)
    count = masked.sum(dim=1).clamp(min=1)
    low, high = torch.full_like(t, SMALLEST_LOG_RATIO), torch.zeros_like(t)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        share = (reveal_prob(t * middle.exp()) * masked).sum(dim=1) / count
        too_many = share > 1 / left
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    return t * high.exp()


def next_token(
    model, z: Tensor, position: int, noise: StepNoise, never: tuple[int, ...], settings: SamplerConfig
) -> Tensor:
    """`ar`: fill a position of z [B, L] from those before it."""
    features, condition = model.predict_next(z[:, :position])
    logits = restrict(model.backbone.output(features[:, -1], condition), settings, never)
    z = z.clone()
    if settings.dtype == "float32":
        counts = torch.ones(len(z), dtype=torch.long)
        z[:, position] = race_float32(logits.softmax(dim=1).float(), noise.float32(counts, logits.shape[1]))
    else:
        z[:, position] = draw_tokens(logits, noise.uniforms(z.shape[1])[1][:, position])
    return z
