"""Which part of a training step is at work: told to one listener, a clock or a profiler; by default to none.

    data        sequences and their noise
    features    of the clean text, which phi reads
    z1, z2      the network on each masked sample, `z` on both at once; `ar` and one sample: z1
    heads       phi and psi
    loss        projection and cross-entropy, schedules, masks, integrands
    reduction   of gradients and statistics over the ranks, and the wait for them
    optimiser   norm, clipping, AdamW, the average of weights; what gathers updated weights

A part is the time of its forward and its backward pass, without the parts inside it.
"""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

PHASES = ("data", "features", "z1", "z2", "z", "heads", "loss", "reduction", "optimiser")

_listener: Callable[[str | None], None] | None = None
_now: str | None = None


@contextlib.contextmanager
def listening(listener: Callable[[str | None], None]):
    """listener(name) is called when another part begins; name None: when none follows.

    On a GPU a backward pass calls it from a thread of its own.
    """
    global _listener, _now
    _listener, _now = listener, None
    try:
        yield
    finally:
        _listener = None


@contextlib.contextmanager
def phase(name: str):
    """As a context or a decorator: here `name` is at work, unless a part inside says otherwise."""
    if _listener is None:
        yield
        return
    before = _switch(name)
    try:
        yield
    finally:
        _switch(before)


def backward_from(tensor: Tensor) -> None:
    """The backward pass, from where it reaches this tensor, is of the part that is at work now.

    It runs in the opposite order of the forward pass, so this holds until the next such tensor.
    """
    if _listener is not None and tensor.requires_grad:
        name = _now
        tensor.register_hook(lambda _: _switch(name) and None)


def mark(name: str | None) -> None:
    """A listener for torch's profiler: the last mark before an operation says to which part it belongs.

    Marks, not ranges, for a part may begin in one thread and end in another.
    """
    with torch.profiler.record_function(f"phase:{name}"):
        pass


def _switch(name: str | None) -> str | None:
    """Returns the part that was at work before."""
    global _now
    before, _now = _now, name
    if name != before and _listener is not None:
        _listener(name)
    return before
