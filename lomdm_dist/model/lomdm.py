"""The joint model: one backbone, and for a learned order the two heads on its detached features."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lomdm_dist.config import ModelConfig, ObjectiveConfig
from lomdm_dist.model.backbone import Backbone
from lomdm_dist.model.heads import SchedulerHead
from lomdm_dist.process import norm_sig


class LoMDM(nn.Module):
    """theta (backbone), phi (order of the clean text), psi (order seen from the masked text).

    `valid` [B, L] is False at padding: not attended to, and left out of the mean of NormSig.
    """

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig):
        super().__init__()
        self.c1, self.c2 = objective.c1, objective.c2
        self.backbone = Backbone(model)
        self.phi = SchedulerHead(model) if objective.learned else None
        self.psi = SchedulerHead(model) if objective.learned else None

    def forward(self, function: Callable, *arguments):
        """Run `function(model, *arguments)`: a whole training loss is one forward pass.

        Engines that shard the parameters count forward and backward passes of the outermost
        module. DeepSpeed's ZeRO 1 in bf16 clears gradients already computed when two of them meet
        one backward pass.
        """
        return function(self, *arguments)

    def exponent(self, logits: Tensor, valid: Tensor | None) -> Tensor:
        """e = c1 + c2 NormSig(g): [B, L], float64, in (c1 - c2, c1 + c2)."""
        return self.c1 + self.c2 * norm_sig(logits, valid)

    def fixed_exponent(self, tokens: Tensor) -> Tensor:
        return torch.full(tokens.shape, self.c1, dtype=torch.float64, device=tokens.device)

    def order(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """The forward exponents of clean text, [B, L]. Gradients reach phi only.

        The feature pass runs without gradient and without dropout.
        """
        if self.phi is None:
            return self.fixed_exponent(x)
        training = self.backbone.training
        self.backbone.eval()
        with torch.no_grad():
            context = self.backbone.context(valid, x.shape[1])
            features = self.backbone(x, context)
        self.backbone.train(training)
        return self.exponent(self.phi(features, context), valid)

    def denoise(
        self, z: Tensor, x: Tensor, masked: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The masked text z, the clean x -> CE [B, L] (float32, 0 where not masked), hat_e [B, L].

        Only masked positions are projected onto the vocabulary.
        """
        features, hat_exponent, condition = self.see(z, valid)
        ce = self.backbone.output(features[masked], condition, targets=x[masked])
        return torch.zeros(z.shape, device=z.device).masked_scatter(masked, ce), hat_exponent

    def see(self, z: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The masked text z -> features [B, L, D], hat_e [B, L], and the condition of the output.

        `backbone.output(features, condition)` gives the logits of the positions one asks for.
        """
        context = self.backbone.context(valid, z.shape[1])
        features = self.backbone(z, context)
        if self.psi is None:
            return features, self.fixed_exponent(z), context[0]
        hat_logits = self.psi(features.detach(), (context[0].detach(), *context[1:]))
        return features, self.exponent(hat_logits, valid), context[0]
