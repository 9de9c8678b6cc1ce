"""`lomdm sweep`: train every point of a sweep file, side by side or as SLURM jobs, and compare them."""

import argparse
import shlex
import sys
import time
from pathlib import Path

from lomdm_dist.commands.common import check_names, positive
from lomdm_dist.errors import RunFailed, StoppedOnRequest, UserError
from lomdm_dist.files import check_matplotlib
from lomdm_dist.secrets import hide, say

CHANGES = "change the config of all points: train.steps=100 ..."
SLURM = (
    "each point as a job of SLURM, by submitit; KEY=VALUE as sbatch has them: timeout_min=1440 nodes=2 "
    "gpus_per_node=8 partition=h100 ... (--processes: tasks a node)"
)
MINUTE = 60


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a sweep, e.g. configs/sweeps/laptop.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=CHANGES)
    parser.add_argument("--jobs", type=int, help="points at a time (1; on GPUs as many as there is room for)")
    parser.add_argument("--processes", type=int, default=1, help="of one point (default 1)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these points")
    parser.add_argument("--retry", action="store_true", help="also the points that have failed before")
    parser.add_argument("--slurm", nargs="+", metavar="KEY=VALUE", help=SLURM)
    parser.add_argument(
        "--print", action="store_true", help="run nothing: the command of each point that is not done"
    )
    parser.add_argument("--hostfile", type=Path, help="with --print: the hosts that deepspeed shall use")
    parser.set_defaults(run=_sweep)


def _sweep(options) -> None:
    positive(options, "jobs", "processes")
    if options.hostfile and not options.print:
        raise UserError("--hostfile goes with --print: a sweep itself runs on this machine, or by --slurm")
    if not options.print:
        say(f"sweep {options.file}: what is done of its points is looked up")
    from lomdm_dist.study.sweep import load_sweep
    from lomdm_dist.study.sweep_run import look_up
    from lomdm_dist.train.inputs import run_lock

    sweep = load_sweep(options.file, options.overrides)
    check_names("point", options.only or [], [point.name for point in sweep.points])
    if options.print:
        _print_commands(options, sweep, look_up(sweep, options.retry))
        return
    _check_processes(options, sweep)
    check_matplotlib("a sweep, which draws its result,")
    with run_lock(sweep.folder):
        _run(options, sweep, look_up(sweep, options.retry))


def _check_processes(options, sweep) -> None:
    """That the processes form each point's grid."""
    demands = dict(demand.split("=", 1) for demand in options.slurm or [] if "=" in demand)
    each, nodes = demands.get("tasks_per_node", ""), demands.get("nodes", "")
    count = int(each if each.isdecimal() else options.processes) * int(nodes if nodes.isdecimal() else 1)
    for point in sweep.points:
        try:
            point.config.accumulation(point.config.data_parallel(count))
        except UserError as error:
            raise UserError(f"point {point.name}: {error}") from None


def _place(options, sweep):
    """Where the points run. UserError."""
    from lomdm_dist.study.sweep_run import Local

    if not options.slurm:
        return Local(sweep, options.jobs, options.processes)
    try:
        from lomdm_dist.study.sweep_slurm import Slurm
    except ImportError:
        raise UserError("--slurm needs submitit: pip install submitit") from None
    return Slurm(sweep, options.jobs, options.processes, options.slurm)


def _print_commands(options, sweep, records) -> None:
    from lomdm_dist.launch import hostfile
    from lomdm_dist.study.sweep_run import DONE, command_to_print

    if options.hostfile:
        hostfile.read(options.hostfile)
    for record in records:
        if record.status != DONE and record.point.name in (options.only or [record.point.name]):
            print(
                hide(shlex.join(command_to_print(sweep, record.point, options.processes, options.hostfile)))
            )


def _run(options, sweep, records) -> None:
    """The points that wait, and the report, whatever happens to them. RunFailed where some have failed."""
    from lomdm_dist import machine
    from lomdm_dist.study.sweep import CONVENTION
    from lomdm_dist.study.sweep_report import as_markdown, write_report
    from lomdm_dist.study.sweep_run import DONE, FAILED, run_sweep

    place = _place(options, sweep)
    chosen = [record for record in records if record.point.name in (options.only or [record.point.name])]
    board = Board(sweep, chosen, place.jobs)
    try:
        run_sweep(sweep, records, chosen, place, board.show)
    except StoppedOnRequest:
        say(
            "stopped on request: the same command goes on" + (", and so do the jobs" if options.slurm else "")
        )
        raise
    finally:
        board.close()
        say("\n" + as_markdown(sweep, records))  # first: a full disk takes the files, not this
        say(f"written: {' '.join(map(str, write_report(sweep, records)))}")
        result = {"points": [record.as_dict() for record in records], "convention": CONVENTION}
        machine.write_result(options.json, result, sweep.config.as_dict())
    failed = [record.point.name for record in records if record.status == FAILED]
    if failed:
        done = sum(record.status == DONE for record in records)
        raise RunFailed(
            f"{len(failed)} of {len(records)} points failed: {', '.join(failed)} ({done} are done); --retry "
            "tries them again"
        )


class Board:
    """What the points are doing: on a terminal a bar for each that runs, elsewhere lines, now and then."""

    def __init__(self, sweep, records, jobs: int):
        self.records, self.jobs, self.bars, self.on_terminal = records, jobs, {}, sys.stderr.isatty()
        self.known = {record.point.name: record.status for record in records}
        self.said = time.monotonic()
        counts = ", ".join(f"{count} {status}" for status, count in self._counts().items())
        say(f"sweep {sweep.name}: {len(records)} points in {sweep.folder} ({counts}), {jobs} at a time")

    def _counts(self) -> dict[str, int]:
        statuses = [record.status for record in self.records]
        return {status: statuses.count(status) for status in dict.fromkeys(statuses)}

    def show(self) -> None:
        from lomdm_dist.study.sweep_run import RUNNING, progress_of

        due = time.monotonic() - self.said > MINUTE
        for record in self.records:
            if record.status != self.known[record.point.name]:
                self.known[record.point.name] = record.status
                self._say_change(record)
            if record.status == RUNNING and (self.on_terminal or due):
                self._say_progress(record, progress_of(record.point))
        if due:
            self.said = time.monotonic()

    def _say_change(self, record) -> None:
        from tqdm import tqdm

        from lomdm_dist.study.sweep_run import FAILED

        if bar := self.bars.pop(record.point.name, None):
            bar.close()
        loss = f", {record.result['loss']:.4f} nats a token" if record.result else ""
        left = self._counts()
        lines = [
            f"{record.point.name}: {record.status}{loss} ({', '.join(f'{n} {s}' for s, n in left.items())})"
        ]
        lines += [f"    {line}" for line in record.error] if record.status == FAILED else []
        with tqdm.external_write_mode():
            say("\n".join(lines))

    def _say_progress(self, record, progress: dict) -> None:
        from tqdm import tqdm

        step, steps = progress.get("step", 0), record.point.config.train.steps
        name, numbers = record.point.name, {}
        if progress:
            loss, speed = progress["loss"], progress["tokens_per_second"]  # no number after a bad step
            numbers = {"loss": f"{loss:.4f}" if loss else "-", "tokens/s": f"{speed:,.0f}" if speed else "-"}
            numbers |= {"ETA": f"{progress['left']:.0f} s"}
        if not self.on_terminal:
            said = "".join(f", {key} {value}" for key, value in numbers.items())
            say(f"{name}: step {step}/{steps}{said}")
            return
        if name not in self.bars:
            self.bars[name] = tqdm(total=steps, initial=step, desc=name, unit="step", leave=False)
        bar = self.bars[name]
        bar.n = step
        bar.set_postfix(numbers)

    def close(self) -> None:
        for bar in self.bars.values():
            bar.close()
