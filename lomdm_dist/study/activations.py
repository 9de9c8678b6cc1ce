"""Bytes that autograd keeps for the backward pass: counted."""

from collections import Counter

import torch
from torch import Tensor, nn


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
