"""The training loop: counts, saves and reports. What a step is stands in `step.py`."""

import contextlib
import gc
import math
import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch

from lomdm_dist import machine
from lomdm_dist.config import Config
from lomdm_dist.data.reader import Rows
from lomdm_dist.data.shards import unpack
from lomdm_dist.errors import StoppedOnRequest, UserError
from lomdm_dist.evaluate.perplexity import estimate_bound
from lomdm_dist.model.flops import step_flops_a_sequence
from lomdm_dist.model.kernels import choose_kernels
from lomdm_dist.parallel.engine import Blueprint, start_engine
from lomdm_dist.parallel.grid import Grid, process_grid, rank, world_size
from lomdm_dist.parallel.optimizer import set_learning_rates
from lomdm_dist.study.plan import Plan, calibrate
from lomdm_dist.train.checkpoint import LATEST, DataFacts, Progress
from lomdm_dist.train.fit import fit, probe, wanted
from lomdm_dist.train.inputs import Inputs, open_inputs, run_lock
from lomdm_dist.train.metrics import Reporter, StepSums, memory_gib, step_metrics
from lomdm_dist.train.optim import WeightAverage, learning_rates, make_optimizer
from lomdm_dist.train.saver import Saver
from lomdm_dist.train.step import backpropagate, draw_noise

STUCK_SECONDS = 10  # for data, after which a stop does not wait for them


class StopRequest:
    """Asked by SIGTERM, SIGINT or SIGUSR1, or by the end of the launcher: finish the step, save, exit 75.

    Launchers differ in what they pass on. The one of deepspeed dies of a signal and leaves its
    workers running, unseen and unstopped; so does torchrun of SIGUSR1, and any of SIGKILL.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed")

    def __enter__(self):
        self._signalled = False
        self._before = {s: signal.signal(s, self._note) for s in self.SIGNALS}
        parents = psutil.Process().parents() if "LOCAL_RANK" in os.environ else []
        self._launchers = [p for p in parents if _is_launcher(p, self.LAUNCHERS)]
        return self

    def _note(self, *_):
        self._signalled = True

    @property
    def asked(self) -> bool:
        return self._signalled or not all(_alive(launcher) for launcher in self._launchers)

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _is_launcher(process: psutil.Process, names: tuple[str, ...]) -> bool:
    """A Python process with one of these names in its command; not the shell script that called it."""
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return Path(process.exe()).name.startswith("python") and any(name in command for name in names)
    return False


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def train(config: Config, resume: str | None = None, stop_after: int | None = None) -> dict:
    """Train to config.train.steps; returns a summary. `stop_after` stops as a signal would.

    Raises UserError before any process group starts, StoppedOnRequest after saving.
    """
    inputs = open_inputs(config, resume)
    start = inputs.resumed.progress.step if inputs.resumed else 0
    if start >= config.train.steps:
        if rank() == 0:
            print(f"{config.train.run} has done {start} steps of {config.train.steps}: nothing to do")
        return {"steps": start, "loss": None, "tokens": inputs.resumed.progress.tokens, "reused": True}
    if stop_after is not None and stop_after <= start:
        raise UserError(f"--stop-after {stop_after}: the run starts at step {start}; give a later one")
    # a signal that comes before the processes have joined ends this one at once: there is nothing to save
    tensor_parallel = config.parallel.tensor_parallel
    if tensor_parallel > 1 and config.parallel.engine == "deepspeed":
        # so that Megatron's collectives start before the computation that they overlap with
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with run_lock(config.train.run), process_grid(tensor_parallel) as grid, StopRequest() as stop:
        run = Run(config, inputs, grid)
        try:
            return run.train(stop, config.train.steps if stop_after is None else stop_after)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(run.say_shortage(run.progress.step, first_line(error))) from error
        finally:
            run.saver.close()  # what was begun is written
            run.batches.close()
            run.reporter.close()


class Run:
    """The parts of one training run, put together."""

    def __init__(self, config: Config, inputs: Inputs, grid: Grid):
        self.as_said, self.grid = config, grid
        plan = fit(config, grid) if wanted(config) else None
        config = self.config = plan.config if plan else config
        self.data, self.valid = inputs.train, inputs.valid
        self.accumulation = config.accumulation(grid.data_size)
        self.micro_batch, self.shortages = config.train.micro_batch, 0
        self.bad_shards: set[tuple[int, int]] = set()  # of any rank: source and number
        self.progress = inputs.resumed.progress if inputs.resumed else Progress()
        share = self.accumulation * config.train.micro_batch
        self.batches = self.data.stream(
            self.progress.sequences + grid.data_rank * share,
            config.train.global_batch,
            share,
            config.data.workers,
            grid.device,
            self._while_waiting,
        )
        if grid.first:
            config.save(config.train.run / "config.yaml")
        tokenizer = self.data.first.tokenizer_folder() if grid.first else None
        self.reporter = Reporter(config, self.progress.step, grid.first)

        blueprint = Blueprint(config, grid)
        self.parameters, self.kernels = blueprint.parameters, blueprint.kernels
        make = partial(make_optimizer, config=config.optim)
        self.engine = start_engine(blueprint, make, config, grid)
        if inputs.resumed:
            self.engine.fill(partial(inputs.resumed.load_weights, kind="raw"))
        else:
            self.engine.fill(partial(blueprint.draw, seed=config.train.seed))
        self.average = WeightAverage(self.engine.pieces, config.optim.ema_decay)
        if inputs.resumed:
            inputs.resumed.load_engine(self.engine, self.average)
        if plan:
            self._plan_again(plan)
        self.saver = Saver(self.config, self._data_facts(), tokenizer, grid, self.reporter.say)

    def _plan_again(self, plan: Plan) -> None:
        """After a try of the plan on the real device, where that has a speed and a memory of its own."""
        if self.grid.device.type == "cuda":
            config, micro = self.config, self.config.train.micro_batch
            some_token = int(config.model.mask_id == 0)
            x = torch.full((micro, config.model.length), some_token, device=self.grid.device)
            noise = draw_noise(config, 0, torch.arange(micro), self.grid.device)
            try:
                seconds, peak = probe(lambda: backpropagate(self.engine, x, None, noise, config, share=0.0))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise UserError(self.say_shortage(self.progress.step, first_line(error))) from None
            plan = fit(self.as_said, self.grid, plan, calibrate(plan, seconds * self.accumulation, peak))
            self.config = plan.config
            self.kernels = choose_kernels(self.engine.module, self.config, self.grid.device)
            self.micro_batch = self.config.train.micro_batch
            self.accumulation = self.config.accumulation(self.grid.data_size)
        for line in plan.lines():
            self.reporter.say(line)

    def train(self, stop: StopRequest, stop_after: int) -> dict:
        self.stop = stop
        train, reporter = self.config.train, self.reporter
        reporter.say(self._heading())
        self.clock, self.logged, self.unlogged = time.perf_counter(), self.progress, Counter()
        self.waited = 0.0  # for data, since the last line
        sums = {}
        while (step := self.progress.step) < train.steps:
            sums = self.step(step, stop)
            self._count(sums)
            done, last = step + 1, step + 1 == train.steps
            if done % train.log_every == 0 or last:
                self._log()
            aside = time.perf_counter()
            if train.valid_every and (last or done % train.valid_every == 0):
                self._validate()
            stopping = not last and (sums["asked"] > 0 or done == stop_after)
            if stopping or last or done % train.save_every == 0:
                self.save()
            self.clock += time.perf_counter() - aside  # the speed is that of training alone
            if stopping or last:
                self.saver.wait()
            if stopping:
                reporter.say(f"stopped on request after step {done}; continue with --resume auto")
                raise StoppedOnRequest
        loss = sums["bound"] / sums["tokens"]
        return {"steps": train.steps, "loss": loss, "tokens": self.progress.tokens, "reused": False}

    def step(self, step: int, stop: StopRequest) -> dict[str, float]:
        """One optimiser step over the global batch; returns sums over all ranks."""
        set_learning_rates(self.engine.optimizer, learning_rates(self.config.optim, step))
        rows = self._rows()
        sums = self._backpropagate(step, rows)
        self.gradient_norm = self.engine.step()
        self.average.update()
        sums.add({"asked": torch.tensor(stop.asked), "replaced": torch.tensor(rows.replaced)})
        return sums.reduced(self.grid)

    def _backpropagate(self, step: int, rows: Rows) -> StepSums:
        """The gradients of a step. If a rank runs out of memory, all begin again with smaller micro-batches.

        The noise (but for native dropout) is that of each sequence, so the result is the same.
        """
        while True:
            shortage = None
            try:
                sums = self._micro_batches(step, rows)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                shortage = first_line(error)
            if not self.engine.local:
                if shortage is None:
                    return sums
                raise UserError(self.say_shortage(step, shortage))  # others wait, in the middle of something
            if self.grid.all_agree(shortage is None):
                return sums
            self._shrink(step, shortage)

    def _micro_batches(self, step: int, rows: Rows) -> StepSums:
        config, micro, device = self.config, self.micro_batch, self.grid.device
        self._seed_native_dropout(step)
        self.engine.module.train()
        sums, count = StepSums(), len(rows.ids) // micro
        for k in range(count):
            first = self.grid.data_rank * len(rows.ids) + k * micro
            x, valid = unpack(rows.ids[k * micro : (k + 1) * micro], self.data.first.pad_id, device)
            noise = draw_noise(config, step, torch.arange(first, first + micro), device)
            sums.add(backpropagate(self.engine, x, valid, noise, config, 1 / count))
        return sums

    def _shrink(self, step: int, shortage: str | None) -> None:
        """Go on with the next smaller micro-batch."""
        short = [rank for rank, said in enumerate(self.grid.gather(shortage)) if said is not None]
        if self.micro_batch == 1:
            raise UserError(self.say_shortage(step, shortage or f"rank {short[0]} said so"))
        self.engine.drop()
        gc.collect()
        if self.grid.device.type == "cuda":
            torch.cuda.empty_cache()
        before, self.micro_batch = self.micro_batch, largest_divisor(self.micro_batch)
        self.shortages += 1
        self.reporter.say(
            f"out of memory in step {step + 1} on rank {', '.join(map(str, short))}: the step is done again "
            f"with micro-batch {self.micro_batch}, and so are the next; it was {before}"
        )

    def say_shortage(self, step: int, shortage: str) -> str:
        train = self.config.train
        ways = ["train.micro_batch=" + str(largest_divisor(self.micro_batch))] if self.micro_batch > 1 else []
        ways += ["train.two_samples=split"] if train.two_samples == "joint" else []
        ways += ["train.recompute=block"] if train.recompute != "block" else ["parallel.zero_stage=3"]
        return (
            f"rank {rank()} ran out of memory in step {step + 1} with micro-batch {self.micro_batch} "
            f"({shortage}): resume with {' or '.join(ways)}"
        )

    def _seed_native_dropout(self, step: int) -> None:
        """By step and rank, so that a resume on the same grid repeats it.

        Tensor-parallel ranks draw alike what all of them compute, and apart where each has its own tokens.
        """
        parallel, grid = self.config.parallel, self.grid
        shares_tokens = parallel.tensor_parallel > 1 and parallel.sequence_parallel
        place = (grid.data_rank, grid.tensor_rank if shares_tokens else 0)
        torch.manual_seed(hash((self.config.train.seed, step, *place)) % 2**63)

    def _count(self, sums: dict[str, float]) -> None:
        """Move on by one step, unless its numbers are not numbers."""
        done = self.progress.step + 1
        for name, value in (("loss", sums["bound"]), ("gradient norm", self.gradient_norm)):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the {name} of step {done} is {value}: nothing was saved after it; resume from "
                    f"{self.config.train.run}/{LATEST} with a smaller learning rate"
                )
        sequences = self.progress.sequences + self.config.train.global_batch
        self.progress = Progress(done, sequences, self.progress.tokens + round(sums["tokens"]))
        self.unlogged.update(sums)

    def _log(self) -> None:
        self._gather_bad_shards()
        now, steps = time.perf_counter(), self.progress.step - self.logged.step
        metrics = self._metrics(now - self.clock)
        self.reporter.report(metrics)
        self.reporter.progress(metrics, (now - self.clock) / steps, self.config.objective.samples == 2)
        self.clock, self.logged, self.unlogged, self.waited = now, self.progress, Counter(), 0.0

    def _rows(self) -> Rows:
        """This rank's part of the next global batch."""
        self.asked = time.perf_counter()
        rows = next(self.batches)
        self.waited += time.perf_counter() - self.asked
        self._say_messages()
        return rows

    def _say_messages(self) -> None:
        while self.data.messages:
            self.reporter.say(self.data.messages.pop(0))

    def _while_waiting(self) -> None:
        """Data that do not come must not hold up a stop. Only a run of one process can still save then."""
        self._say_messages()
        if self.stop.asked and time.perf_counter() - self.asked > STUCK_SECONDS:
            if alone := world_size() == 1:
                self.save()
            self.saver.wait()
            saved = "" if alone else "; nothing more was saved"
            self.reporter.say(
                f"stopped on request while waiting for data{saved}; continue with --resume auto"
            )
            raise StoppedOnRequest

    def _metrics(self, seconds: float) -> dict:
        """What is logged: means over the steps since the last log; grad_norm is the last step's."""
        config, steps = self.config, self.progress.step - self.logged.step
        rates = learning_rates(config.optim, self.progress.step - 1)
        flops = step_flops_a_sequence(config) * config.train.global_batch * steps
        peak = machine.peak_flops()
        return {
            "step": self.progress.step,
            **step_metrics(self.unlogged),
            "grad_norm": self.gradient_norm,
            "lr": rates[0],
            "lr_heads": rates[1],
            "tokens": self.progress.tokens,
            "sequences": self.progress.sequences,
            **self._data_metrics(),
            "tokens_per_second": (self.progress.tokens - self.logged.tokens) / seconds,
            "mfu": flops / seconds / (peak * world_size()) if peak else None,
            "seconds": seconds,
            "data_seconds": self.waited,
            "memory": memory_gib(),
            "micro_batch": self.micro_batch,
            "out_of_memory": self.shortages,
        }

    def _data_metrics(self) -> dict:
        """How often each source was gone through; where bad shards are left out, what that cost."""
        epochs = self.data.epochs(self.progress.sequences)
        names = ["epoch"] if len(epochs) == 1 else [f"epoch/{k}" for k in range(len(epochs))]
        metrics = dict(zip(names, epochs, strict=True))
        if self.config.data.on_bad_shard == "skip":
            metrics["replaced_sequences"] = round(self.unlogged["replaced"])
            metrics["bad_shards"] = len(self.bad_shards)
        return metrics

    def _gather_bad_shards(self) -> None:
        """What any rank has left out, the first one names, once."""
        if self.config.data.on_bad_shard == "skip":
            for sources in self.grid.gather([dict(bad) for bad in self.data.bad]):  # threads may add to them
                for source, bad in enumerate(sources):
                    for number in sorted(bad):
                        if (source, number) not in self.bad_shards:
                            self.bad_shards.add((source, number))
                            self.reporter.say(f"left out: {bad[number]}")

    def _validate(self) -> None:
        """The bound of the raw weights on the first validation sequences, shared out over the ranks."""
        self.engine.module.eval()
        count = min(len(self.valid), self.config.train.valid_sequences)
        batch = 4 * self.micro_batch  # nothing is kept for a backward pass
        bound = estimate_bound(
            self.engine, self.valid, self.config, np.arange(count), batch=batch, grid=self.grid
        )
        self.reporter.report({"step": self.progress.step, "valid_nll_per_token": bound["nll_per_token"]})
        self.reporter.say(f"step {self.progress.step}  validation {bound['nll_per_token']:.4f} nats a token")

    def save(self) -> None:
        self.saver.save(self.engine.pieces, self.average, self.progress)

    def _data_facts(self) -> DataFacts:
        return DataFacts(
            tokenizer=self.data.first.tokenizer,
            packing=self.data.first.manifest.packing,
            identity=self.data.identity(),
        )

    def _heading(self) -> str:
        train, objective = self.config.train, self.config.objective
        chosen = objective.model_dump(exclude={"name"}, exclude_defaults=True)
        kind = " ".join([objective.name, *(f"{key}={value}" for key, value in chosen.items())])
        return (
            f"{kind}, {self.parameters:,} parameters, {train.precision}, "
            f"{_engine_in_words(self.config)}, {self.grid.device.type} x {world_size()}; "
            f"global batch {train.global_batch} = {self.grid.data_size} ranks x {self.accumulation} "
            f"x micro-batch {train.micro_batch}; {self.kernels}; {len(self.data):,} sequences; "
            f"from step {self.progress.step}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # of the host; of CUDA, where another than torch's allocator asked; of cuBLAS
    texts = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return any(text in str(error) for text in texts)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def largest_divisor(number: int) -> int:
    """The largest that is smaller than the number."""
    return next(number // k for k in range(2, number + 1) if number % k == 0)


def _engine_in_words(config: Config) -> str:
    parallel = config.parallel
    words = [f"{'FSDP2, ' if parallel.engine == 'fsdp2' else ''}ZeRO {parallel.zero_stage}"]
    if parallel.shard_group:
        words.append(f"in groups of {parallel.shard_group}")
    if parallel.offload:
        words.append("with offload")
    if parallel.tensor_parallel > 1:
        words.append(f"x tensor parallel {parallel.tensor_parallel}")
        words.append("with sequence parallelism" if parallel.sequence_parallel else "alone")
    return " ".join(words)
