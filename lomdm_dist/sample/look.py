"""One look of the network at masked texts: all that a step of sampling needs of it."""

import torch
from torch import Tensor

from lomdm_dist.config import SamplerConfig
from lomdm_dist.process import PowerSchedule
from lomdm_dist.sample.tokens import restrict

DEFAULT = SamplerConfig()
ROWS = 1024  # positions whose logits are in memory at once, where only a number of each is kept


class Look:
    """What the network says of z [B, L] under a sampler's settings, for as long as z stays as it is.

    masked   [B, L] bool: what is to be filled in; where `valid` [B, L] is False there is no text: not
             masked, not attended to
    reverse  the reverse schedule; GenMD4's has the mean exponents under the network
    never    ids that are not to be drawn, beside the mask token

    Only the positions asked for are projected onto the vocabulary. Two kinds of step need every masked
    one each time, and keep their logits: those of GenMD4, whose tokens have each a time, and float32's.
    """

    def __init__(
        self,
        model,
        z: Tensor,
        valid: Tensor | None = None,
        settings: SamplerConfig = DEFAULT,
        never: tuple[int, ...] = (),
    ):
        self.z, self.settings, self._output, self._never = z, settings, model.backbone.output, never
        self.masked = z == model.mask_id if valid is None else (z == model.mask_id) & valid
        self._features, self.reverse, self._condition = model.see(z, valid)
        by_token = model.token_exponents is not None
        self._kept = self._project(self.masked) if by_token or settings.dtype == "float32" else None
        self.token_exponents = model.token_exponents().double() if by_token else None  # [V]
        if by_token:
            means = self._kept.softmax(dim=1) @ self.token_exponents
            self.reverse = PowerSchedule(scatter(self.masked, means))

    def logits(self, positions: Tensor) -> Tensor:
        """Logits [N, V] of some masked positions [B, L] bool: float64, -inf where a token is never drawn."""
        return self._project(positions) if self._kept is None else self._kept[positions[self.masked]]

    def _project(self, positions: Tensor) -> Tensor:
        return restrict(self._output(self._features[positions], self._condition), self.settings, self._never)

    def confidence(self) -> Tensor:
        """The largest probability that a token has at each masked position: [B, L], 1 elsewhere."""
        places, largest = self.masked.flatten().nonzero()[:, 0], []
        for some in places.split(ROWS):
            positions = torch.zeros_like(self.masked).flatten().index_fill(0, some, True)
            largest.append(self.logits(positions.view_as(self.masked)).softmax(dim=1).amax(dim=1))
        return scatter(self.masked, torch.cat(largest))

    def exponents(self) -> Tensor | None:
        """The exponents of the reverse schedule, [B, L] float64; None where it has none."""
        if not isinstance(self.reverse, PowerSchedule):
            return None
        return self.reverse.exponent.expand(self.z.shape)


def scatter(masked: Tensor, values: Tensor) -> Tensor:
    """values [N] of the masked positions -> [B, L], 1 elsewhere."""
    return torch.ones(masked.shape, dtype=values.dtype, device=values.device).masked_scatter(masked, values)
