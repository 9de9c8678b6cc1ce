"""A model whose network is a random table: for tiny texts everything about it can be enumerated."""

import itertools

import torch
from torch import Tensor, nn

from lomdm_dist.config import OBJECTIVES, ModelConfig
from lomdm_dist.model import LoMDM
from lomdm_dist.model.backbone import Context
from lomdm_dist.ops.attention import Sight
from lomdm_dist.ops.masked_linear_ce import masked_linear_ce, subs_logits

V, L, MASK = 3, 3, 3  # tokens 0, 1, 2, and the mask
TEXTS = torch.tensor(list(itertools.product(range(V + 1), repeat=L)))  # row `code` is the text of that code
CODES = torch.tensor([(V + 1) ** k for k in reversed(range(L))])
SCALE = {1: 0.5, 3: 0.125}  # of a head's outputs; with large ones a polynomial's velocity may have roots
PATTERNS = torch.tensor(list(itertools.product([False, True], repeat=L)))

FAMILY = {
    "mdlm": {"name": "mdlm"},
    "lomdm": {"name": "lomdm"},
    "fixed power": {"name": "lomdm", "c1": 0.7, "c2": 0.0},
    "softmax": {"name": "lomdm", "normalize": "softmax", "c1": 0.4, "c2": 1.0},
    "polynomial": {"name": "lomdm", "schedule": "polynomial"},
    "genmd4": {"name": "genmd4"},
    "left to right": {"name": "window", "window_eps": 1e-3},
    "permutation": {"name": "window", "order": "permutation", "permutation": [2, 0, 1], "window_eps": 1e-3},
    "blocks": {"name": "window", "order": "blocks", "block": 2, "window_eps": 1e-3},
}


class TableBackbone(nn.Module):
    """Features of a position: its logits, then three outputs for psi and three for phi."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(len(TEXTS), L, V + 7, generator=generator, dtype=torch.float64)
        self.table = nn.Parameter((64 * table).round() / 64)  # float32 holds these exactly
        self.output = TableOutput()

    def context(self, shape, valid=None, documents=None, dropout=None):
        return Context(torch.zeros(1), None, Sight(False, L), None, shape, None)

    def forward(self, tokens: Tensor, context) -> Tensor:
        return self.table[(tokens * CODES).sum(dim=1)].flatten(0, 1)


class TableOutput(nn.Module):
    def forward(self, features, condition, rows=None, targets=None, weights=None, *values):
        identity, zero = torch.eye(V + 1, dtype=features.dtype), torch.zeros(V + 1, dtype=features.dtype)
        hidden = features[..., : V + 1]
        if rows is None:
            return subs_logits(hidden, identity, zero, MASK)
        return masked_linear_ce(hidden[rows], identity, zero, targets, weights, MASK, V + 1, *values)


class TableHead(nn.Module):
    """A scheduler head that reads its outputs from the features."""

    def __init__(self, first: int, outputs: int):
        super().__init__()
        self.columns, self.scale = slice(first, first + outputs), SCALE[outputs]

    def forward(self, features: Tensor, context) -> Tensor:
        return context.spread(features[..., self.columns] * self.scale)


def table_model(objective: dict, seed: int = 0) -> LoMDM:
    """The real LoMDM on a table: its schedules, its bound, its sampler. objective: as in a config."""
    settings = OBJECTIVES[objective["name"]](**objective)
    config = ModelConfig(vocab_size=V + 1, mask_id=MASK, length=L, width=2, blocks=1, heads=1)
    model = LoMDM(config, settings)
    model.backbone = TableBackbone(seed)
    if model.phi is not None:
        outputs = 1 if settings.schedule == "power" else 3
        model.psi, model.phi = TableHead(V + 1, outputs), TableHead(V + 4, outputs)
    if model.token_exponents is not None:
        model.token_exponents.theta.data = torch.tensor([-0.4, 0.9, 0.3, 0.0])
    return model.eval()


class Reference:
    """A table model written down once more, in plain float64 and without the package's functions.

    mask_prob and hat_mask_prob are 1 - alpha of the forward schedule of a text, and of the reverse
    schedule of each of its masked patterns, as functions of time.
    """

    def __init__(self, objective: dict, model: LoMDM, x: Tensor):
        self.objective, self.x = objective, x
        table = model.backbone.table.detach()
        z = torch.where(PATTERNS, MASK, x)
        features = table[(z * CODES).sum(dim=1)]  # [2**L, L, V + 7]
        self.log_probs = features[..., :V].log_softmax(dim=-1)
        self.ce = -self.log_probs.gather(2, x.expand(len(z), L)[..., None])[..., 0]
        scale = SCALE[3 if objective.get("schedule") == "polynomial" else 1]
        self.psi = features[..., V + 1 : V + 4] * scale
        self.phi = table[(x * CODES).sum()][None, :, V + 4 :] * scale
        if objective["name"] == "genmd4":
            self.w = model.token_exponents.theta.detach().double().exp().log1p()[:V]

    def mask_prob(self, t: Tensor) -> Tensor:
        """[1, L], of the text."""
        return self._mask_prob(t, self.phi)

    def hat_mask_prob(self, t: Tensor) -> Tensor:
        """[2**L, L], seen from each pattern; not for GenMD4."""
        return self._mask_prob(t, self.psi)

    def _mask_prob(self, t: Tensor, outputs: Tensor) -> Tensor:
        settings = self.objective
        if settings["name"] == "window":
            return self._window(t)
        if settings["name"] == "genmd4":
            return t ** self.w[self.x][None]
        if settings.get("schedule") == "polynomial":
            a, b, c = outputs[..., 0], outputs[..., 1], 1 + outputs[..., 2]

            def quintic(t):
                return (
                    a**2 * t**5 / 5
                    + a * b * t**4 / 2
                    + (b**2 + 2 * a * c) * t**3 / 3
                    + b * c * t**2
                    + c**2 * t
                )

            return 1 / (1 + torch.exp(13.3 - 18.3 * quintic(t) / quintic(torch.ones(()))))
        return t ** self.exponent(outputs[..., 0])

    def exponent(self, logits: Tensor) -> Tensor:
        """Of a power schedule, [n, L]."""
        c1, c2 = self.objective.get("c1", 0.7), self.objective.get("c2", 0.65)
        if self.objective["name"] == "mdlm":
            return torch.ones_like(logits)
        if self.objective.get("normalize") == "softmax":
            return c1 + c2 * logits.exp() / logits.exp().sum(dim=1, keepdim=True)
        gate = 1 / (1 + (-logits).exp())
        return c1 + c2 * (gate - gate.mean(dim=1, keepdim=True))

    def _window(self, t: Tensor) -> Tensor:
        order = self.objective.get("order", "left_to_right")
        rank = {"left_to_right": [0, 1, 2], "permutation": [1, 2, 0], "blocks": [0, 0, 1]}[order]
        n = 2 if order == "blocks" else 3
        u = ((t - 1 + (torch.tensor([rank]) + 1) / n) * n).clamp(0, 1)
        eps = self.objective["window_eps"]
        return eps * t + (1 - eps) * (3 * u**2 - 2 * u**3)

    def edges(self) -> list[float]:
        """Times where a schedule is not smooth."""
        if self.objective["name"] != "window":
            return [0.0, 1.0]
        return [0.0, 0.5, 1.0] if self.objective.get("order") == "blocks" else [0.0, 1 / 3, 2 / 3, 1.0]
