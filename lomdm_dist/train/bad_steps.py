"""Steps whose loss or gradient is no number: which rank, which parameter, which sequences."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lomdm_dist.data.reader import Reader, Rows
from lomdm_dist.files import write_atomically
from lomdm_dist.machine import to_json

FOLDER = "bad_steps"


@dataclass(frozen=True)
class Found:
    """What a rank says of a bad step: its own loss, and the first bad gradient and weight that it sees."""

    rank: int
    loss: float
    gradient: str | None = None
    weight: str | None = None

    @property
    def bad(self) -> bool:
        return not math.isfinite(self.loss) or self.gradient is not None or self.weight is not None

    def __str__(self) -> str:
        parts = [f"rank {self.rank}"]
        if not math.isfinite(self.loss):
            parts.append(f"whose loss is {self.loss}")
        if self.weight:
            parts.append(f"whose weights {self.weight} are no numbers already")
        if self.gradient:
            parts.append(f"first bad in the gradient of {self.gradient}")
        return ", ".join(parts)


def describe(step: int, loss: float, norm: float, found: list[Found]) -> str:
    """One line on a step: what is no number, on which ranks, and where it began."""
    what = f"the loss of step {step} is {loss}"
    if math.isfinite(loss):
        what = f"the gradient norm of step {step} is {norm}"
    bad = [of_rank for of_rank in found if of_rank.bad]
    if not bad:
        return f"{what}; done again it is finite on every rank: a fault of a device or of the network"
    more = f"; and {len(bad) - 4} ranks more" if len(bad) > 4 else ""
    return f"{what}: {'; '.join(map(str, bad[:4]))}{more}"


@contextlib.contextmanager
def first_bad_gradient(model: nn.Module) -> Iterator[list[str]]:
    """Names of parameters whose gradient on this rank is no number, in the order in which they come.

    Hooks are set when the model is called: FSDP2 has the parameters that autograd sees only then.
    """
    bad: list[str] = []
    hooks = []
    hooked: dict[int, Tensor] = {}

    def watch(*_) -> None:
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor) and id(parameter) not in hooked and parameter.requires_grad:
                hooked[id(parameter)] = parameter
                hooks.append(parameter.register_hook(lambda gradient, name=name: note(name, gradient)))

    def note(name: str, gradient: Tensor) -> None:
        if name not in bad and not gradient.isfinite().all():
            bad.append(name)

    hooks += [module.register_forward_pre_hook(watch) for module in model.modules()]
    try:
        yield bad
    finally:
        for hook in hooks:
            hook.remove()


def first_bad_weight(pieces) -> str | None:
    """The first name whose master weights on this rank hold a number that is not finite."""
    return next((piece.name for piece in pieces if not piece.master.isfinite().all()), None)


def write_down(run: Path, step: int, found: Found, rows: Rows, first: int, data: Reader) -> None:
    """RUN/bad_steps/step-N.rank-R.json: the sequences of this rank, by place and by tokens."""
    sources, indices = data.order.at(first, len(rows.ids))
    content = vars(found) | {
        "step": step,
        "sources": [str(source) for source in data.sources],
        "sequences": [[int(source), int(index)] for source, index in zip(sources, indices, strict=True)],
        "ids": rows.ids.to(torch.int64).tolist(),
    }
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"step-{step}.rank-{found.rank}.json", to_json(content) + "\n")
