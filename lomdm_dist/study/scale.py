"""A training on 1 to thousands of GPUs: the best plan for each number, and what limits it. Predictions."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from lomdm_dist.config import Config, make_config
from lomdm_dist.errors import UserError
from lomdm_dist.files import write_figure
from lomdm_dist.machine import GPUS, Device, known_gpu
from lomdm_dist.study import memory, roofline
from lomdm_dist.study.plan import (
    CHOSEN,
    NOTHING_FITS,
    Calibration,
    Plan,
    calibrate,
    candidates,
    choose,
    undivided,
)
from lomdm_dist.tables import markdown

SLOWED = 1.1  # a plan this much faster that does not fit: it is memory that limits
MOST = 1_000_000  # GPUs
COLOURS = {  # of what limits: what a step's time goes into, or what shuts faster plans out
    "compute": "tab:blue",
    "memory bandwidth": "tab:cyan",
    "kernel starts": "tab:olive",
    "NVLink": "tab:orange",
    "network": "tab:red",
    "latency": "tab:pink",
    "data": "tab:brown",
    "memory": "tab:purple",
    "the batch": "tab:green",
}
STRONG, WEAK = "strong", "weak"


@dataclass(frozen=True)
class Point:
    """So many GPUs: a plan and what limits it, or the reason why there is none."""

    gpus: int
    batch: int
    plan: Plan | None = None
    limit: str = ""
    reason: str = ""


def counts(text: str) -> list[int]:
    """Numbers of GPUs: "8,24,64", or "1..4096", its powers of two and its ends. Raises UserError."""
    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
            found = {first, last} | {2**k for k in range(MOST.bit_length()) if first <= 2**k <= last}
            wrong = last < first
        else:
            found, wrong = {int(part) for part in text.split(",")}, False
    except ValueError:
        wrong, found = True, {1}
    if wrong or not 1 <= min(found) <= max(found) <= MOST:
        raise UserError(f"--gpus {text}: give numbers of 1 to {MOST:,}, as 1..4096 or 8,24,64")
    return sorted(found)


def scale(
    config: Config,
    gpus: list[int],
    device: Device,
    calibration: Calibration | None = None,
    fixed: tuple[str, ...] = (),
) -> dict[str, list[Point]]:
    """A point for each number of GPUs: `strong` with the config's batch, `weak` with one that grows.

    The weak ones have as many sequences a GPU as the first strong one with a plan, from a whole node on.
    Raises UserError where there is no plan for any number.
    """
    points = {STRONG: [], WEAK: []}
    batch = config.train.global_batch
    with tqdm(total=2 * len(gpus), desc="plan", disable=None) as bar:
        for number in gpus:
            points[STRONG].append(_point(config, number, device, calibration, fixed))
            bar.update()
        planned = [point for point in points[STRONG] if point.plan]
        if not planned:
            raise UserError(f"no plan for any number of GPUs; for {gpus[-1]}: {points[STRONG][-1].reason}")
        first = next((point for point in planned if point.gpus >= device.a_node), planned[-1])
        for number, strong in zip(gpus, points[STRONG], strict=True):
            larger, rest = divmod(batch * number, first.gpus)
            if rest or not larger:
                said = f"{batch} / {first.gpus} sequences a GPU are no whole batch on {number}"
                points[WEAK].append(Point(number, larger, reason=said))
            elif larger == batch:
                points[WEAK].append(strong)
            else:
                grown = config.changed({"train.global_batch": larger})
                points[WEAK].append(_point(grown, number, device, calibration, fixed))
            bar.update()
    return points


def _point(config: Config, gpus: int, device: Device, calibration: Calibration | None, fixed) -> Point:
    batch = config.train.global_batch
    try:
        plans = candidates(config, gpus, device, calibration, fixed)
        best = choose(plans, fixed)
    except UserError as error:
        return Point(gpus, batch, reason=str(error))
    return Point(gpus, batch, best, _limit(best, plans, fixed))


def _limit(best: Plan, plans: list[Plan], fixed: tuple[str, ...]) -> str:
    """The batch or the memory, where they shut faster plans out; or what its time goes into."""
    if "parallel.tensor_parallel" not in fixed and undivided(best, plans):
        return "the batch"
    if best.seconds.step > SLOWED * min(plan.seconds.step for plan in plans):
        return "memory"
    return best.seconds.limit


def rows(points: list[Point], tokens: float, price: float | None) -> list[dict]:
    """A dict a point; `efficiency` is tokens/s a GPU over the first's, `cost` in the money of `price`."""
    found, first = [], None
    for point in points:
        row = {"gpus": point.gpus, "global_batch": point.batch, "reason": point.reason or None}
        if point.plan:
            result = point.plan.as_dict()
            first = first or result["tokens_per_second_per_gpu"]
            hours = tokens / result["tokens_per_second"] / 3600
            row |= result | {"limit": point.limit, "days": hours / 24, "gpu_hours": hours * point.gpus}
            row["efficiency"] = result["tokens_per_second_per_gpu"] / first
            row["cost"] = price and price * row["gpu_hours"]
            row["reason"] = None
        found.append(row)
    return found


def from_bench(path: Path) -> tuple[Calibration, str]:
    """Factors from that row of a `lomdm bench throughput` that was fastest a GPU; and the words for it.

    Raises UserError where there is none that was measured on a GPU of the table.
    """
    try:
        result = json.loads(path.read_text())
        measured = [row for row in result["rows"] if not row.get("error")]
        best = max(measured, key=lambda row: row["tokens_per_second_per_gpu"])
        name, ranks, seconds = best["device"], best["ranks"], float(best["step_seconds"])
        size, reading = int(best["peak_memory_bytes"]), float(best["phases"].get("data", 0.0))
        config = make_config(result["config"], _overrides(best["overrides"]), path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(
            f"--calibrate {path} is no result of `lomdm bench throughput --json` with a measured row"
        ) from None
    device = known_gpu(name) or GPUS.get(name)
    if device is None:
        raise UserError(f"--calibrate {path}: was measured on {name}, which is not in the table of devices")
    plan = candidates(config, ranks, device, fixed=CHOSEN)[0]
    factors = calibrate(plan, seconds, size)
    a_sequence = reading * plan.data_parallel / config.train.global_batch
    said = (
        f"{best['name']} of {path.name}, {ranks} x {name}: computation takes {factors.compute:.2f} and "
        f"activations {factors.activations:.2f} times what the table alone predicts"
    )
    return replace(factors, data=a_sequence), said


def _overrides(said) -> list[str]:
    return [f"{key}={value}" for key, value in said.items()] if isinstance(said, dict) else list(said)


def left_out() -> list[str]:
    """What a prediction says nothing of: of the time, and of the memory."""
    return [*roofline.LEFT_OUT, *memory.LEFT_OUT]


def as_table(found: list[dict], price: float | None) -> list[str]:
    """Lines of markdown, of the numbers of GPUs that have a plan."""
    head = ["GPUs", "batch", "TP", "ZeRO", "micro-batch", "samples", "recompute", "GiB"]
    head += ["step, s", "tokens/s"]
    head += ["MFU", "efficiency", "days", *(["cost, in units of --price"] if price else []), "limited by"]
    rows = []
    for row in found:
        if row["reason"]:
            continue
        choice = row["choice"]
        cells = [f"{row['gpus']:,}", f"{row['global_batch']:,}", choice["parallel.tensor_parallel"]]
        cells += [choice[key] for key in ("parallel.zero_stage", "train.micro_batch", "train.two_samples")]
        cells += [
            choice["train.recompute"],
            f"{row['memory_gib']['total']:.1f}",
            f"{row['step_seconds']:.3f}",
        ]
        cells += [f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}", f"{row['efficiency']:.0%}"]
        cells += [f"{row['days']:,.2f}", *([f"{row['cost']:,.0f}"] if price else []), row["limit"]]
        rows.append(cells)
    return markdown(head, rows)


def without_plan(result: dict) -> list[str]:
    """A line a reason. Where nothing fits, that of the most GPUs, which is nearest to it, stands for all."""
    lines = {}
    for kind in (STRONG, WEAK):
        refused, gpus = [row for row in result[kind] if row["reason"]], {}
        tight = [row["reason"] for row in refused if row["reason"].startswith(NOTHING_FITS)]
        for row in refused:
            reason = tight[-1] if row["reason"] in tight else row["reason"]
            gpus.setdefault(reason, []).append(f"{row['gpus']:,}")
        for reason, numbers in gpus.items():
            lines.setdefault(f"{' and '.join(numbers)} GPUs: {reason}", []).append(kind)
    return [f"{' and '.join(kinds)}, {line}" for line, kinds in lines.items()]


def draw(result: dict, path: Path) -> None:
    """Tokens/s and MFU by the number of GPUs; a colour says what limits a point."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10, 4.2), layout="constrained", dpi=130)
    speed, mfu = figure.subplots(1, 2)
    named = []
    for kind, style in ((WEAK, "--"), (STRONG, "-")):
        found = [row for row in result[kind] if not row["reason"]]
        gpus = [row["gpus"] for row in found]
        for axes, key, times in ((speed, "tokens_per_second", 1), (mfu, "mfu", 100)):
            values = [times * row[key] for row in found]
            axes.plot(gpus, values, style, color="0.55", linewidth=1, zorder=1)
            filled = [COLOURS[row["limit"]] if kind == STRONG else "white" for row in found]
            edges = [COLOURS[row["limit"]] for row in found]
            axes.scatter(gpus, values, c=filled, edgecolors=edges, s=34, zorder=2)
        named += [row["limit"] for row in found]
    first, a_weak = (next(row for row in result[kind] if not row["reason"]) for kind in (STRONG, WEAK))
    ideal = [first["tokens_per_second_per_gpu"] * row["gpus"] for row in result[STRONG]]
    speed.plot([row["gpus"] for row in result[STRONG]], ideal, ":", color="0.3", linewidth=1)
    speed.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens/s, predicted")
    mfu.set(xscale="log", xlabel="GPUs", ylabel="MFU, %", ylim=(0, 1.1 * mfu.get_ylim()[1]))
    for axes in (speed, mfu):
        axes.set_xscale("log", base=2)
        axes.set_xticks([row["gpus"] for row in result[STRONG]][:: 1 + (len(result[STRONG]) > 7)])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    hollow = {"color": "0.55", "linestyle": "--", "marker": "o", "markerfacecolor": "white"}
    kinds = [
        Line2D([], [], color="0.55", marker="o", label="strong: the batch is fixed"),
        Line2D([], [], **hollow, label=f"weak: {a_weak['global_batch'] / a_weak['gpus']:g} sequences a GPU"),
        Line2D([], [], color="0.3", linestyle=":", label="ideal"),
    ]
    speed.legend(handles=kinds, frameon=False, fontsize="small")
    limits = [
        Line2D([], [], linestyle="", marker="o", color=COLOURS[name], label=name)
        for name in COLOURS
        if name in named
    ]
    mfu.legend(handles=limits, frameon=False, fontsize="small", title="limited by", loc="lower left")
    figure.suptitle(result["title"], fontsize="medium")
    write_figure(figure, path)
