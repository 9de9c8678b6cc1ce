"""Bytes that autograd keeps for the backward pass: by formula, and counted."""

from collections import Counter

import torch
from torch import Tensor, nn

from lomdm_dist.config import Config
from lomdm_dist.model.backbone import MLP_RATIO
from lomdm_dist.model.flops import predicted_share

OF_ORDER = 8 * 8  # bytes a token of schedules and integrands: some [B, L] in float64


def activation_bytes(config: Config, share: float | None = None) -> dict[str, int]:
    """What autograd keeps of one micro-batch on one rank at the peak of its step, by part: bytes.

    backbone, psi, phi   their blocks, and each head's float32 output
    loss                 what the fused projection and loss computes in its forward pass: gradients
    again                of the block that is computed again under `recompute: block`, what exceeds `loss`,
                         which is let go of before

    share of the positions is projected: by default what is expected, 1 at worst. Sequences are full, and
    kernels are the defaults. Not counted: parameters, and what lives inside one operation.
    """
    model, objective, train = config.model, config.objective, config.train
    of_phi = train.micro_batch * model.length
    tokens = of_phi * config.passes[1]  # of a pass
    kept = block_bytes(config, train.recompute)
    parts = {"backbone": (model.blocks * kept + 8) * tokens, "psi": 0, "phi": 0}  # 8: the token ids
    if objective.name == "lomdm":
        head = 4 * model.width + (kept if objective.head == "transformer" else 0)
        parts["psi"], parts["phi"] = head * tokens, (head + OF_ORDER) * of_phi
        if not objective.stop_gradient:  # then the gradient of phi goes on through the features
            parts["phi"] += model.blocks * kept * of_phi
    parts["loss"] = _loss_bytes(config, tokens, predicted_share(objective) if share is None else share)
    parts["again"] = 0
    if train.recompute == "block":
        again = (block_bytes(config, "none") - kept) * tokens
        parts["again"] = max(0, again - parts["loss"])
    return {name: round(size) for name, size in parts.items()}


def block_bytes(config: Config, recompute: str) -> float:
    """What one block keeps of a token. D: one value a channel.

    The residual stream twice, the outputs of both norms, and of both branches (for the gradients of the
    gates), 6 D; q, k, v and the output of attention, 4 D, and the logarithms of its sums; the MLP before
    and after its activation, 8 D. Tensor-parallel ranks share out the last two, with sequence_parallel
    all. Keyed dropout keeps nothing but its rows' keys; torch's own a mask.
    """
    model, parallel = config.model, config.parallel
    ranks, width = parallel.tensor_parallel, model.width * (2 if config.train.precision == "bf16" else 4)
    each = ranks if parallel.sequence_parallel else 1  # ranks that share out the tokens between the layers
    if recompute == "block":
        return width / each
    statistics, scores = 2 * 4 / each, 4 * model.heads / ranks
    kept = 5 * width / each + statistics + 2 * MLP_RATIO * width / ranks
    if recompute == "none":
        kept += width / each + statistics + 4 * width / ranks + scores
    if model.dropout:
        kept += 2 * (4 if model.dropout_rng == "keyed" else model.width) / each
    return kept


def _loss_bytes(config: Config, tokens: int, share: float) -> float:
    """Projected rows and their gradients; the gradients of this rank's part of the output matrix."""
    model = config.model
    size = 2 if config.train.precision == "bf16" else 4
    part = -(-model.vocab_size // config.parallel.tensor_parallel)
    rows = share * tokens * (2 * model.width * size + 4 * 8)  # and places, targets, statistics, CE
    of_values = 4 * model.vocab_size if config.objective.name == "genmd4" else 0
    return rows + part * (model.width + 1) * size + of_values


class SavedBytes:
    """As a context: counts what autograd saves, each storage once, until it is let go.

    `now` and `peak` are bytes. Parameters of the model are not counted: they are there anyway.
    """

    def __init__(self, model: nn.Module):
        self.now = self.peak = 0
        self._users = Counter()
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    @torch.compiler.disable
    def _keep(self, tensor: Tensor) -> "_Kept":
        return _Kept(tensor, self)

    def add(self, storage: torch.UntypedStorage, users: int) -> None:
        key = storage.data_ptr()
        if key in self._parameters:
            return
        before = self._users[key]
        self._users[key] += users
        if before == 0 or self._users[key] == 0:
            self.now += storage.nbytes() * users
            self.peak = max(self.peak, self.now)


class _Kept:
    """A saved tensor, which says when autograd lets go of it."""

    def __init__(self, tensor: Tensor, counter: SavedBytes):
        self.tensor, self._counter = tensor, counter
        counter.add(tensor.untyped_storage(), 1)

    def __del__(self):
        self._counter.add(self.tensor.untyped_storage(), -1)
