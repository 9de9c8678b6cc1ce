"""The joint model: one backbone, and what its objective needs to know in which order to mask."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lomdm_dist.config import LomdmObjective, ModelConfig, Objective, WindowObjective
from lomdm_dist.model.backbone import Backbone, Context
from lomdm_dist.model.heads import SchedulerHead, TokenExponents
from lomdm_dist.model.initial import initialize
from lomdm_dist.ops.phase import backward_from, phase
from lomdm_dist.process import (
    PolynomialSchedule,
    PowerSchedule,
    WindowSchedule,
    keyed_uniforms,
    norm_sig,
    softmax_weights,
)
from lomdm_dist.process.noise import Purpose

GAMMA_MIN, GAMMA_MAX = -13.3, 5.0  # MuLAN's ends: 2e-6 masked at time 0, 0.7% clean at time 1


class LoMDM(nn.Module):
    """theta (backbone), phi (order of the clean text), psi (order seen from the masked text).

    Only `lomdm` has phi and psi. `genmd4` has an exponent a token, `mdlm` and `window` have a fixed
    order, `ar` has a causal backbone and no order at all. `valid` [B, L] is False at padding: not
    attended to, never masked, and left out of what is normalised over positions.

    With `attend` "document", a token sees its own document only. Where the documents end is known
    from the clean text, and given away to the masked one; what is sampled is one document.

    `dropout` [B] are keys, one a sequence and a pass; without them dropout is torch's own. On the meta
    device a model has no weights; elsewhere it starts with those of seed 0.
    """

    def __init__(self, model: ModelConfig, objective: Objective, attend: str = "sequence"):
        super().__init__()
        self.objective, self.mask_id = objective, model.mask_id
        self.eos_id = model.eos_id if attend == "document" else None
        self.backbone = Backbone(model, causal=objective.name == "ar")
        learned = isinstance(objective, LomdmObjective)
        self.phi = SchedulerHead(model, objective) if learned else None
        self.psi = SchedulerHead(model, objective) if learned else None
        self.token_exponents = TokenExponents(model.vocab_size) if objective.name == "genmd4" else None
        initialize(self, seed=0)

    def forward(self, function: Callable, *arguments):
        """Run `function(model, *arguments)`: engines that shard the parameters hook the outermost module."""
        return function(self, *arguments)

    def order(self, x: Tensor, valid: Tensor | None = None):
        """The forward schedule of clean text x [B, L]: when each position is masked."""
        return self.schedule(self.order_outputs(x, valid), x, valid)

    def order_outputs(
        self, x: Tensor, valid: Tensor | None = None, dropout: Tensor | None = None
    ) -> Tensor | None:
        """What is learned of the order of clean text x [B, L], float32: phi's outputs [B, L, 1 or 3];
        for GenMD4 the exponents of the tokens [V]; None where nothing is.

        The feature pass of phi runs without dropout, and without gradient unless `stop_gradient` is off.
        """
        if self.token_exponents is not None:
            return self.token_exponents()
        if self.phi is None:
            return None
        training = self.backbone.training
        self.backbone.eval()
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.objective.stop_gradient):
                context = self.backbone.context(x.shape, valid, self.documents(x), dropout)
                features = self.backbone(x, context)
                backward_from(features)
        finally:  # or a step that is done again, after running out of memory here, has no dropout
            self.backbone.train(training)
        with phase("heads"):
            return self.phi(features, context)

    def schedule(self, outputs: Tensor | None, x: Tensor, valid: Tensor | None):
        """The forward schedule of x [B, L] that such outputs mean."""
        if self.token_exponents is not None:
            return PowerSchedule(outputs[x])
        if outputs is None:
            return fixed_schedule(self.objective, x.shape[1], x.device)
        return learned_schedule(self.objective, outputs, valid)

    def denoise(
        self,
        z: Tensor,
        x: Tensor,
        masked: Tensor,
        valid: Tensor | None = None,
        dropout: Tensor | None = None,
        weights: Tensor | None = None,
        exponents: Tensor | None = None,
        exponent_weights: Tensor | None = None,
    ) -> "Denoised":
        """The masked text z and the clean x, [B, L]: cross-entropy, confidence, reverse schedule.

        Only masked positions are projected onto the vocabulary. weights [B, L] are those of the CE in
        `Denoised.total`, by default 1. GenMD4 also has exponents [V], its own by default, and
        exponent_weights [B, L], those of their means, by default 0.
        """
        context, features, reverse = self._see(z, valid, self.documents(x), dropout)
        places = masked.flatten().nonzero()[:, 0]

        def picked(values: Tensor) -> Tensor:
            return values.flatten()[places]

        weights = torch.ones(z.shape, dtype=torch.float64, device=z.device) if weights is None else weights
        loss = picked(x), picked(weights)
        if self.token_exponents is not None:
            exponents = self.token_exponents() if exponents is None else exponents
            loss = (
                *loss,
                exponents,
                picked(torch.zeros_like(weights) if exponent_weights is None else exponent_weights),
            )
        rows = context.rows(places)
        with phase("loss"):
            total, ce, peak, *means = self.backbone.output(features, context.condition, rows, *loss)

        def spread(rows: Tensor, elsewhere: float) -> Tensor:
            return rows.new_full(z.shape, elsewhere).masked_scatter(masked, rows)

        if means:
            reverse = PowerSchedule(spread(means[0], 1.0))
        return Denoised(spread(ce, 0.0), reverse, total, spread(peak, 0.0))

    def documents(self, x: Tensor) -> Tensor | None:
        """The number of each token's document in the clean text x [B, L]; None where all attend to all."""
        if self.eos_id is None:
            return None
        ends = (x == self.eos_id).long()
        return ends.cumsum(dim=1) - ends  # EOS belongs to the document that it ends

    def see(self, z: Tensor, valid: Tensor | None = None) -> tuple:
        """The masked text z -> features [B, L, D], reverse schedule, and the condition of the output.

        `backbone.output(features, condition)` gives the logits of the positions one asks for. The
        schedule is None for GenMD4, whose order is that of the tokens drawn.
        """
        context, features, reverse = self._see(z, valid, None, None)
        return context.spread(features), reverse, context.condition

    def _see(self, z: Tensor, valid, documents, dropout) -> tuple:
        context = self.backbone.context(z.shape, valid, documents, dropout)
        features = self.backbone(z, context)
        backward_from(features)
        if self.token_exponents is not None:
            return context, features, None
        if self.psi is None:
            return context, features, fixed_schedule(self.objective, z.shape[1], z.device)
        with phase("heads"):
            if self.objective.stop_gradient:
                cut_off = context._replace(condition=context.condition.detach())
                outputs = self.psi(features.detach(), cut_off)
            else:
                outputs = self.psi(features, context)
            backward_from(outputs)
        return context, features, learned_schedule(self.objective, outputs, valid)

    def predict_next(self, x: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`ar`: x [B, L] -> features of positions 0 .. L, [B, L + 1, D], each of those before it; condition.

        Position 0 is seen from the mask token, which stands for "nothing yet". documents [B, L + 1]
        numbers those of the tokens to predict: a new one is seen from the EOS before it, and no more.
        """
        context, features = self._see_before(x, None, documents, None)
        return context.spread(features), context.condition

    def _see_before(self, x: Tensor, valid, documents, dropout) -> tuple[Context, Tensor]:
        tokens = torch.cat([x.new_full((len(x), 1), self.mask_id), x], dim=1)
        context = self.backbone.context(tokens.shape, valid, documents, dropout)
        return context, self.backbone(tokens, context)

    def causal_ce(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        dropout: Tensor | None = None,
        weight: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """`ar`: -log p(x_i | x_<i), [B, L], float32, 0 at padding, detached; and `weight` times its sum."""
        predicted = torch.ones_like(x, dtype=torch.bool) if valid is None else valid
        context, features = self._see_before(x[:, :-1], valid, self.documents(x), dropout)
        backward_from(features)
        places = predicted.flatten().nonzero()[:, 0]
        weights = torch.full(places.shape, weight, dtype=torch.float64, device=x.device)
        rows = context.rows(places)
        loss = x.flatten()[places], weights
        with phase("loss"):
            total, ce, _ = self.backbone.output(features, context.condition, rows, *loss)
            backward_from(total)
        return ce.new_zeros(x.shape).masked_scatter(predicted, ce), total


class Denoised(NamedTuple):
    """What the network says of a masked text."""

    ce: Tensor  # [B, L], float32 or wider, 0 where not masked; detached
    reverse: object  # schedule; for GenMD4 its exponents are the means under the network, detached
    total: Tensor  # the weighted sum of CE (and of the means), whose gradient reaches the network
    log_confidence: Tensor  # [B, L] as ce: of the most probable token, whatever the right one is


def learned_schedule(objective: LomdmObjective, outputs: Tensor, valid: Tensor | None):
    """A head's outputs [B, L, 1 or 3] -> schedule [B, L]. New heads: e = c1 (+ c2 / L), or gamma linear."""
    if objective.schedule == "polynomial":
        a, b, c = outputs.unbind(dim=-1)
        return PolynomialSchedule(a, b, 1 + c, GAMMA_MIN, GAMMA_MAX)
    normalize = norm_sig if objective.normalize == "norm_sig" else softmax_weights
    return PowerSchedule(objective.c1 + objective.c2 * normalize(outputs[..., 0], valid))


def fixed_schedule(objective: Objective, length: int, device):
    """The schedule of `mdlm` and `window`, the same for every text: [1, 1] or [1, length]."""
    if not isinstance(objective, WindowObjective):
        return PowerSchedule(torch.ones(1, 1, dtype=torch.float64, device=device))
    if objective.order == "left_to_right":
        return WindowSchedule.left_to_right(length, objective.window_eps)
    if objective.order == "blocks":
        return WindowSchedule.blocks(length, objective.block, objective.window_eps)
    return WindowSchedule.permutation(permutation_of(objective, length), objective.window_eps)


def permutation_of(objective: WindowObjective, length: int) -> Tensor:
    """Positions in the order of generation, [length]: given (of a shorter text, those in it) or drawn."""
    if objective.permutation is not None:
        given = torch.tensor(objective.permutation)
        return given[given < length]
    draws = keyed_uniforms(objective.permutation_seed, Purpose.PERMUTATION, 0, [0], length)
    return torch.argsort(draws[0])
