"""The training loop: counts, saves and reports. What a step is stands in `step.py`."""

import contextlib
import gc
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from lomdm_dist import machine
from lomdm_dist.config import Config
from lomdm_dist.data.reader import Rows
from lomdm_dist.errors import RunFailed, StoppedOnRequest, UserError, first_line
from lomdm_dist.evaluate.order import correlations
from lomdm_dist.evaluate.perplexity import estimate_bound
from lomdm_dist.model.flops import step_flops_a_sequence
from lomdm_dist.model.kernels import choose_kernels
from lomdm_dist.ops.phase import phase
from lomdm_dist.parallel.engine import Blueprint, start_engine
from lomdm_dist.parallel.grid import Grid, join, process_grid, rank, world_size
from lomdm_dist.parallel.layout import Piece
from lomdm_dist.parallel.watch import DATA, PASSES, SAVING, UPDATE, VALIDATION, Watch
from lomdm_dist.secrets import say
from lomdm_dist.study.plan import Plan, calibrate, wanted
from lomdm_dist.train.auto import fit, probe
from lomdm_dist.train.bad_steps import (
    Found,
    Health,
    describe,
    first_bad_gradient,
    first_bad_weight,
    write_down,
)
from lomdm_dist.train.checkpoint import LATEST, Checkpoint, DataFacts, Progress, parameter_shapes
from lomdm_dist.train.gradients import StepSums, add_gradients
from lomdm_dist.train.inputs import Inputs, check_together, open_inputs, parts_of, run_lock
from lomdm_dist.train.metrics import Reporter, Stopwatch, probe_speed, step_metrics
from lomdm_dist.train.optim import WeightAverage, learning_rates, make_optimizer, set_learning_rates
from lomdm_dist.train.profile import Profile, check_ranks
from lomdm_dist.train.saver import Saver
from lomdm_dist.train.step import backpropagate, draw_noise
from lomdm_dist.train.stop import StopRequest

STUCK_SECONDS = 10  # for data, after which a stop does not wait for them
ORDER_SEQUENCES = 128  # of the validation, for the correlations of a learned order


def train(config: Config, resume: str | None = None, stop_after: int | None = None) -> dict:
    """Train to config.train.steps; returns a summary. `stop_after` stops as RUN/stop would.

    Raises UserError before any process group starts, StoppedOnRequest after saving.
    """
    check_ranks(config, world_size())
    inputs = open_inputs(config, resume)
    start = inputs.resumed.progress.step if inputs.resumed else 0
    if start >= config.train.steps:
        if rank() == 0:
            print(f"{config.train.run} has done {start} steps of {config.train.steps}: nothing to do")
        return {"steps": start, "loss": None, "tokens": inputs.resumed.progress.tokens, "reused": True}
    if stop_after is not None and stop_after <= start:
        raise UserError(f"--stop-after {stop_after}: the run starts at step {start}; give a later one")
    resumes = resume if resume in (None, "auto") else "a checkpoint"  # which may lie elsewhere, too
    with running(config, inputs, {"--resume": resumes, "--stop-after": stop_after}) as run:
        return run.train(config.train.steps if stop_after is None else stop_after)


@contextlib.contextmanager
def running(config: Config, inputs: Inputs, options: dict) -> Iterator["Run"]:
    """A run, all its processes joined; what was begun is written before it is left, whatever happened."""
    tensor_parallel = config.parallel.tensor_parallel
    if tensor_parallel > 1 and config.parallel.engine == "deepspeed":
        # so that Megatron's collectives start before the computation that they overlap with
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # A signal that comes before the processes have met ends this one at once: there is nothing to save. One
    # that a launcher sends because a rank is lost must not keep the watch from naming it.
    with (
        run_lock(config.train.run),
        contextlib.nullcontext(join(config.alike() | options, config.faults.join_seconds)) as store,
        StopRequest(config.train.run) as stop,
        Watch(store, config.faults, config.train.run) as watch,
        process_grid(tensor_parallel, store) as grid,
    ):
        run = _build(config, inputs, grid, stop, watch)
        try:
            with shortage_as(lambda why: run.say_shortage(run.progress.step, why)):
                yield run
        finally:
            run.saver.close()
            run.batches.close()
            run.reporter.close()


def _build(config: Config, inputs: Inputs, grid: Grid, stop: StopRequest, watch: Watch) -> "Run":
    deeper = config.parallel.zero_stage < 3 and grid.data_size > 1
    ways = ["parallel.zero_stage=3"] if deeper else []
    ways += ["parallel.tensor_parallel or more devices", "a smaller model"]
    said = f"{' or '.join(ways)} make it fit; lomdm plan says what each needs"
    built = f"rank {rank()} ran out of memory while the model was built"
    with shortage_as(lambda why: f"{built} ({why}): {said}"):
        return Run(config, inputs, grid, stop, watch)


@contextlib.contextmanager
def shortage_as(words: Callable[[str], str]):
    """Where memory runs out, a UserError of these words about the reason."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(words(first_line(error))) from error


class Run:
    """The parts of one training run, put together."""

    def __init__(self, config: Config, inputs: Inputs, grid: Grid, stop: StopRequest, watch: Watch):
        self.as_said, self.grid, self.stop, self.watch = config, grid, stop, watch
        self._all_fail(lambda: check_together(inputs, config.train.run, grid))
        plan = fit(config, grid) if wanted(config) else None
        config = self.config = plan.config if plan else config
        self.data, self.valid = inputs.train, inputs.valid
        self.accumulation = config.accumulation(grid.data_size)
        self.micro_batch, self.shortages = config.train.micro_batch, 0
        self.health = Health(config.faults)
        self.bad_shards: set[tuple[int, int]] = set()  # of any rank: source and number
        self.progress = inputs.resumed.progress if inputs.resumed else Progress()
        self.start = inputs.start
        self.share = self.accumulation * config.train.micro_batch  # sequences of this rank in a step
        self.batches = self._stream()

        blueprint = Blueprint(config, grid)
        self.parameters, self.kernels = blueprint.parameters, blueprint.kernels
        self.engine = start_engine(blueprint, make_optimizer)
        if inputs.resumed:
            self.engine.fill(partial(inputs.resumed.load_weights, kind="raw"))
        else:
            self.engine.fill(partial(self._new_weights, blueprint))
        self.average = WeightAverage(self.engine.pieces, config.optim.ema_decay)
        if inputs.resumed:
            inputs.resumed.load_engine(self.engine, self.average)
        if plan:
            plan = self._plan_again(plan)
        if grid.first:
            self.config.save(self.config.train.run / "config.yaml")
        self.reporter = Reporter(self.config, self.progress.step, grid.first)
        for line in plan.lines() if plan else []:
            self.reporter.say(line)
        self.profile = Profile(self.config, self.engine, grid, watch, self.share)
        tokenizer = self.data.first.tokenizer_folder() if grid.first else None
        self.saver = Saver(self.config, self._data_facts(), tokenizer, grid, self.reporter.say)

    def _new_weights(self, blueprint: Blueprint, pieces: list[Piece]) -> None:
        """Those of the seed, but for what `train.start_from` has."""
        blueprint.draw(pieces, self.config.train.seed)
        if self.start is not None:
            known = self.start.shapes()
            self.start.load_weights([piece for piece in pieces if piece.name in known], kind="ema")
            if bad := first_bad_weight(pieces):
                raise UserError(
                    f"train.start_from: {bad} of {self.start.folder} holds a number that is not finite"
                )

    def _stream(self) -> Iterator[Rows]:
        """This rank's part of each global batch from here on."""
        return self.data.stream(
            self._position,
            self.config.train.global_batch,
            self.share,
            self.config.data.workers,
            self.grid.device,
            self._while_waiting,
        )

    @property
    def _position(self) -> int:
        """In the order of the data, of this rank's part of the next global batch."""
        return self.progress.sequences + self.grid.data_rank * self.share

    def _plan_again(self, plan: Plan) -> Plan:
        """After a try of the plan on the real device, where that has a speed and a memory of its own."""
        if self.grid.device.type == "cuda":
            config, micro = self.config, self.config.train.micro_batch
            some_token = int(config.model.mask_id == 0)
            x = torch.full((micro, config.model.length), some_token, device=self.grid.device)
            noise = draw_noise(config, 0, torch.arange(micro), self.grid.device)
            with shortage_as(lambda why: self.say_shortage(self.progress.step, why)):
                seconds, peak = probe(lambda: backpropagate(self.engine, x, None, noise, config, share=0.0))
            plan = fit(self.as_said, self.grid, plan, calibrate(plan, seconds * self.accumulation, peak))
            self.config = plan.config
            self.kernels = choose_kernels(self.engine.module, self.config, self.grid.device)
            self.micro_batch = self.config.train.micro_batch
            self.accumulation = self.config.accumulation(self.grid.data_size)
        return plan

    def train(self, stop_after: int) -> dict:
        train, reporter = self.config.train, self.reporter
        reporter.say(self._heading())
        self._forget()
        while self.progress.step < train.steps:
            with self.profile.step(self.progress.step + 1):
                good, sums = self.step(self.progress.step)
            self.clock += self.profile.seconds_aside()
            if not good and self._roll_back_if_due():
                continue
            done, last = self.progress.step, self.progress.step == train.steps
            unsaved = sums["unsaved"] > 0 and self.config.faults.on_failed_save == "stop"
            stopping = not last and (sums["asked"] > 0 or done == stop_after) and not unsaved
            if done % train.log_every == 0 or last or stopping:
                self._log()
            aside = time.perf_counter()
            if train.valid_every and (last or done % train.valid_every == 0):
                self._validate()
            if stopping or last or (done % train.save_every == 0 and good and not unsaved):
                self.save(goes_on=not (stopping or last))
            self.clock += time.perf_counter() - aside  # the speed is that of training alone
            if stopping or last or unsaved:
                self.profile.close()
                self._end_together()
            if stopping:
                reporter.say(f"stopped on request after step {done}; continue with --resume auto")
                raise StoppedOnRequest(for_good=sums["for_good"] > 0 or done == stop_after)
        tokens = self.progress.tokens
        return {"steps": train.steps, "loss": self.health.loss, "tokens": tokens, "reused": False}

    def _forget(self) -> None:
        """Begin to count for the next line anew."""
        self.clock, self.logged, self.unlogged = time.perf_counter(), self.progress, Counter()
        self.waited, self.worked = 0.0, 0.0  # seconds for data, and for this rank's own computation

    def _end_together(self) -> None:
        """What was begun is written, or a UserError says why not; on all ranks."""
        self.watch.at(self.progress.step, SAVING)
        self._all_fail(self.saver.wait)
        self.watch.finish()

    def _all_fail(self, work: Callable):
        """Do what fails on all ranks or on none: no rank is then lost to the others."""
        try:
            return work()
        except (UserError, RunFailed):
            self.watch.finish()
            raise

    def step(self, step: int) -> tuple[bool, dict[str, float]]:
        """One optimiser step over the global batch: whether its numbers are some, and sums over all ranks."""
        start, waited = time.perf_counter(), self.waited
        set_learning_rates(self.engine.optimizer, self.config.optim, step)
        self.watch.at(step + 1, DATA)
        rows = self._rows()
        self.watch.at(step + 1, PASSES)
        computing = Stopwatch(self.grid.device)
        sums = self._backpropagate(step, rows)
        work = computing.stop() if self.engine.local else None  # else it has waited for others
        asked = {"asked": self.stop.asked, "for_good": self.stop.for_good}
        asked |= {"unsaved": self.saver.failed, "replaced": rows.replaced}
        sums.add({name: torch.tensor(value) for name, value in asked.items()})
        own, sums = sums.own("bound"), sums.reduced(self.grid)
        self.watch.at(step + 1, UPDATE)
        self.gradient_norms = self.engine.step(math.isfinite(sums["bound"]))
        good = all(map(math.isfinite, (sums["bound"], *self.gradient_norms)))
        if good:
            self.average.update()
        else:
            self._look_into(step, rows, own, sums["bound"])
        self._count(good, sums)
        work = work() if work else 0.0
        self.worked += work
        self.watch.step_took(step + 1, time.perf_counter() - start, self.waited - waited, work)
        return good, sums

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
            with phase("reduction"):
                agreed = self.grid.all_agree(shortage is None)
            if agreed:
                return sums
            self._shrink(step, shortage)

    def _micro_batches(self, step: int, rows: Rows) -> StepSums:
        self._seed_native_dropout(step)
        parts, pad_id = rows.ids.split(self.micro_batch), self.data.first.pad_id
        return add_gradients(self.engine, parts, pad_id, step, self.config, self.grid)

    def _shrink(self, step: int, shortage: str | None) -> None:
        """Go on with the next smaller micro-batch."""
        short = [rank for rank, said in enumerate(self.grid.gather(shortage)) if said is not None]
        if self.micro_batch == 1:
            self.watch.finish()
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

    def _count(self, good: bool, sums: dict[str, float]) -> None:
        """Move on by one step; of a bad one only its data are counted."""
        done, sequences = self.progress.step + 1, self.progress.sequences + self.config.train.global_batch
        tokens = self.progress.tokens + (round(sums["tokens"]) if good else 0)
        self.progress = Progress(done, sequences, tokens)
        if good:
            self.unlogged.update(sums)
            if said := self.health.good(done, sums["bound"] / sums["tokens"]):
                self.reporter.say(said)

    def _look_into(self, step: int, rows: Rows, own: float, loss: float) -> None:
        """A step was left out, for its loss or gradient is no number: do it again, and say where that began.

        RunFailed where the config says so, on all ranks.
        """
        with first_bad_gradient(self.engine.module) as bad:
            self._micro_batches(step, rows)
        norm, self.gradient_norms = math.hypot(*self.gradient_norms), [math.nan]
        self.engine.step(False)
        weight = first_bad_weight(self.engine.pieces)
        found = Found(rank(), own, bad[0] if bad else None, weight)
        if found.bad:
            try:
                write_down(self.config.train.run, step + 1, found, rows, self._position, self.data)
            except OSError as error:
                say(f"cannot write down the sequences of step {step + 1}: {error}")
        said = describe(step + 1, loss, norm, self.grid.gather(found))
        self.reporter.say(self._all_fail(lambda: self.health.left_out(said)))

    def _roll_back_if_due(self) -> bool:
        """After so many bad steps in a row: back to the last checkpoint, and on with the data after them."""
        run = self.config.train.run
        if not self.health.must_go_back:
            return False
        self.watch.at(self.progress.step, SAVING)  # for as long as it takes
        with contextlib.suppress(UserError):  # said already
            self.saver.wait()
        self.grid.all_agree(True)
        bad = self.progress.step
        if not (run / LATEST).exists():
            self.watch.finish()
            raise RunFailed(f"step {bad} is bad, and there is no checkpoint yet to go back to")
        checkpoint = Checkpoint(run)
        back = checkpoint.progress
        self._all_fail(lambda: self.health.went_back(bad, back.step))
        self.engine.fill(partial(checkpoint.load_weights, kind="raw"))
        checkpoint.load_engine(self.engine, self.average)
        self.progress = Progress(back.step, self.progress.sequences, back.tokens)
        self.batches.close()
        self.batches = self._stream()
        self.reporter.go_back(back.step)
        self.reporter.say(f"rolled back to step {back.step}; the data up to step {bad} are left behind")
        self._forget()
        return True

    def _log(self) -> None:
        self._gather_bad_shards()
        now, steps = time.perf_counter(), self.progress.step - self.logged.step
        metrics = self._metrics(now - self.clock)
        self.reporter.report(metrics)
        self.reporter.progress(metrics, (now - self.clock) / steps)
        self.watch.mean = (self.waited / steps, self.worked / steps)
        self._forget()
        every = self.config.faults.table_every
        if every and world_size() > 1 and self.progress.step // every > (self.progress.step - steps) // every:
            self.watch.probe = probe_speed(self.grid.device)
            self.watch.show_table()

    @phase("data")
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
            raise StoppedOnRequest("stopped on request while waiting for data", self.stop.for_good)

    def _metrics(self, seconds: float) -> dict:
        """What is logged: means over the steps since the last log; norms of gradients are the last step's."""
        config, steps = self.config, self.progress.step - self.logged.step
        rates = learning_rates(config.optim, self.progress.step - 1)
        flops = step_flops_a_sequence(config) * config.train.global_batch * steps
        peak = machine.peak_flops()
        return {
            "step": self.progress.step,
            **step_metrics(self.unlogged),
            **dict(zip(("grad_norm", "grad_norm_heads"), self.gradient_norms, strict=False)),
            "lr": rates[0],
            "lr_heads": rates[1],
            "tokens": self.progress.tokens,
            "sequences": self.progress.sequences,
            **self._data_metrics(),
            "tokens_per_second": (self.progress.tokens - self.logged.tokens) / seconds,
            "mfu": flops / seconds / (peak * world_size()) if peak else None,
            "seconds": seconds,
            "data_seconds": self.waited,
            "memory": machine.peak_memory() / 2**30,
            "micro_batch": self.micro_batch,
            "out_of_memory": self.shortages,
            "skipped_steps": self.health.skipped,
            "rollbacks": self.health.rollbacks,
            "loss_spikes": self.health.spikes,
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
        """The bound of the raw weights on the first validation sequences, shared out over the ranks.

        Of a learned order also how A, hatA and the network's confidence go together.
        """

        def engine(function, *arguments):
            self.watch.at(self.progress.step, VALIDATION)  # each batch is progress
            return self.engine(function, *arguments)

        self.engine.module.eval()
        count = min(len(self.valid), self.config.train.valid_sequences)
        batch = 4 * self.micro_batch  # nothing is kept for a backward pass
        how = {"batch": batch, "grid": self.grid}
        bound = estimate_bound(engine, self.valid, self.config, np.arange(count), **how)
        metrics = {"step": self.progress.step, "valid_nll_per_token": bound["nll_per_token"]}
        if self.config.objective.samples == 2:
            some = np.arange(min(count, ORDER_SEQUENCES))
            found = correlations(engine, self.valid, some, **how)["all"]
            metrics |= {f"order_{pair}": value.mean for pair, value in found.items()}
        self.reporter.report(metrics)
        self.reporter.say(f"step {self.progress.step}  validation {bound['nll_per_token']:.4f} nats a token")

    def save(self, goes_on: bool = False) -> None:
        self.watch.at(self.progress.step, SAVING)
        self._all_fail(lambda: self.saver.save(self.engine.pieces, self.average, self.progress, goes_on))

    def _data_facts(self) -> DataFacts:
        return DataFacts(
            tokenizer=self.data.first.tokenizer,
            packing=self.data.first.manifest.packing,
            identity=self.data.identity(),
        )

    def _heading(self) -> str:
        train = self.config.train
        return (
            f"{self.config.objective.in_words()}, {self.parameters:,} parameters, {train.precision}, "
            f"{_engine_in_words(self.config)}, {self.grid.device.type} x {world_size()}; "
            f"global batch {train.global_batch} = {self.grid.data_size} ranks x {self.accumulation} "
            f"x micro-batch {train.micro_batch}; {self.kernels}; {len(self.data):,} sequences; "
            f"from step {self.progress.step}{self._origin()}"
        )

    def _origin(self) -> str:
        if self.start is None:
            return ""
        new = sorted(parts_of(parameter_shapes(self.config)) - parts_of(self.start.shapes()))
        return f" with the averaged weights of {self.start.folder}; new: {', '.join(new) or 'nothing'}"


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # of the host; of CUDA, where another than torch's allocator asked; of cuBLAS
    texts = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return any(text in str(error) for text in texts)


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
