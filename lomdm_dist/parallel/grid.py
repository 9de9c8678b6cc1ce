"""The grid of processes: who am I, on which device, and which group do I reduce with.

Every launcher (deepspeed, torchrun, SLURM) tells a process its place through the same environment
variables; a process that was started plainly is a grid of one. Neighbouring ranks form a tensor-parallel
group and see the same data; ranks at the same place of those groups are data-parallel. The groups are
Megatron-core's.
"""

import contextlib
import json
import os
import socket
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lomdm_dist.errors import RunFailed, UserError, first_line

JOIN_SECONDS = 600.0  # for the processes to find each other
COLLECTIVE = timedelta(minutes=30)
NAMED = 4  # differences in an error
SAVE = timedelta(days=1)  # a disk may be slow; that a peer is lost is found in another way (watch.py)


def world_size() -> int:
    """Processes of this job, known before any process group starts. Raises UserError."""
    size = _place("WORLD_SIZE", 1)
    if not _place("RANK", 0) < size:
        raise UserError(
            f"the environment has WORLD_SIZE={size} and RANK={_place('RANK', 0)}: ranks go from 0 to "
            "WORLD_SIZE - 1"
        )
    return size


def rank() -> int:
    return _place("RANK", 0)


def place_on_machine() -> tuple[int, int]:
    """This process among those of its machine, and how many they are; (0, 1) where no launcher says."""
    size = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", ""))  # torchrun's, deepspeed's
    return (_place("LOCAL_RANK", 0), int(size)) if size.isdecimal() else (0, 1)


def _place(variable: str, alone: int) -> int:
    """What the launcher says of this process; UserError where it says half of it."""
    text = os.environ.get(variable, "")
    if text.isdecimal():
        return int(text)
    if text or "WORLD_SIZE" in os.environ:
        raise UserError(
            f"the environment has WORLD_SIZE={os.environ.get('WORLD_SIZE')} but {variable}="
            f"{text or 'nothing'}: start with torchrun or deepspeed, or unset WORLD_SIZE"
        )
    return alone


@dataclass(frozen=True)
class Grid:
    """This process's place. The data-parallel group is the one that gradients are averaged over."""

    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int
    device: torch.device
    mpu: object  # Megatron's groups, under the names DeepSpeed asks for
    saving: dist.ProcessGroup  # of all, on the CPU: checkpoints are written in the background
    agreeing: dist.ProcessGroup  # the same for the foreground, which must not meet that

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return self.mpu.get_tensor_model_parallel_group()

    @property
    def first(self) -> bool:
        """Whether this process prints and writes what is written once."""
        return rank() == 0

    def gather(self, value) -> list:
        """Everybody's value, in the order of the ranks, on every rank."""
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        return gathered

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the data-parallel ranks; a float64 vector on the CPU, in and out.

        Everyone gets the same bits, and tensor-parallel ranks have a say too: whether to stop is
        decided by such a sum.
        """
        values = values.to(self.device)
        dist.all_reduce(values)
        return values.cpu() / self.tensor_size

    def all_agree(self, good: bool) -> bool:
        """Whether it is good on every rank; no GPU is waited for."""
        of_all = torch.tensor(int(good))
        dist.all_reduce(of_all, dist.ReduceOp.MIN, group=self.agreeing)
        return bool(of_all)

    def data_mesh(self, shard_group: int | None) -> DeviceMesh:
        """The mesh of the data-parallel ranks; two-dimensional where only `shard_group` share one copy."""
        shards = shard_group or self.data_size
        shape = (self.data_size // shards, shards, self.tensor_size)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("copies", "shards", "tensor"))
        return mesh["shards"] if shards == self.data_size else mesh["copies", "shards"]


class _DeepSpeedNames:
    """Megatron's tensor- and data-parallel groups for DeepSpeed's `mpu` argument."""

    def __init__(self, state):
        self.get_model_parallel_rank = state.get_tensor_model_parallel_rank
        self.get_model_parallel_world_size = state.get_tensor_model_parallel_world_size
        self.get_model_parallel_group = state.get_tensor_model_parallel_group
        self.get_tensor_model_parallel_group = state.get_tensor_model_parallel_group
        self.get_tensor_model_parallel_rank = state.get_tensor_model_parallel_rank
        self.get_tensor_model_parallel_world_size = state.get_tensor_model_parallel_world_size
        self.get_data_parallel_rank = state.get_data_parallel_rank
        self.get_data_parallel_world_size = state.get_data_parallel_world_size
        self.get_data_parallel_group = state.get_data_parallel_group


def join(alike: dict, seconds: float = JOIN_SECONDS) -> dist.Store:
    """Meet the other processes of the job at its store, each with the same values of what is `alike`.

    alike: plain values by name. RunFailed where not all come in time; UserError, on all ranks, where one has
    other values, and before they meet where the place to meet at is none.
    """
    if "WORLD_SIZE" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    place, until = _meeting_place(), time.monotonic() + seconds
    try:
        if rank() > 0:
            _wait_for_the_first(place, until)
        store, *_ = next(dist.rendezvous("env://", timeout=_left(until)))
        store.set_timeout(timedelta(seconds=seconds))
        # torchrun's store outlives the processes that it starts again
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        if rank() == 0:
            store.set("alike", json.dumps(alike))
        if not (gone := _not_there(store, "here", "", _left(until))):
            _refuse_others(store, _differences(alike, json.loads(store.get("alike"))))
            return store
        why = f"not here: ranks {', '.join(map(str, gone))}"
    except (dist.DistError, OSError, UnicodeError) as error:
        why = first_line(error)
    address = f"{place[0]}:{place[1]}"
    if "EADDRINUSE" in why:
        raise RunFailed(f"the port of {address} is in use: end what holds it, or give another --master_port")
    raise RunFailed(
        f"the {world_size()} processes of this job did not find each other at {address} within {seconds:g} s "
        f"({why}): did one not start, or is a firewall in between? More time: faults.join_seconds"
    )


def _not_there(store: dist.Store, what: str, ours: str, timeout: timedelta) -> list[int]:
    """Say something of this rank, and wait until all have; the ranks that have not come so far."""
    store.set(f"{what}/{rank()}", ours)
    keys = [f"{what}/{number}" for number in range(world_size())]
    with contextlib.suppress(dist.DistError):
        store.wait(keys, timeout)
        return []
    return [number for number, key in enumerate(keys) if not store.check([key])]


def _meeting_place() -> tuple[str, int]:
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not (port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(
            f"the environment has WORLD_SIZE={world_size()} but MASTER_ADDR={host or 'nothing'} and "
            f"MASTER_PORT={port or 'nothing'}: give the host of the first rank, and a port of it; torchrun "
            "and deepspeed say both"
        )
    return host, int(port)


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(1.0, until - time.monotonic()))


def _wait_for_the_first(place: tuple[str, int], until: float) -> None:
    """torch's own way to wait for a store takes up to three times as long as it is told."""
    pause = 0.1
    while True:
        try:
            socket.create_connection(place, timeout=min(10.0, _left(until).total_seconds())).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(pause)
        pause = min(2.0, 1.5 * pause)  # thousands of ranks may ask


def _differences(ours: dict, theirs: dict) -> str:
    """In a few words, or none; `theirs` are of JSON."""
    ours = json.loads(json.dumps(ours))
    words = [
        f"{name} ({ours.get(name)}, there {theirs.get(name)})"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]
    return ", ".join(words[:NAMED]) + (", ..." if len(words) > NAMED else "")


def _refuse_others(store: dist.Store, ours: str) -> None:
    """UserError on all ranks where one differs from the first; it says how."""
    _not_there(store, "differs", ours, store.timeout)
    found = store.multi_get([f"differs/{number}" for number in range(world_size())])
    if words := next(filter(None, found), None):
        store.set(f"read/{rank()}", "")
        if rank() == 0:  # whose end may be that of the store
            with contextlib.suppress(dist.DistError):
                store.wait([f"read/{number}" for number in range(world_size())], timedelta(seconds=10))
        raise UserError(
            f"rank {found.index(words)} differs from rank 0 in {words.decode()}: all ranks need one command "
            "and one config (or does another job use this MASTER_PORT?)"
        )


@contextlib.contextmanager
def process_grid(tensor_parallel: int = 1, store: dist.Store | None = None, fake: bool = False):
    """Start the process group and Megatron's groups; end them on the way out, whatever happened.

    fake: all processes but this one are imagined, and collectives leave their tensors as they are.
    """
    # DeepSpeed and Megatron call torch's collectives by names that it will drop
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron says at import that Transformer Engine is absent
        from megatron.core import parallel_state

    on_gpu = torch.cuda.is_available() and not fake
    local_rank = _place("LOCAL_RANK", 0)
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    on_host = "fake" if fake else "gloo"
    dist.init_process_group(
        "nccl" if on_gpu else on_host,
        timeout=COLLECTIVE,
        store=store or join({}),
        rank=rank(),
        world_size=world_size(),
        device_id=device if on_gpu else None,
    )
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel, create_gloo_process_groups=False
        )
        names = _DeepSpeedNames(parallel_state)
        yield Grid(
            names.get_data_parallel_rank(),
            names.get_data_parallel_world_size(),
            names.get_tensor_model_parallel_rank(),
            names.get_tensor_model_parallel_world_size(),
            device,
            names,
            dist.new_group(backend=on_host, timeout=SAVE),
            dist.new_group(backend=on_host),
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
