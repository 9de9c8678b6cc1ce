"""Ancestral sampling: from time 1, all masks, to time 0, all text."""

from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from lomdm_dist.process import PowerSchedule, keyed_uniforms
from lomdm_dist.process.noise import Purpose


@dataclass(frozen=True)
class Samples:
    """token_ids [N, L] int64 on the CPU; network_calls counts forward passes a sequence."""

    token_ids: Tensor
    network_calls: int

    def entropy(self) -> float:
        """Mean over samples of the entropy of a sample's own token frequencies, in nats."""
        entropies = []
        for row in self.token_ids:
            share = torch.unique(row, return_counts=True)[1].double() / len(row)
            entropies.append(-(share * share.log()).sum())
        return float(torch.stack(entropies).mean())


@torch.no_grad()
def sample(
    model,
    count: int,
    length: int,
    steps: int,
    seed: int,
    mask_id: int,
    never: tuple[int, ...] = (),
    batch: int = 16,
    progress: bool = False,
) -> Samples:
    """Draw `count` sequences of `length` tokens in `steps` equal steps of time.

    From t to s < t a masked position is revealed with probability 1 - (s/t)**hat_e, its token drawn
    from the network. The last step ends at 0 and reveals all that is left. `never` lists ids that
    are not text (padding); the mask token never comes out. Sample i depends on (seed, i) alone.
    """
    device = next(model.parameters()).device
    batches = torch.arange(count).split(batch)
    rows = []
    with tqdm(total=steps * len(batches), desc="sample", disable=None if progress else True) as bar:
        for indices in batches:
            z = torch.full((len(indices), length), mask_id, device=device)
            for k in range(steps):
                uniforms = keyed_uniforms(seed, Purpose.SAMPLE, k, indices, 2 * length).to(device)
                z = reverse_step(model, z, 1 - k / steps, 1 - (k + 1) / steps, uniforms, mask_id, never)
                bar.update()
            rows.append(z.cpu())
    return Samples(torch.cat(rows), steps)


def reverse_step(
    model, z: Tensor, t: float, s: float, uniforms: Tensor, mask_id: int, never: tuple[int, ...]
) -> Tensor:
    """From z at time t to z at time s, [B, L]; uniforms [B, 2 L]: to reveal, and for the token."""
    to_reveal, for_token = uniforms.chunk(2, dim=1)
    features, hat_exponent, condition = model.see(z, None)
    times = torch.tensor([[t], [s]], dtype=torch.float64, device=z.device)
    reveal_prob = PowerSchedule(hat_exponent).reveal_prob(times[0], times[1])
    reveal = (z == mask_id) & (to_reveal < reveal_prob)
    logits = model.backbone.output(features[reveal], condition)
    logits[:, list(never)] = -torch.inf
    return z.masked_scatter(reveal, draw_tokens(logits, for_token[reveal]))


def draw_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Exact draws: logits [N, V], uniforms [N] -> ids [N], by the inverse of the distribution in float64.

    float32 noise would cut the distribution's tail, which lowers the temperature without saying so.
    """
    cumulative = logits.double().softmax(dim=1).cumsum(dim=1)
    cumulative = cumulative / cumulative[:, -1:]  # ends at 1, so a uniform below 1 always lands
    return torch.searchsorted(cumulative, uniforms[:, None], right=True)[:, 0]
