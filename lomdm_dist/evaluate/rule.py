"""The exact likelihood of a deterministic order's sampler, by teacher forcing along the order it picks.

Where the rule picks the positions, a text can come about in one way only: its probability is a product,
with nothing to sum over. The bound (perplexity.py) speaks of the random process instead.
"""

import math
import time

import numpy as np
import torch
from torch import Tensor

from lomdm_dist.config import Objective, SamplerConfig
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.errors import UserError
from lomdm_dist.evaluate.perplexity import over_sequences
from lomdm_dist.evaluate.statistics import exp, ratio
from lomdm_dist.sample.look import Look
from lomdm_dist.sample.rules import check_rule, choose


def check_exact(settings: SamplerConfig, objective: Objective) -> None:
    """UserError where the sampler's likelihood is not this product."""
    if objective.name == "ar":
        raise UserError("an ar model has one order, and `eval ppl` gives its exact likelihood")
    check_rule(settings.rule, objective)
    if settings.final != "draw":
        raise UserError(
            f"sampler.final={settings.final}: the last tokens are taken, not drawn; give sampler.final=draw"
        )


@torch.no_grad()
def sequence_nll(
    model,
    x: Tensor,
    valid: Tensor | None,
    steps: int,
    settings: SamplerConfig,
    never: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """-log p of texts x [B, L] under the sampler of `settings.rule` in `steps` steps, in nats: [B], float64.

    inf where a text has a token that is never drawn: one outside top-p, say. Also the number of such
    tokens [B], and of network calls [B]. valid [B, L] is False at padding, which is not revealed.
    """
    masked = torch.ones_like(x, dtype=torch.bool) if valid is None else valid.clone()
    z = torch.where(masked, model.mask_id, x)
    log_probs = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    calls = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    for k in range(steps):
        rows = masked.any(dim=1).nonzero()[:, 0]
        if not len(rows):
            break
        look = Look(model, z[rows], None if valid is None else valid[rows], settings, never)
        reveal = torch.zeros_like(masked)
        reveal[rows] = choose(look, settings.rule, masked[rows], steps - k)
        of_tokens = look.logits(reveal[rows]).log_softmax(dim=1)
        log_probs[reveal] = of_tokens.gather(1, x[reveal][:, None])[:, 0]
        z, masked = torch.where(reveal, x, z), masked & ~reveal
        calls[rows] += 1
    return -log_probs.sum(dim=1), log_probs.isinf().sum(dim=1), calls


def estimate_rule(
    model,
    shards: ShardSet,
    indices: np.ndarray,
    steps: int,
    settings: SamplerConfig,
    never: tuple[int, ...] = (),
    batch: int = 32,
    grid=None,
    progress: bool = False,
) -> dict:
    """The negative log-likelihood a token of the sequences at `indices`, with its standard error over them.

    With a `grid` the sequences are shared out over its ranks, each with the whole model, and every rank
    gets the result. Nothing is random here. Raises UserError where there is no such likelihood.
    """
    check_exact(settings, model.objective)
    start = time.perf_counter()

    def of_batch(model, numbers, x, valid) -> Tensor:
        nll, impossible, calls = sequence_nll(model, x, valid, steps, settings, never)
        tokens = torch.full_like(nll, x.shape[1]) if valid is None else valid.sum(dim=1)
        return torch.stack([nll, tokens, impossible, calls], dim=1)

    name = settings.rule if progress else None
    found = over_sequences(model, of_batch, 4, shards, indices, batch, grid, name)
    of_sequences, tokens, impossible, calls = found.T
    nll, error = ratio(of_sequences, tokens)
    return {
        "nll_per_token": nll,
        "standard_error": math.hypot(error, nll * 2**-23),  # the logits are float32: no better than that
        "ppl": exp(nll),
        "tokens": round(tokens.sum().item()),
        "sequences": len(found),
        "impossible_tokens": round(impossible.sum().item()),
        "network_calls": calls.mean().item(),
        "seconds": time.perf_counter() - start,
    }
