"""The planner: how to train a model on so many GPUs, what that takes, and why so.

Every combination of micro-batch, split or joint, recomputation, ZeRO stage and tensor parallelism is
counted; the fastest that fits is chosen. On a device of unknown speed (a CPU) memory alone decides.
"""

import itertools
from dataclasses import dataclass, field, replace

import psutil
import torch

from lomdm_dist.config import Config
from lomdm_dist.errors import UserError
from lomdm_dist.machine import Device, known_gpu
from lomdm_dist.model.flops import step_flops_a_sequence
from lomdm_dist.model.kernels import loss_chunk
from lomdm_dist.study.memory import Parameters, memory
from lomdm_dist.study.roofline import Seconds, step_seconds

GIB = 2**30
USABLE, RESERVE_GIB = 0.92, 2.0  # of the memory: the rest is for fragments, the context and libraries
ALIKE = 1.03  # within 3% of the fastest the model of time cannot tell: the simplest of those is chosen
MOST_SEQUENCES = 64  # of a micro-batch, where speed is not known
NOTHING_FITS = "nothing fits"
CHOSEN = (
    "train.micro_batch",
    "train.two_samples",
    "train.recompute",
    "parallel.zero_stage",
    "parallel.tensor_parallel",
)


@dataclass(frozen=True)
class Calibration:
    """What a probe on the real device said: factors of the seconds of computation and of activations, and the
    seconds that reading a sequence takes."""

    compute: float = 1.0
    activations: float = 1.0
    data: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One way to train. `memory` in bytes; `seconds` None where the device's speed is not known."""

    config: Config
    gpus: int
    device: Device
    memory: dict[str, int]
    seconds: Seconds | None
    calibration: Calibration
    reasons: list[str] = field(default_factory=list)

    @property
    def total_gib(self) -> float:
        return sum(self.memory.values()) / GIB

    @property
    def fits(self) -> bool:
        return self.total_gib <= usable_gib(self.device)

    @property
    def choice(self) -> dict[str, int | str]:
        return {key: self.config.value(key) for key in CHOSEN}

    @property
    def data_parallel(self) -> int:
        return self.gpus // self.config.parallel.tensor_parallel

    def as_dict(self) -> dict:
        """The command's JSON fields."""
        seconds, train = self.seconds, self.config.train
        speed = mfu = None
        if seconds:
            speed = train.global_batch * self.config.model.length / seconds.step
            flops = step_flops_a_sequence(self.config) * train.global_batch
            mfu = flops / (seconds.step * self.gpus * self.device.peak_flops)
        parts = {name: size / GIB for name, size in self.memory.items()}
        return {
            "step_seconds": seconds and seconds.step,
            "tokens_per_second": speed,
            "tokens_per_second_per_gpu": speed and speed / self.gpus,
            "mfu": mfu,
            "seconds": seconds and vars(seconds),
            "memory_gib": parts | {"total": self.total_gib, "usable": usable_gib(self.device)},
            "choice": self.choice | {"kernels.loss_chunk": loss_chunk(self.config, self.device.type)},
            "accumulation": self.config.accumulation(self.data_parallel),
            "reasons": self.reasons,
        }

    def lines(self, given: list[str] | tuple = ()) -> list[str]:
        """For people; `given` are other overrides, which belong to the line that is there to paste."""
        result, seconds = self.as_dict(), self.seconds
        engine = self.config.parallel.engine
        lines = [
            f"{self.gpus} x {self.device.name}, {engine}:",
            f"  {' '.join([*given, _overrides(self.choice)])}",
            "",
        ]
        parts = [
            f"{name} {size:.2f}" for name, size in result["memory_gib"].items() if size and name != "usable"
        ]
        lines += [f"GiB a rank, of {usable_gib(self.device):.1f} to use:", f"  {', '.join(parts)}"]
        if seconds:
            lines += [
                f"step {seconds.step:.3f} s: compute {seconds.compute:.3f}, update {seconds.update:.3f}, "
                f"communication {seconds.communication:.3f} that compute does not hide",
                f"  limited by: {seconds.limit}",
                f"  {result['tokens_per_second']:,.0f} tokens/s, "
                f"{result['tokens_per_second_per_gpu']:,.0f} a GPU, MFU {result['mfu']:.1%}",
            ]
        return [*lines, "", "why:", *(f"  {reason}" for reason in self.reasons)]


def usable_gib(device: Device) -> float:
    return USABLE * device.memory_gib - RESERVE_GIB if device.peak_flops else device.memory_gib


def device_here(processes: int = 1) -> Device:
    """The device of this process, with the memory that is free; on a CPU shared by so many processes."""
    if not torch.cuda.is_available():
        return Device("cpu", psutil.virtual_memory().available / processes / GIB)
    name, (free, _) = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
    known = known_gpu(name)
    about = vars(known) if known else {}
    return Device(**about | {"name": known.name if known else name, "memory_gib": free / GIB})


def plan(
    config: Config,
    gpus: int,
    device: Device,
    calibration: Calibration | None = None,
    fixed: tuple[str, ...] = (),
) -> Plan:
    """The fastest plan that fits; keys of CHOSEN in `fixed` stay as the config says.

    Raises UserError, with the arithmetic, where none fits.
    """
    return choose(candidates(config, gpus, device, calibration, fixed), fixed)


def candidates(
    config: Config,
    gpus: int,
    device: Device,
    calibration: Calibration | None = None,
    fixed: tuple[str, ...] = (),
) -> list[Plan]:
    """All plans that divide, whether they fit or not. Raises UserError where there is none."""
    _check(config)
    plans = _plans(config, gpus, device, calibration or Calibration(), fixed)
    if not plans:
        if fixed or config.parallel.shard_group:
            config.accumulation(config.data_parallel(gpus))  # says so where that is why
        raise UserError(_batch_does_not_divide(config, gpus))
    return plans


def choose(plans: list[Plan], fixed: tuple[str, ...] = ()) -> Plan:
    """The fastest of those that fit. Raises UserError, with the arithmetic, where none does."""
    fitting = [p for p in plans if p.fits]
    if not fitting:
        raise UserError(_nothing_fits(min(plans, key=lambda p: p.total_gib)))
    best = min(fitting, key=_rank)
    if best.seconds:
        fast_enough = [p for p in fitting if p.seconds.step <= ALIKE * best.seconds.step]
        best = min(fast_enough, key=lambda p: (*_effort(p), *_rank(p)))
    best.reasons.extend(_reasons(best, plans, fixed))
    return best


def calibrate(plan: Plan, measured_seconds: float, measured_bytes: int) -> Calibration:
    """From a probe: the seconds of a step under this plan, and the largest memory of a rank in it."""
    seconds, parts = plan.seconds, plan.memory
    scaled = parts["activations"] / plan.calibration.activations
    rest = sum(parts.values()) - parts["activations"]
    activations = max(0.1, (measured_bytes - rest) / scaled)
    if seconds is None:
        return replace(plan.calibration, activations=activations)
    computed = seconds.compute / plan.calibration.compute
    compute = max(0.1, (measured_seconds - seconds.step + seconds.compute) / computed)
    return Calibration(compute, activations, plan.calibration.data)


_INSTEAD = "; in training, give train.micro_batch, two_samples and recompute instead of auto"


def _check(config: Config) -> None:
    """What is not modelled. UserError."""
    for key, usual in {
        "kernels.loss": "fused",
        "parallel.offload": False,
        "train.offload_activations": False,
    }.items():
        if config.value(key) != usual:
            raise UserError(f"the planner knows {key}={str(usual).lower()} only{_INSTEAD}")
    if config.kernels.attention == "plain":
        raise UserError(f"the planner does not know kernels.attention=plain{_INSTEAD}")


def wanted(config: Config) -> list[str]:
    """The keys that are left to the planner."""
    return [key for key in CHOSEN if config.value(key) == "auto"]


def _plans(config: Config, gpus: int, device: Device, calibration: Calibration, fixed) -> list[Plan]:
    """All that divide."""
    parameters, plans = Parameters(config), []
    two_samples = ["joint", "split"]
    if config.objective.samples != 2:  # then they are the same
        two_samples = ["split" if config.train.two_samples == "auto" else config.train.two_samples]
    for tensor in _tensor_parallel(config, gpus, device, fixed):
        data = gpus // tensor
        if config.train.global_batch % data or data % (config.parallel.shard_group or 1):
            continue
        here = config.train.global_batch // data
        options = {
            "train.micro_batch": [m for m in range(1, here + 1) if here % m == 0],
            "train.two_samples": two_samples,
            "train.recompute": ["none", "attention", "block"],
            "parallel.zero_stage": _stages(config),
            "parallel.tensor_parallel": [tensor],
        }
        for key in fixed:
            options[key] = [value for value in options[key] if value == config.value(key)]
        for values in itertools.product(*options.values()):
            candidate = config.changed(dict(zip(options, values, strict=True)))
            plans.append(_count(candidate, parameters, gpus, device, calibration))
    return plans


def _stages(config: Config) -> list[int]:
    if config.parallel.engine == "fsdp2":
        return [2, 3]
    return [1, 2, 3] if config.train.precision == "bf16" else [0, 1, 2, 3]


def _tensor_parallel(config: Config, gpus: int, device: Device, fixed) -> list[int]:
    """Powers of two that divide GPUs and heads, inside a node."""
    if "parallel.tensor_parallel" in fixed:
        return [t for t in [config.parallel.tensor_parallel] if gpus % t == 0]
    fits = [2**k for k in range(10) if 2**k <= min(gpus, device.a_node, 8)]
    model, shared = config.model, config.parallel.sequence_parallel
    return [t for t in fits if gpus % t == model.heads % t == 0 and not (shared and model.length % t)]


def _count(config: Config, parameters: Parameters, gpus: int, device: Device, calibration) -> Plan:
    data = gpus // config.parallel.tensor_parallel
    parts = memory(config, parameters, device, data)
    parts["activations"] = round(parts["activations"] * calibration.activations)
    seconds = None
    if device.peak_flops:
        seconds = step_seconds(config, parameters, device, data, calibration.compute, calibration.data)
    return Plan(config, gpus, device, parts, seconds, calibration)


def _effort(plan: Plan) -> tuple[int, int, int]:
    """What a plan asks of communication and of repeated work, whatever the speed."""
    train, parallel = plan.config.train, plan.config.parallel
    return (
        parallel.tensor_parallel,
        parallel.zero_stage,
        ["none", "attention", "block"].index(train.recompute),
    )


def _rank(plan: Plan) -> tuple:
    """Smallest first. Equal in time: what takes less memory."""
    if plan.seconds:
        return plan.seconds.step, plan.total_gib
    micro = plan.config.train.micro_batch
    return *_effort(plan), -min(micro, MOST_SEQUENCES), micro, plan.config.train.two_samples


def _reasons(best: Plan, plans: list[Plan], fixed: tuple[str, ...]) -> list[str]:
    """A sentence a choice: what else there was, and what it would need or cost."""
    reasons = []
    for key, value in best.choice.items():
        name = key.partition(".")[2]
        if key in fixed:
            reasons.append(f"{name} {value}: as you say")
            continue
        others = {}
        for other in plans:
            if other.choice[key] != value:
                others.setdefault(other.choice[key], []).append(other)
        said = undivided(best, plans) if key == "parallel.tensor_parallel" else []
        if key == "train.micro_batch":
            others = _neighbours(best, others)
            if value == best.config.train.global_batch // best.data_parallel:
                said = ["all that a rank has"]
        said += [f"{v}{_compared(_nearest(best, those), best, key)}" for v, those in others.items()]
        reasons.append(f"{name} {value}: " + ("; ".join(said) if said else "there is no other"))
    chunk = loss_chunk(best.config, best.device.type)
    reasons.append(
        f"loss_chunk {chunk:,}: rows of logits at a time, or all there are; more would save little time"
    )
    return reasons


def undivided(best: Plan, plans: list[Plan]) -> list[str]:
    """Smaller tensor_parallel than the best's over whose ranks the batch does not divide."""
    tried = {plan.config.parallel.tensor_parallel for plan in plans}
    less = [2**k for k in range(4) if 2**k < best.config.parallel.tensor_parallel and 2**k not in tried]
    batch = best.config.train.global_batch
    return [f"{t} leaves {best.gpus // t} ranks, and global_batch {batch} does not divide" for t in less]


def _neighbours(best: Plan, others: dict[int, list[Plan]]) -> dict[int, list[Plan]]:
    """The plans of the next smaller and the next larger micro-batch on the same grid."""
    grid, micro = best.config.parallel.tensor_parallel, best.config.train.micro_batch
    same = {m: [p for p in those if p.config.parallel.tensor_parallel == grid] for m, those in others.items()}
    sizes = [m for m, those in same.items() if those]
    near = [*sorted(m for m in sizes if m < micro)[-1:], *sorted(m for m in sizes if m > micro)[:1]]
    return {m: same[m] for m in near}


def _nearest(best: Plan, others: list[Plan]) -> Plan:
    """With all else as in the best plan, if there is such; else the fastest that fits, or the smallest."""
    unlike = [sum(p.choice[key] != best.choice[key] for key in CHOSEN) for p in others]
    if 1 in unlike:
        return others[unlike.index(1)]
    fitting = [p for p in others if p.fits]
    return min(fitting, key=_rank) if fitting else min(others, key=lambda p: p.total_gib)


def _compared(other: Plan, best: Plan, key: str) -> str:
    gib = f"{other.total_gib:.1f} GiB"
    more = {k: v for k, v in other.choice.items() if k != key and v != best.choice[k]}
    beside = f" ({_overrides(more)})" if more else ""
    if not other.fits:
        return f"{beside} needs {gib} of {usable_gib(other.device):.1f}"
    if not best.seconds:
        return f"{beside} would take {gib} for {best.total_gib:.1f}"
    longer = other.seconds.step / best.seconds.step - 1
    longer = 0.0 if abs(longer) < 5e-4 else longer
    time = f"{longer:.1%} more time" if longer >= 0 else f"{-longer:.1%} less time, too little to tell"
    return f"{beside} would take {time}, and {gib} for {best.total_gib:.1f}"


def _overrides(choice: dict) -> str:
    return " ".join(f"{key}={value}" for key, value in choice.items())


def _nothing_fits(smallest: Plan) -> str:
    parts = " + ".join(f"{name} {size / GIB:.1f}" for name, size in smallest.memory.items() if size)
    device = smallest.device
    return (
        f"{NOTHING_FITS} {smallest.gpus} x {device.name}: the smallest plan, {_overrides(smallest.choice)}, "
        f"needs {smallest.total_gib:.1f} GiB a GPU = {parts}; there are "
        f"{usable_gib(device):.1f} = {USABLE} x {device.memory_gib:.1f} - {RESERVE_GIB:g}"
    )


def _batch_does_not_divide(config: Config, gpus: int) -> str:
    batch = config.train.global_batch
    return (
        f"train.global_batch {batch} does not divide over {gpus} GPUs with any parallel.tensor_parallel that "
        f"divides {config.model.heads} heads: {batch} / {gpus} = {batch / gpus:.3g}; "
        f"train.global_batch={-(-batch // gpus) * gpus} does"
    )
