"""A model whose network is a random table: for tiny texts everything about it can be enumerated."""

import itertools

import torch
from torch import Tensor, nn

from lomdm_dist.config import OBJECTIVES, ModelConfig
from lomdm_dist.model import LoMDM
from lomdm_dist.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_and_mean, subs_logits

V, L, MASK = 3, 3, 3  # tokens 0, 1, 2, and the mask
TEXTS = torch.tensor(list(itertools.product(range(V + 1), repeat=L)))  # row `code` is the text of that code
CODES = torch.tensor([(V + 1) ** k for k in reversed(range(L))])
PATTERNS = torch.tensor(list(itertools.product([False, True], repeat=L)))


class TableBackbone(nn.Module):
    """Features of a position: its logits, then three outputs for psi and three for phi."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(len(TEXTS), L, V + 7, generator=generator, dtype=torch.float64))
        self.output = TableOutput()

    def context(self, valid, length):
        return None, None, {}

    def forward(self, tokens: Tensor, context) -> Tensor:
        return self.table[(tokens * CODES).sum(dim=1)]


class TableOutput(nn.Module):
    def forward(self, features, condition, targets=None, values=None):
        identity, zero = torch.eye(V + 1, dtype=features.dtype), torch.zeros(V + 1, dtype=features.dtype)
        hidden = features[..., : V + 1]
        if targets is None:
            return subs_logits(hidden, identity, zero, MASK)
        if values is None:
            return linear_cross_entropy(hidden, identity, zero, targets, MASK)
        return linear_cross_entropy_and_mean(hidden, identity, zero, targets, MASK, values)


class TableHead(nn.Module):
    def __init__(self, first: int, outputs: int):
        super().__init__()
        self.columns = slice(first, first + outputs)

    def forward(self, features: Tensor, context) -> Tensor:
        return 0.7 * features[..., self.columns]


def table_model(objective: dict, seed: int = 0) -> LoMDM:
    """The real LoMDM on the table: its schedules, its bound, its sampler. objective: as in a config."""
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
