"""The points of a throughput bench, each measured by processes of its own; their table and picture."""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from lomdm_dist.children import end_with_parent
from lomdm_dist.config import load_config
from lomdm_dist.errors import UserError
from lomdm_dist.files import write_figure
from lomdm_dist.ops.phase import PHASES
from lomdm_dist.study.plan import wanted
from lomdm_dist.study.throughput import OTHER
from lomdm_dist.tables import markdown

NAMED = 0.05  # of the seconds that more ranks cost: a part below this is not named
CONVENTION = {
    "step_seconds": "median of the steps without the clock, mean over the ranks; spread: half the distance "
    "of the quartiles",
    "phases": "seconds of a step by part, forward and backward, of as many steps with a clock that waits "
    "for the device at each change, so that nothing overlaps: mean over their middle half and the ranks. "
    "Where a rank waits for others, the part that meets them has the wait",
    "flops": "matrix products of forward and backward (lomdm_dist/model/flops.py); the vocabulary's of the "
    "positions that were projected in these steps; of causal attention what is needed; of attention inside "
    "documents all of the sequence's",
    "mfu": "flops over step_seconds, ranks and the bf16 peak; of a CPU null, and share_of_matmul_rate is "
    "over the speed of one large matrix product on one core",
    "tokens": "clean ones, without padding; a LoMDM step masks each twice",
    "peak_memory_bytes": "the largest of any rank: of a GPU what torch had, of a CPU the process's growth",
    "efficiency": "tokens a second and device, over those of the same grid and micro-batch on fewest ranks",
}

UNITS = {  # beneath the table
    "cpu": "of matmul: of the FLOP/s of one large matrix product on one core; peak: the growth of a "
    "process's memory, the largest rank's",
    "gpu": "MFU: of the GPU's peak in bf16; peak: of what torch held on a GPU, the largest rank's",
}


@dataclass(frozen=True)
class Point:
    """What a row measures. problem: why it cannot be."""

    grid: str
    micro_batch: int | str
    ranks: int
    overrides: tuple[str, ...]
    problem: str | None = None

    @property
    def series(self) -> str:
        return (
            f"{self.grid}, micro-batch {self.micro_batch}" if self.grid else f"micro-batch {self.micro_batch}"
        )

    @property
    def name(self) -> str:
        return f"{self.series}, {self.ranks} rank{'s' * (self.ranks > 1)}"


def make_points(
    path: str,
    overrides: list[str],
    grids: list[str],
    micro_batches: list[int],
    ranks: list[int],
    scaling: str,
) -> list[Point]:
    """Every grid with every micro-batch on every number of ranks. UserError where the config itself is wrong.

    scaling   strong: the config's global batch is that of all; weak: of the fewest ranks, and grows with them
    """
    train, points = load_config(path, overrides).train, []
    for grid, micro, count in itertools.product(grids or [""], micro_batches or [train.micro_batch], ranks):
        batch = train.global_batch * count // min(ranks) if scaling == "weak" else train.global_batch
        changes = (*overrides, *grid.split(), f"train.global_batch={batch}", f"train.micro_batch={micro}")
        points.append(Point(grid, micro, count, changes, _problem(path, changes, count)))
    return points


def _problem(path: str, overrides: tuple[str, ...], ranks: int) -> str | None:
    """Why so many processes of this machine cannot run it."""
    try:
        config = load_config(path, overrides)
        check_settled(config)
        config.accumulation(config.data_parallel(ranks))
    except UserError as error:
        return str(error)
    gpus = torch.cuda.device_count()
    return f"this machine has {gpus} GPUs" if 0 < gpus < ranks else None


def check_settled(config) -> None:
    """Raises UserError where something is left to the planner."""
    if left := wanted(config):
        raise UserError(f"{' and '.join(left)} {'is' if len(left) == 1 else 'are'} auto: say what to measure")


def measure_points(points: list[Point], path: str, data: str, steps: int, warmup: int) -> list[dict]:
    """A row a point; that of one that fails says why."""
    rows = []
    for point in tqdm(points, desc="bench", disable=None):
        row = {"error": point.problem} if point.problem else _run(point, path, data, steps, warmup)
        about = {"name": point.name, "series": point.series, "ranks": point.ranks}
        rows.append(row | about | {"overrides": list(point.overrides)})
    _add_efficiencies(rows)
    return rows


def _run(point: Point, path: str, data: str, steps: int, warmup: int) -> dict:
    """This command again, under torch's launcher, which measures one point."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(point.ranks)]
        command = ["lomdm_dist.cli", "bench", "throughput", "--config", path, "--data", data]
        command += ["--steps", str(steps), "--warmup", str(warmup), "--json", str(out), *point.overrides]
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        done = subprocess.run(
            [sys.executable, "-m", *launcher, "-m", *command],
            env=environment,
            capture_output=True,
            text=True,
            preexec_fn=end_with_parent(),
        )
        if done.returncode == 0 and out.exists():
            return json.loads(out.read_text())["rows"][0]
        return {"error": _why(done)}


def _why(done: subprocess.CompletedProcess) -> str:
    """The line that tells, of all that processes and launcher say."""
    lines = done.stderr.splitlines()
    for pattern in (
        r"(?:.*: )?error: (.*)",
        r".*?(\w*(?:Error|Exception): .*)",
        r".*(Signal \d+ \(\w+\) received)",
    ):
        if said := [match[1] for line in lines if (match := re.match(pattern, line))]:
            return said[0]
    return f"ended with status {done.returncode}: {lines[-1] if lines else 'nothing was said'}"


def _add_efficiencies(rows: list[dict]) -> None:
    """And of more ranks than the fewest, which parts of a step the lost seconds are in."""
    for row in rows:
        if row["error"]:
            continue
        alike = [other for other in rows if not other["error"] and other["series"] == row["series"]]
        base = min(alike, key=lambda other: other["ranks"])
        row["efficiency"] = row["tokens_per_second_per_gpu"] / base["tokens_per_second_per_gpu"]
        row["lost"] = {}
        if row is not base:  # had it scaled, a part would take its share of the batch's growth
            expected = row["global_batch"] / base["global_batch"] * base["ranks"] / row["ranks"]
            row["lost"] = {
                name: row["phases"].get(name, 0.0) - expected * base["phases"].get(name, 0.0)
                for name in dict.fromkeys([*base["phases"], *row["phases"]])
            }


def as_markdown(rows: list[dict]) -> str:
    """Speed, then the seconds by part; what more ranks cost; what could not be measured."""
    good = [row for row in rows if not row["error"]]
    on_cpu = any(row["device"] == "cpu" for row in good)
    unit, scale, of = ("GFLOP/s", 1e3, "of matmul") if on_cpu else ("TFLOP/s", 1, "MFU")
    head = ["", "batch", "s a step", "+-", "tokens/s", "a rank", "efficiency"]
    head += [f"{unit} a rank", of, "peak, GiB"]
    speeds, parts = [], []
    for row in good:
        share = row["share_of_matmul_rate"] if on_cpu else row["mfu"]
        cells = [row["name"], row["global_batch"], f"{row['step_seconds']:.4f}", f"{row['spread']:.4f}"]
        cells += [f"{row['tokens_per_second']:,.0f}", f"{row['tokens_per_second_per_gpu']:,.0f}"]
        cells += [f"{row['efficiency']:.1%}", f"{scale * row['tflops_per_gpu']:,.4g}"]
        cells += [None if share is None else f"{share:.1%}", f"{row['peak_memory_bytes'] / 2**30:.2f}"]
        speeds.append(cells)
    names = [name for name in (*PHASES, OTHER) if any(name in row["phases"] for row in good)]
    for row in good:
        cells = [f"{1e3 * row['phases'][name]:.1f}" if name in row["phases"] else "" for name in names]
        total = row["phases_sum"]
        parts.append([row["name"], *cells, f"{1e3 * total:.1f}", f"{total / row['step_seconds']:.1%}"])
    lines = [*markdown(head, speeds), "", UNITS["cpu" if on_cpu else "gpu"], ""]
    lines += markdown(["ms a step", *names, "sum", "sum, of the step"], parts)
    lines += ["", *(_lost(row) for row in good if row["lost"])]
    lines += [f"{row['name']}: not measured: {row['error']}" for row in rows if row["error"]]
    return "\n".join(lines).rstrip()


def _lost(row: dict) -> str:
    total = sum(row["lost"].values())
    parts = sorted(row["lost"].items(), key=lambda part: -abs(part[1]))
    named = [f"{name} {1e3 * more:+.1f}" for name, more in parts if abs(more) >= NAMED * abs(total)]
    return (
        f"{row['name']}: efficiency {row['efficiency']:.1%}; {1e3 * total:+.1f} ms a step: {', '.join(named)}"
    )


def draw(rows: list[dict], path: Path) -> None:
    """Tokens a second over ranks, beside ideal scaling; below, the seconds of each row's step by part."""
    from matplotlib.figure import Figure

    good = [row for row in rows if not row["error"]]
    bars = 0.45 * len(good) + 1
    figure = Figure(figsize=(9, 4.5 + bars))
    above, below = figure.subplots(2, height_ratios=(3, bars))
    _draw_speeds(above, good)
    _draw_parts(below, good)
    figure.tight_layout()
    write_figure(figure, path, dpi=150)


def _draw_speeds(axes, rows: list[dict]) -> None:
    for series in dict.fromkeys(row["series"] for row in rows):
        own = sorted((row for row in rows if row["series"] == series), key=lambda row: row["ranks"])
        ranks, speed = [row["ranks"] for row in own], [row["tokens_per_second"] for row in own]
        line = axes.plot(ranks, speed, "o-", label=_short(series))[0]
        axes.plot(ranks, [speed[0] * n / ranks[0] for n in ranks], "--", color=line.get_color(), alpha=0.4)
    axes.set(
        xlabel="ranks",
        ylabel="tokens/s (dashed: ideal)",
        ylim=(0, 1.1 * max(row["tokens_per_second"] for row in rows)),
    )
    axes.set_xticks(sorted({row["ranks"] for row in rows}))
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_parts(axes, rows: list[dict]) -> None:
    from matplotlib import colormaps

    names, start = [_short(row["name"]) for row in rows], [0.0] * len(rows)
    for part, colour in zip((*PHASES, OTHER), colormaps["tab10"].colors, strict=True):
        seconds = [row["phases"].get(part, 0.0) for row in rows]
        if any(seconds):
            axes.barh(names, seconds, left=start, color=colour, label=part)
            start = [before + more for before, more in zip(start, seconds, strict=True)]
    axes.plot([row["step_seconds"] for row in rows], names, "k|", markersize=14, label="without the clock")
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step, by part")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _short(name: str) -> str:
    """For a picture: keys without their section, a line for the grid."""
    return name.replace("parallel.", "").replace(", micro-batch", "\nmicro-batch")
