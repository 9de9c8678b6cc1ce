"""What one rank of a step sends and holds, counted while the step runs, and its arithmetic left out.

A mode of torch's dispatcher sees every operation below autograd: of DeepSpeed, Megatron and FSDP2 too.
"""

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

LARGE = 2**16  # elements: smaller tensors are really computed
FLOATS = (torch.bfloat16, torch.float32)
UNTOUCHED = 2**22  # bytes: memory from the system is zero and costs nothing until it is touched

# operation of the process group: (kind, place of the tensor that is whole, place of the group)
COLLECTIVES = {
    "allreduce_": ("all_reduce", 0, 1),
    "_allgather_base_": ("all_gather", 0, 2),
    "allgather_": ("all_gather", 0, 2),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "reduce_scatter_": ("reduce_scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 2),
    "reduce_": ("reduce", 0, 1),
    "broadcast_": ("broadcast", 0, 1),
}


@dataclass
class Held:
    """A storage: bytes, and the moments (numbers of operations) at which it came and went."""

    bytes: int
    maker: str
    born: int
    died: int | None = None
    saved: bool = False  # by autograd, for the backward pass
    part: str = ""  # of memory, where it is known


class Counting(TorchDispatchMode):
    """As a context: `sent` counts collectives, `held` storages.

    Of large tensors only shapes are computed: their elements, and what follows from them, are zero, or
    what was there. Indices, masks and everything in float64 are real, whatever the size.

    sent   (kind, ranks of the group, whether of one element, maker) -> [calls, bytes]
    """

    def __init__(self):
        super().__init__()
        self.now = 0
        self.sent: dict[tuple, list[int]] = {}
        self.held: list[Held] = []
        self._alive: dict[int, Held] = {}
        self._outer = contextlib.ExitStack()

    def __enter__(self):
        self._outer.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept))
        self._outer.enter_context(_resizes(self._resize))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._outer.close()

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        named = named or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations come here
        self.now += 1
        if operation.namespace == "c10d":
            self._send(operation, arguments)
            return operation(*arguments, **named)
        result = _hollow(operation, arguments, named)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._see(tensor.untyped_storage())
        return result

    def _send(self, operation, arguments) -> None:
        name = operation._schema.name.partition("::")[2]
        if name == "barrier":
            return
        kind, whole, group = COLLECTIVES[name]
        tensors = [tensor for tensor in tree_leaves(arguments[whole]) if isinstance(tensor, Tensor)]
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arguments[group])))
        if len(ranks) > 1:
            size = sum(tensor.numel() for tensor in tensors)
            count = self.sent.setdefault((kind, ranks, _maker(), size == 1), [0, 0])
            count[0] += 1
            count[1] += sum(tensor.nbytes for tensor in tensors)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive or not storage.nbytes():
            return
        held = self._alive[key] = Held(storage.nbytes(), _maker(), self.now)
        self.held.append(held)
        weakref.finalize(storage, self._let_go, key)

    def _let_go(self, key: int) -> None:
        held = self._alive.pop(key, None)
        if held is not None:
            held.died = self.now

    def _resize(self, storage: torch.UntypedStorage) -> None:
        """FSDP2 empties storages and fills them again."""
        self._let_go(storage._cdata)
        self._see(storage)

    def _save(self, tensor: Tensor) -> Tensor:
        held = self._alive.get(tensor.untyped_storage()._cdata)
        if held is not None:
            held.saved = True
        return tensor

    def alive(self) -> list[Held]:
        return list(self._alive.values())

    def name(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Say what the storages of the tensors are, where nothing is said yet."""
        for tensor in tensors:
            held = self._alive.get(tensor.untyped_storage()._cdata)
            if held is not None:
                held.part = held.part or part

    def at_peak(self, since: int, until: int) -> list[Held]:
        """What was held when that was most, between two moments."""
        changes = Counter()
        for held in self.held:
            changes[max(held.born, since)] += held.bytes
            if held.died is not None:
                changes[max(held.died, since)] -= held.bytes
        now, most, peak = 0, 0, since
        for moment in sorted(changes):
            now += changes[moment]
            if now > most and moment <= until:
                most, peak = now, moment
        return [held for held in self.held if held.born <= peak and (held.died is None or held.died > peak)]


def _hollow(operation, arguments, named):
    """The result of an operation on large floats, without its arithmetic; of any other, the finite result."""
    if operation.is_view or operation._schema.name.startswith("aten::empty"):
        return _zeroed(operation(*arguments, **named), fresh=not operation.is_view)
    tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
    large = any(tensor.numel() >= LARGE and tensor.dtype in FLOATS for tensor in tensors)
    on_meta = str(named.get("device")) == "meta" or any(tensor.is_meta for tensor in tensors)
    if on_meta:
        return operation(*arguments, **named)
    if not large:
        return tree_map_only(Tensor, _finite, operation(*arguments, **named))
    if operation._schema.is_mutable:
        return _written(operation._schema, arguments, named)
    try:
        shapes = operation(*tree_map_only(Tensor, _shape_of, arguments), **_on_meta(named))
    except NotImplementedError:
        return operation(*arguments, **named)
    return tree_map_only(Tensor, _like, shapes)


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(named: dict) -> dict:
    named = tree_map_only(Tensor, _shape_of, named)
    return named | {"device": torch.device("meta")} if "device" in named else named


def _like(shape: Tensor) -> Tensor:
    return _zeroed(torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype), fresh=True)


def _zeroed(result, fresh: bool):
    """Stale numbers in memory that was used before would say what is masked."""
    if fresh and isinstance(result, Tensor) and not result.is_meta and result.nbytes <= UNTOUCHED:
        result.zero_()
    return result


def _finite(result: Tensor) -> Tensor:
    """Zeros of what was left out would be divided by, and DeepSpeed leaves out a step that is no number."""
    return result.nan_to_num_(0.0, 0.0, 0.0) if result.dtype in FLOATS and not result.is_meta else result


def _written(schema, arguments, named):
    """What an operation in place returns."""
    values = dict(zip((argument.name for argument in schema.arguments), arguments, strict=False)) | named
    written = [
        values[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in values
    ]
    if len(schema.returns) > 1:
        return tuple(written)
    return written[0] if schema.returns else None


MAKERS = {  # a piece of a path: who is at work
    "lomdm_dist/ops/masked_linear_ce": "loss",
    "lomdm_dist/model": "model",
    "lomdm_dist/parallel/grid": "grid",
    "lomdm_dist/parallel/optimizer": "norm",
    "lomdm_dist/train/optim": "average",
    "megatron/core": "model",
    "deepspeed/runtime": "engine",
    "torch/distributed/fsdp": "engine",
    "torch/optim": "update",
    "torch/autograd/graph": "backward",
}


def _maker() -> str:
    """Who of MAKERS is nearest among those that called."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        for piece, name in MAKERS.items():
            if piece in path:
                return name
        frame = frame.f_back
    return "step"


@contextlib.contextmanager
def _resizes(see):
    """Call see(storage) whenever one changes its size, which is no operation of the dispatcher's."""
    original = torch.UntypedStorage.resize_

    def resize(storage, size):
        result = original(storage, size)
        see(storage)
        return result

    torch.UntypedStorage.resize_ = resize
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original
