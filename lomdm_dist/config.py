"""The configuration: one typed, frozen object.

Read from YAML, changed by `section.key=value`, saved with every run, checkpoint and export.
An unknown key is refused with the nearest known one, an impossible value with the arithmetic,
both before any process group starts.
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from lomdm_dist.errors import UserError
from lomdm_dist.files import write_atomically
from lomdm_dist.secrets import hide


def _no_bool(value):
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not true or false")
    return value


def _positive_or_auto(value):
    if value != "auto" and not (type(value) is int and 0 < value < 2**31):
        raise ValueError(f"a number of 1 or more is wanted, or auto, got {value!r}")
    return value


# of data; it may hold a secret, and is saved without
Address = Annotated[str, PlainSerializer(hide, when_used="json")]
Number = Annotated[float, BeforeValidator(_no_bool)]
Positive = Annotated[int, Field(gt=0, lt=2**31, strict=True)]
PositiveOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_positive_or_auto)]
NonNegative = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Rate = Annotated[Number, Field(gt=0, lt=1e3)]
Share = Annotated[Number, Field(ge=0, lt=1)]
SmallTime = Annotated[Number, Field(ge=1e-12, le=0.5)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _is_possible(self):
        if problems := "; ".join(self._problems()):
            raise ValueError(problems)
        return self

    def _problems(self) -> Iterator[str]:
        """What cannot be, one by one, with the arithmetic."""
        return iter(())


class ModelConfig(Section):
    """The DiT backbone of SEDD and MDLM; `condition_width` is the width of the adaLN condition.

    eos_id       ends a document; only `data.attend: document` needs it
    dropout_rng  keyed: masks are a function of seed, step, sequence, layer, position and channel, the same
                 on any grid; native: torch's own, which depend on the grid
    """

    vocab_size: Positive
    mask_id: NonNegative
    eos_id: NonNegative | None = None
    length: Positive
    width: Annotated[int, Field(gt=0, le=2**20, strict=True)]
    blocks: Annotated[Positive, Field(le=10_000)]
    heads: Positive
    condition_width: Positive = 128
    dropout: Share = 0.1
    dropout_rng: Literal["keyed", "native"] = "keyed"

    def _problems(self) -> Iterator[str]:
        if self.width % self.heads:
            yield f"width {self.width} is not divisible by heads {self.heads}"
        elif (self.width // self.heads) % 2:
            yield f"width / heads = {self.width // self.heads} is odd; rotary embedding needs it even"
        if not self.mask_id < self.vocab_size:
            yield f"mask_id {self.mask_id} is outside vocab_size {self.vocab_size}"
        if self.eos_id is not None and (self.eos_id >= self.vocab_size or self.eos_id == self.mask_id):
            yield f"eos_id {self.eos_id} is the mask_id, or outside vocab_size {self.vocab_size}"


class ObjectiveSection(Section):
    """What every objective answers; `samples`: masked ones of a text in a step."""

    samples: ClassVar[int]

    @property
    def pace(self) -> dict[str, float]:
        """c1 and c2, of learned exponents; empty where the order has none."""
        return {}

    def in_words(self) -> str:
        """The name, and what is not the default."""
        chosen = self.model_dump(exclude={"name"}, exclude_defaults=True)
        return " ".join([self.name, *(f"{key}={value}" for key, value in chosen.items())])


class Timed(ObjectiveSection):
    """How training draws its times. `uniform` cuts the bound at `time_eps`; `mixture` has no cut."""

    time: Literal["uniform", "mixture"] = "mixture"
    time_eps: SmallTime = 1e-3

    @field_validator("time", mode="before")
    @classmethod
    def _masks_are_plain(cls, time):
        if time == "pinned" and cls.samples == 2:
            raise ValueError("pinned is for fixed orders: the gradient of a learned one needs plain masks")
        return time


class LomdmObjective(Timed):
    """The learned order: heads phi and psi on the backbone's features, two masked samples.

    schedule       power: exponents c1 + c2 NORMALIZE(g); polynomial: MuLAN's (no c1, c2)
    normalize      norm_sig, or the paper's ablation softmax
    head           transformer: one more block and a linear layer; linear: that layer alone
    stop_gradient  whether the heads' gradients end at the backbone's features
    """

    name: Literal["lomdm"] = "lomdm"
    c1: Annotated[Number, Field(ge=0.01, le=100)] = 0.7  # beyond, u**(1/e) leaves float64's range
    c2: Annotated[Number, Field(ge=0, le=1000)] = 0.65
    schedule: Literal["power", "polynomial"] = "power"
    normalize: Literal["norm_sig", "softmax"] = "norm_sig"
    head: Literal["transformer", "linear"] = "transformer"
    stop_gradient: Annotated[bool, Field(strict=True)] = True
    samples: ClassVar[int] = 2

    def _problems(self) -> Iterator[str]:
        if self.normalize == "norm_sig" and not self.c1 > self.c2:
            yield f"c1 > c2 >= 0 keeps every exponent positive; c1 = {self.c1}, c2 = {self.c2}"

    @property
    def pace(self) -> dict[str, float]:
        return {"c1": self.c1, "c2": self.c2} if self.schedule == "power" else {}


class MdlmObjective(Timed):
    """Random order: every exponent 1, one masked sample. c1 and c2 may be said, as 1 and 0.

    time  `pinned` is the mixture with one position masked for certain, at the time that is its own:
          as exact, with less variance. A learned order cannot have it: its gradient needs plain masks.
    """

    name: Literal["mdlm"]
    time: Literal["uniform", "mixture", "pinned"] = "mixture"
    c1: Number = 1.0
    c2: Number = 0.0
    samples: ClassVar[int] = 1

    def _problems(self) -> Iterator[str]:
        if (self.c1, self.c2) != (1.0, 0.0):
            yield f"mdlm means c1 = 1 and c2 = 0, not c1 = {self.c1}, c2 = {self.c2}"


class GenMD4Objective(Timed):
    """One learned exponent a vocabulary entry, two masked samples."""

    name: Literal["genmd4"]
    samples: ClassVar[int] = 2


class WindowObjective(Timed):
    """A fixed order: each position, or block of positions, is generated in a time window of its own.

    time         `pinned` by default: with few positions a window, plain masks say little

    permutation  positions in the order of generation; where none is given, drawn from permutation_seed
    block        positions a block, for `blocks`; the last block may be shorter
    window_eps   share of a position's masking that lies outside its window; the bound is off by as much
    """

    name: Literal["window"]
    time: Literal["uniform", "mixture", "pinned"] = "pinned"
    order: Literal["left_to_right", "permutation", "blocks"] = "left_to_right"
    permutation: list[NonNegative] | None = None
    permutation_seed: NonNegative = 0
    block: Positive = 16
    window_eps: Annotated[Number, Field(ge=1e-12, lt=1)] = 1e-4
    samples: ClassVar[int] = 1

    def in_words(self) -> str:
        """Its order is said, default or not."""
        more = {"blocks": f" block={self.block}", "permutation": f" permutation_seed={self.permutation_seed}"}
        return f"window order={self.order}{more.get(self.order, '')} time={self.time}"

    def _problems(self) -> Iterator[str]:
        given = self.permutation
        for key, order in {
            "permutation": "permutation",
            "permutation_seed": "permutation",
            "block": "blocks",
        }.items():
            if self.order != order and getattr(self, key) != type(self).model_fields[key].default:
                yield f"{key} is for order {order}, but order is {self.order}"
        if given is not None and sorted(given) != list(range(len(given))):
            yield f"permutation does not hold each of 0 .. {len(given) - 1} once"


class ArObjective(ObjectiveSection):
    """The autoregressive baseline: causal attention, exact likelihood, no time and no masks."""

    name: Literal["ar"]
    samples: ClassVar[int] = 0


OBJECTIVES = {
    "lomdm": LomdmObjective,
    "mdlm": MdlmObjective,
    "genmd4": GenMD4Objective,
    "window": WindowObjective,
    "ar": ArObjective,
}


def _name_of_objective(values) -> str | None:
    """lomdm where none is said; None, which is an error, where it is no text."""
    name = values.get("name", "lomdm") if isinstance(values, dict) else getattr(values, "name", None)
    return name if isinstance(name, str) else None


Objective = Annotated[
    Annotated[LomdmObjective, Tag("lomdm")]
    | Annotated[MdlmObjective, Tag("mdlm")]
    | Annotated[GenMD4Objective, Tag("genmd4")]
    | Annotated[WindowObjective, Tag("window")]
    | Annotated[ArObjective, Tag("ar")],
    Discriminator(
        _name_of_objective,
        custom_error_type="objective",
        custom_error_message=f"objective is a section whose name is one of {', '.join(OBJECTIVES)}",
    ),
]


class Source(Section):
    """A source of a mixture; `weight` is its share of the sequences, relative to the others'."""

    path: Address
    weight: Annotated[Number, Field(gt=0, le=1e6)] = 1.0


def _sources(value):
    """Paths are sources of the same weight."""
    values = value if isinstance(value, list) else [value]
    return [{"path": each} if isinstance(each, str) else each for each in values]


class DataConfig(Section):
    """Token shards, written by `lomdm prepare`: folders, URLs, or `pipe:COMMAND` with {} for the file.

    train         one of these, or a list of them or of {path, weight}, mixed in exact proportion
    attend        sequence: all of it; document: a token sees its own document only (needs model.eos_id)
    workers       threads that read ahead; 0: none
    window        shards that are mixed at one time; without it all are. For remote shards
    on_bad_shard  error, or skip: other sequences take the place of a bad shard's, and are counted
    verify        checksum: each machine reads each shard once; size: trust all but names and sizes
    cache         of remote shards, and of what was verified; by default the user's cache folder
    """

    train: Annotated[list[Source], Field(min_length=1), BeforeValidator(_sources)]
    valid: Address
    attend: Literal["sequence", "document"] = "sequence"
    workers: Annotated[NonNegative, Field(le=64)] = 1
    window: Positive | None = None
    on_bad_shard: Literal["error", "skip"] = "error"
    verify: Literal["checksum", "size"] = "checksum"
    cache: Path | None = None
    cache_gib: Annotated[Number, Field(gt=0, le=1e6)] = 64.0


class OptimConfig(Section):
    """AdamW; linear warm-up to a constant rate; the scheduler heads have a rate of their own.

    heads_warmup_steps  by default warmup_steps. While the backbone knows single tokens only, there is no
                        order to learn, and heads that move at random slow it
    clip                the largest norm of the backbone's gradient, and of the heads': each by itself, for
                        the heads' REINFORCE gradient is often ten times as large, and would slow the backbone
    """

    learning_rate: Rate = 3e-4
    heads_learning_rate: Rate = 1e-5
    warmup_steps: NonNegative = 2500
    heads_warmup_steps: NonNegative | None = None
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Rate = 1e-8
    weight_decay: Annotated[Number, Field(ge=0, lt=1e3)] = 0.0
    clip: Rate = 1.0
    ema_decay: Share = 0.9999

    @property
    def heads_warmup(self) -> int:
        """Steps."""
        return self.warmup_steps if self.heads_warmup_steps is None else self.heads_warmup_steps


class ProfileConfig(Section):
    """Traces some steps, into RUN/profile, and says where their time went. A traced step is slower.

    steps           the first and the last, [20, 25], counted as the log counts them; by default none
    ranks           that record
    memory          allocations too: in the trace, and on GPUs as a snapshot of the allocator
    flops_profiler  DeepSpeed's, in the first of the steps
    comms_logger    DeepSpeed's, in all of them: it waits for each call, and does not see Megatron's
    """

    steps: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = None
    ranks: Annotated[list[NonNegative], Field(min_length=1)] = [0]
    memory: Annotated[bool, Field(strict=True)] = False
    flops_profiler: Annotated[bool, Field(strict=True)] = False
    comms_logger: Annotated[bool, Field(strict=True)] = False

    def _problems(self) -> Iterator[str]:
        if self.steps is None and self != type(self).model_construct():
            yield "nothing is recorded without steps: add train.profile.steps=[FIRST,LAST]"
        if self.steps and self.steps[0] > self.steps[1]:
            yield f"steps {self.steps} end before they begin; give [FIRST, LAST]"


class TrainConfig(Section):
    """`global_batch` counts sequences a step over all ranks; a LoMDM step masks each of them twice.

    start_from   a checkpoint whose averaged weights (ema) a new run starts with, at step 0, with a new
                 optimiser: of the same backbone, and of any objective; heads that it has not start fresh
    micro_batch  sequences of a rank at a time. Here and in the next two, `auto` is what the planner chooses
                 for the devices at hand
    two_samples  the two masked samples go through the network one after the other (`split`, half the
                 memory of activations) or side by side (`joint`)
    recompute    in the backward pass, instead of keeping it: of each block the attention, or all
    offload_activations  keep what the backward pass needs of each block in the memory of the host
    valid_every  steps between validations; 0: none. Each gives the bound, and of a learned order how A, hatA
                 and the network's confidence correlate (of the first 128 sequences): `order_...`
    keep_last   checkpoints to keep, and besides them for good those of every `keep_every` steps; 0: none
    """

    run: Path
    start_from: Path | None = None
    steps: Positive
    global_batch: Positive
    micro_batch: PositiveOrAuto
    two_samples: Literal["split", "joint", "auto"] = "split"
    recompute: Literal["none", "attention", "block", "auto"] = "none"
    offload_activations: Annotated[bool, Field(strict=True)] = False
    precision: Literal["bf16", "fp32"] = "bf16"
    seed: NonNegative = 0
    log_every: Positive = 10
    save_every: Positive = 1000
    keep_last: Positive = 2
    keep_every: NonNegative = 0
    valid_every: NonNegative = 0
    valid_sequences: Positive = 512
    profile: ProfileConfig = ProfileConfig()

    def _problems(self) -> Iterator[str]:
        if self.profile.steps and self.profile.steps[1] > self.steps:
            yield f"profile.steps {self.profile.steps} end after the training, which has {self.steps} steps"
        if self.keep_every % self.save_every:
            yield (
                f"keep_every {self.keep_every} is not a multiple of save_every {self.save_every}: some of "
                "those steps would never be saved"
            )
        if self.micro_batch != "auto" and self.global_batch % self.micro_batch:
            yield f"global_batch {self.global_batch} is not a multiple of micro_batch {self.micro_batch}"


class EvaluateConfig(Section):
    """How the bound is estimated. `uniform` cuts it at time_eps, as published numbers do; `mixture` is uncut.

    `pinned` is the mixture with one position masked for certain, at the time that is its own: the same
    mean with a far smaller standard error.

    below  what lies below time_eps, where time is uniform. drawn: it has draws of its own, and stands beside
           the cut number; guessed: the number holds an upper bound of it, ln(V - 1) for each token that is
           still masked there (MD4's reconstruction term)
    """

    time: Literal["uniform", "mixture", "pinned"] = "pinned"
    time_eps: SmallTime = 1e-3
    below: Literal["drawn", "guessed"] = "drawn"

    def _problems(self) -> Iterator[str]:
        if self.below == "guessed" and self.time != "uniform":
            yield f"below guessed is for time uniform, which has a cut; time is {self.time}"


class SamplerConfig(Section):
    """From masks to text.

    rule         random: the reverse process. The others reveal in each step as many positions, those where
                 the network is surest of a token (confidence), has the largest exponents (exponent; lomdm and
                 genmd4), or the first (left_to_right)
    grid         uniform: equal steps of time; even: each step reveals the same expected number
    final        whether the last step draws its tokens or takes the most probable ones
    dtype        of the noise; float32 cuts the distribution's tail, and exists to reproduce old tables
    top_p        tokens are drawn from the smallest set that holds this share of the probability
    temperature  logits are divided by it
    """

    rule: Literal["random", "confidence", "exponent", "left_to_right"] = "random"
    grid: Literal["uniform", "even"] = "uniform"
    final: Literal["draw", "argmax"] = "draw"
    dtype: Literal["float64", "float32"] = "float64"
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    temperature: Annotated[Number, Field(ge=1e-6, lt=1e3)] = 1.0

    def _problems(self) -> Iterator[str]:
        if self.rule != "random" and (self.grid, self.dtype) != ("uniform", "float64"):
            yield f"rule {self.rule} has no times to reveal at: leave grid and dtype as they are"


class ParallelConfig(Section):
    """How a model is spread over the ranks; none of it changes what is learned.

    engine             deepspeed: ZeRO 0 to 3; fsdp2: PyTorch's, ZeRO 2 or 3
    zero_stage         what the data-parallel ranks share out. 1: the optimiser's state; 2: gradients too;
                       3: parameters too. 1 where nothing is said, with fsdp2 3
    tensor_parallel    neighbouring ranks that split every layer; for models too large without
    sequence_parallel  with tensor_parallel > 1, also split what lies between the layers, by tokens
    shard_group        ranks, such as those of a node, that share one copy of what is sharded (hybrid
                       sharding); by default all do
    offload            the optimiser's state, and its work, in the memory of the host
    """

    engine: Literal["deepspeed", "fsdp2"] = "deepspeed"
    zero_stage: Annotated[int, Field(ge=0, le=3, strict=True)] = 1
    tensor_parallel: Positive = 1
    sequence_parallel: Annotated[bool, Field(strict=True)] = True
    shard_group: Positive | None = None
    offload: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="before")
    @classmethod
    def _stage_of_the_engine(cls, values):
        if isinstance(values, dict) and values.get("engine") == "fsdp2":
            return {"zero_stage": 3} | values
        return values

    def _problems(self) -> Iterator[str]:
        if self.engine == "fsdp2" and self.zero_stage < 2:
            yield (
                f"engine fsdp2 shards gradients and parameters, but zero_stage is {self.zero_stage}: "
                "add parallel.zero_stage=3 (or 2)"
            )
        if self.offload and self.zero_stage == 0:
            yield "offload is for zero_stage 1 to 3"
        if self.shard_group is not None and self.engine != "fsdp2":
            yield "shard_group is for engine fsdp2; DeepSpeed shards over all data-parallel ranks"


class KernelsConfig(Section):
    """How operations are computed. `auto` is what suits the device; the rest is for comparison.

    attention   flash_attn: the package; sdpa: PyTorch's choice of its own; plain: all scores in memory
    loss        fused: masked positions only, `loss_chunk` rows of logits at a time; plain: all logits, at
                every position
    compile     chains of pointwise operations as one kernel: by itself on GPUs
    """

    attention: Literal["auto", "flash_attn", "sdpa", "plain"] = "auto"
    loss: Literal["fused", "plain"] = "fused"
    loss_chunk: Positive | None = None
    compile: Literal["auto", "on", "off"] = "auto"


class FaultsConfig(Section):
    """What a run does when something goes wrong; all that is counted stands in the metrics.

    on_nonfinite        when a loss or a gradient is no number. skip: leave the update out, and stop after
                        `nonfinite_in_a_row` such steps; stop: at once; rollback: as skip, but then go on
                        from the last checkpoint, with the data after those of the bad steps
    on_failed_save      continue: training goes on, the next save may succeed; stop: end, with status 2
    join_seconds        for all processes to start and meet
    lost_seconds        a rank without a sign of life for so long is lost, and all end
    slow_factor         of a step that takes so many times the median, say what each rank did
    hang_factor, hang_seconds  a rank that stands still for so many times the median step, and at least so
                        long, ends the run; where each stands is written in RUN/stacks
    table_every         steps between tables of the slowest ranks; 0: none
    """

    on_nonfinite: Literal["skip", "stop", "rollback"] = "skip"
    nonfinite_in_a_row: Positive = 3
    on_failed_save: Literal["continue", "stop"] = "continue"
    join_seconds: Annotated[Number, Field(ge=1, le=1e5)] = 600.0
    lost_seconds: Annotated[Number, Field(ge=5, le=1e5)] = 30.0
    slow_factor: Annotated[Number, Field(gt=1, le=1e6)] = 5.0
    hang_factor: Annotated[Number, Field(gt=1, le=1e6)] = 30.0
    hang_seconds: Annotated[Number, Field(ge=1, le=1e6)] = 600.0
    table_every: NonNegative = 1000


class WandbConfig(Section):
    """`online` falls back to offline where there is no key. metrics.jsonl is written always."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    project: str = "lomdm_dist"
    name: str | None = None


class Config(Section):
    model: ModelConfig
    objective: Objective = LomdmObjective()
    data: DataConfig
    optim: OptimConfig = OptimConfig()
    train: TrainConfig
    evaluate: EvaluateConfig = EvaluateConfig()
    sampler: SamplerConfig = SamplerConfig()
    parallel: ParallelConfig = ParallelConfig()
    kernels: KernelsConfig = KernelsConfig()
    faults: FaultsConfig = FaultsConfig()
    wandb: WandbConfig = WandbConfig()

    def _problems(self) -> Iterator[str]:
        if self.train.precision == "bf16" and self.parallel.zero_stage == 0:
            yield (
                "train.precision bf16 needs the fp32 master weights that parallel.zero_stage 1 to 3 keep; "
                "use zero_stage 1, or precision fp32"
            )
        profile = self.train.profile
        if self.parallel.engine == "fsdp2" and (profile.flops_profiler or profile.comms_logger):
            yield (
                "train.profile.flops_profiler and comms_logger are DeepSpeed's, and parallel.engine is "
                "fsdp2: leave them out; the trace has what either engine computes and communicates"
            )
        parallel, model = self.parallel, self.model
        ranks = parallel.tensor_parallel
        if model.heads % ranks:
            yield (
                f"model.heads {model.heads} do not divide over parallel.tensor_parallel {ranks}: "
                f"{model.heads} / {ranks} = {model.heads / ranks:.3g}"
            )
        if ranks > 1 and parallel.sequence_parallel and model.length % ranks:
            yield (
                f"model.length {model.length} does not divide over parallel.tensor_parallel {ranks}, as "
                "parallel.sequence_parallel needs; set that to false"
            )
        if self.kernels.loss == "plain" and self.parallel.tensor_parallel > 1:
            yield "kernels.loss plain has no form for parallel.tensor_parallel > 1; use fused"
        weights = [source.weight for source in self.data.train]
        if min(weights) < 1e-6 * sum(weights):
            yield (
                f"data.train has the weight {min(weights):g} among {sum(weights):g} in all, less than a "
                "millionth: leave that source out"
            )
        if self.data.attend == "document" and self.model.eos_id is None:
            yield "data.attend document needs model.eos_id, which ends a document in the shards"
        objective, length = self.objective, self.model.length
        if not isinstance(objective, WindowObjective):
            return
        given = objective.permutation
        if given is not None and len(given) != length:
            yield f"objective.permutation has {len(given)} positions, model.length is {length}"
        if objective.order == "blocks" and objective.block > length:
            yield f"objective.block {objective.block} is larger than model.length {length}"

    def data_parallel(self, processes: int) -> int:
        """Ranks with data of their own. UserError where the processes do not form the grid."""
        tensor, shards = self.parallel.tensor_parallel, self.parallel.shard_group
        if processes % tensor:
            raise UserError(
                f"{processes} processes do not form groups of parallel.tensor_parallel {tensor}: "
                f"{processes} / {tensor} = {processes / tensor:.3g}"
            )
        ranks = processes // tensor
        if shards is not None and ranks % shards:
            raise UserError(
                f"{ranks} data-parallel ranks do not form groups of parallel.shard_group {shards}: "
                f"{ranks} / {shards} = {ranks / shards:.3g}"
            )
        return ranks

    def accumulation(self, data_parallel: int) -> int:
        """Micro-batches a rank runs in one step. UserError where the batch does not divide.

        While micro_batch is still `auto`, sequences a rank.
        """
        micro_batch = 1 if self.train.micro_batch == "auto" else self.train.micro_batch
        rows = data_parallel * micro_batch
        if self.train.global_batch % rows:
            raise UserError(
                f"train.global_batch {self.train.global_batch} does not divide over {data_parallel} "
                f"data-parallel ranks x train.micro_batch {micro_batch} = {rows}: "
                f"{self.train.global_batch} / {rows} = {self.train.global_batch / rows:.3g}; "
                "change one of the three"
            )
        return self.train.global_batch // rows

    @property
    def passes(self) -> tuple[int, int]:
        """How often a micro-batch goes through the network with gradients; how many samples at a time."""
        samples = max(1, self.objective.samples)
        return (1, samples) if self.train.two_samples == "joint" else (samples, 1)

    def value(self, key: str) -> Any:
        """What it says of `section.key`."""
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    def changed(self, values: dict[str, Any]) -> "Config":
        """With other values of some `section.key`: of the right kinds, for they are not checked."""
        sections = {}
        for key, value in values.items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        new = {s: getattr(self, s).model_copy(update=update) for s, update in sections.items()}
        return self.model_copy(update=new)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML and JSON; secrets in addresses are hidden."""
        return self.model_dump(mode="json")

    def alike(self) -> dict[str, Any]:
        """By `section.key`, what must not differ between ranks: all but where things lie."""
        keys = {
            f"{name}.{key}": value for name, part in self.as_dict().items() for key, value in part.items()
        }
        places = ("data.train", "data.valid", "data.cache", "train.run", "train.start_from")
        return {key: value for key, value in keys.items() if key not in places}

    def save(self, path: Path) -> None:
        write_atomically(path, yaml.safe_dump(self.as_dict(), sort_keys=False))


class _PlainYaml(yaml.SafeLoader):
    """YAML with numbers, true, false and null, and no surprises.

    In plain PyYAML 3e-4 is a string, 010 is eight, 1:30 is ninety, yes is true, 2024-01-02 is a
    date, and a key written twice silently overrides the first. Here the last is an error.
    """

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("null", r"~|null|", ["~", "n", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
):
    _PlainYaml.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )


def _read_yaml(text: str):
    """Raises ValueError with one line."""
    try:
        return yaml.load(text, Loader=_PlainYaml)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides. Raises UserError.

    `objective.name=NAME` with another name than the file's leaves the old objective's keys behind, but
    for how times are drawn.
    """
    return make_config(read_values(Path(path)), overrides, path)


def read_values(path: Path, kind: str = "config", keys: str = "model:, data:, train:") -> dict:
    """The plain values of a YAML file; a UserError names it as a `kind` that holds `keys`."""
    try:
        values = _read_yaml(path.read_text())
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"no {kind} file {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {kind} {path}: {error}") from None
    except ValueError as error:
        raise UserError(f"{kind} {path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{kind} {path} holds no sections ({keys}, ...)")
    return values


def make_config(values: dict, overrides: list[str] | tuple[str, ...], source: str | Path) -> Config:
    """A Config of plain values, changed by `overrides`; a UserError names `source`, where they are from."""
    _switch_objective(values, overrides)
    changed = [_apply(values, override) for override in overrides]
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_say_all(error.errors()))
        blamed = f" with {' '.join(changed)}" if changed else ""
        raise UserError(f"{source}{blamed}: {problems}") from None


def _switch_objective(values: dict, overrides: list[str] | tuple[str, ...]) -> None:
    section = values.get("objective")
    names = [o.removeprefix("objective.name=") for o in overrides if o.startswith("objective.name=")]
    if not isinstance(section, dict) or not names or names[-1] == section.get("name", "lomdm"):
        return
    kept = {"time", "time_eps"} & getattr(OBJECTIVES.get(names[-1]), "model_fields", {}).keys()
    values["objective"] = {key: value for key, value in section.items() if key in kept}


def _apply(values: dict, override: str) -> str:
    """Put an override into the values; returns it, to be named if it does not fit."""
    name, equals, text = override.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise UserError(f"override {override!r} is not of the form section.key=value")
    if not text.strip() and _is_text(name, text):
        raise UserError(f"override {override!r} is empty: is a variable not set?")
    try:
        value = text if _is_text(name, text) else _read_yaml(text)
    except ValueError:
        raise UserError(f"override {override!r}: the value is not valid YAML") from None
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise UserError(f"override {override!r}: {key} is a value, not a section")
    values[keys[-1]] = value
    return override


def keys_of(override: str) -> set[str]:
    """The keys that an override sets, `section={key: value}` too."""
    name, _, text = override.partition("=")
    value = _read_yaml(text) if "." not in name else None
    return {f"{name}.{key}" for key in value} if isinstance(value, dict) else {name}


def _say_all(problems: list[dict]) -> list[str]:
    """What pydantic found, in the project's words; keys of another objective in one."""
    foreign, said = {}, []
    for problem in problems:
        parts = [str(part) for part in problem["loc"]]
        objective = parts.pop(1) if parts[:1] == ["objective"] and len(parts) > 1 else None
        name = ".".join(parts)
        if problem["type"] == "extra_forbidden" and objective and name in _keys(Config):
            foreign.setdefault(objective, []).append(name)
        else:
            said.append(_say(problem, name))
    for objective, names in foreign.items():
        said.append(
            f"{' and '.join(names)} {'is no key' if len(names) == 1 else 'are no keys'} of {objective}; "
            f"'objective={{name: {objective}}}' replaces the whole section"
        )
    return said


def _say(problem: dict, name: str) -> str:
    if problem["type"] == "objective":
        given = problem["input"]
        return f"{problem['msg']}, got {given.get('name') if isinstance(given, dict) else given!r}"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, _keys(Config), 1, 0.5)
        return f"unknown key {name}" + (f"; did you mean {near[0]}?" if near else "")
    if problem["type"] == "missing":
        return f"{name} is missing"
    if problem["type"] == "model_type":
        return f"{name}: {{key: value, ...}} is wanted, got {problem['input']!r}"
    if problem["type"].startswith("bool"):
        return f"{name}: true or false is wanted, got {problem['input']!r}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _keys(section: type[Section], prefix: str = "") -> dict[str, Any]:
    """All keys, sections among them, with their types."""
    keys = {}
    for name, field in section.model_fields.items():
        keys[prefix + name] = field.annotation
        kinds = OBJECTIVES.values() if name == "objective" else [field.annotation]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Section):
                keys |= _keys(kind, f"{prefix}{name}.")
    return keys


# a path or a name on the command line is taken as it stands, "runs/a #1" and "123" among them
_TEXTS = {n for n, kind in _keys(Config).items() if kind in (str, Path, str | None, Path | None)}


def _is_text(name: str, text: str) -> bool:
    if name == "data.train":
        return not text.startswith("[")
    return name in _TEXTS and text != "null"
