"""Steps whose loss jumps or is no number: which rank, parameter and sequences; and whether to go on."""

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lomdm_dist.config import FaultsConfig
from lomdm_dist.data.reader import Reader, Rows
from lomdm_dist.errors import RunFailed
from lomdm_dist.files import write_atomically
from lomdm_dist.machine import to_json

FOLDER = "bad_steps"
ROLLBACKS = 3  # to one checkpoint
SPIKE = 10.0  # times the usual spread above the usual loss
KNOWN_LOSSES = 100  # steps that say what is usual


class Health:
    """How a run's steps went: what is counted of them, and whether it may go on."""

    def __init__(self, faults: FaultsConfig):
        self.faults = faults
        self.skipped = self.spikes = self.rollbacks = 0
        self.loss = math.nan  # of the last good step
        self._losses: deque[float] = deque(maxlen=KNOWN_LOSSES)
        self._in_a_row, self._back, self._times_back = 0, None, 0

    def good(self, step: int, loss: float) -> str | None:
        """Count a step; what is to be said where its loss jumps."""
        self._in_a_row, self.loss, said = 0, loss, None
        if len(self._losses) == KNOWN_LOSSES:
            usual = statistics.median(self._losses)
            spread = 1.4826 * statistics.median(abs(other - usual) for other in self._losses)  # of a normal
            if loss > usual + SPIKE * spread:
                self.spikes += 1
                said = (
                    f"the loss of step {step} jumps to {loss:.4f}; the median of the "
                    f"{KNOWN_LOSSES} before it is {usual:.4f}"
                )
        self._losses.append(loss)
        return said

    def left_out(self, what: str) -> str:
        """Count a step whose numbers were none; what is to be said. RunFailed where that is one too many."""
        self._in_a_row, self.skipped = self._in_a_row + 1, self.skipped + 1
        faults, said = self.faults, f"{what} ({self._in_a_row} in a row)"
        most = {"stop": 1, "skip": faults.nonfinite_in_a_row, "rollback": math.inf}[faults.on_nonfinite]
        if self._in_a_row >= most:
            raise RunFailed(
                f"{said}; nothing was saved after it: --resume auto goes on from the last checkpoint, or "
                "begins again where there is none; take a smaller learning rate, or "
                "faults.on_nonfinite=rollback, which goes on behind these data"
            )
        return f"left out: {said}"

    @property
    def must_go_back(self) -> bool:
        return self.faults.on_nonfinite == "rollback" and self._in_a_row >= self.faults.nonfinite_in_a_row

    def went_back(self, bad: int, back: int) -> None:
        """From a bad step to that of a checkpoint. RunFailed where that has not helped before."""
        self.rollbacks += 1
        self._times_back = self._times_back + 1 if back == self._back else 1
        self._in_a_row, self._back = 0, back
        if self._times_back > ROLLBACKS:
            raise RunFailed(f"step {bad} is bad after going back to step {back} {ROLLBACKS} times")


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
