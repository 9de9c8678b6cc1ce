"""What a sweep has come to: points.csv, table.md and plot.png."""

import csv
import io
import json
import math
import statistics
from pathlib import Path

import numpy as np

from lomdm_dist.files import write_atomically, write_figure
from lomdm_dist.study.sweep import NUMBERS, Sweep
from lomdm_dist.study.sweep_run import DONE, FAILED, Record
from lomdm_dist.tables import markdown

COLUMNS = [
    *("name", "group", "status", "objective", "parameters", "flops_per_token", "tokens", "flops", "loss"),
    *("ppl", "seconds", "tokens_per_second", "memory_gib", "seed", "overrides", "curve"),
]
LABELS = {
    "parameters": "parameters",
    "flops": "training FLOPs",
    "loss": "bound after the last step, nats a token",
    "tokens_per_second": "tokens/s",
}


def write_report(sweep: Sweep, records: list[Record]) -> list[Path]:
    """The files, beside RUNS/points.json."""
    table, rows, plot = (sweep.folder / name for name in ("table.md", "points.csv", "plot.png"))
    write_atomically(table, as_markdown(sweep, records))
    write_atomically(rows, as_csv(records))
    written = [table, rows]
    if any(record.status == DONE for record in records):
        draw(sweep, records, plot)
        written.append(plot)
    return written


def as_csv(records: list[Record]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for record in records:
        point, result = record.point, record.result or {}
        row = {"name": point.name, "group": point.group, "objective": point.config.objective.name}
        row |= {"seed": point.config.train.seed, "overrides": " ".join(point.overrides)} | result
        row |= {"status": record.status, "curve": json.dumps(result["curve"]) if result else None}
        writer.writerow({key: row.get(key) for key in COLUMNS})
    return text.getvalue()


def by_group(records: list[Record]) -> dict[str, list[Record]]:
    """Points that differ in their seed alone."""
    groups = {}
    for record in records:
        groups.setdefault(record.point.group, []).append(record)
    return groups


def mean(group: list[Record], measure: str) -> tuple[float, float]:
    """Over the seeds that are done, and its standard error, nan of one seed."""
    values = [record.result[measure] for record in group if record.status == DONE]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), error


def as_markdown(sweep: Sweep, records: list[Record]) -> str:
    """One row for all seeds of a point; then what failed, with its last words."""
    paper = sweep.paper["ppl"] if sweep.paper else {}
    seeds = len(records) > len(by_group(records))
    head = ["point", "parameters", "tokens", "FLOPs", "bound, nats a token", *["seeds"] * seeds, "ppl"]
    head += [*["ppl, paper"] * bool(paper), "tokens/s", "GiB", "status"]
    rows = []
    for name, group in by_group(records).items():
        done = [record.result for record in group if record.status == DONE]
        row = [name]
        if done:
            loss, error = mean(group, "loss")
            spread = f" +- {error:.4f}" if len(done) > 1 else ""
            row += [f"{done[0]['parameters']:,}", f"{done[0]['tokens']:,}", f"{done[0]['flops']:.2e}"]
            row += [f"{loss:.4f}{spread}", *[f"{len(done)} of {len(group)}"] * seeds, f"{math.exp(loss):.2f}"]
        else:
            row += [None] * (5 + seeds)
        row += [paper.get(name)] * bool(paper)
        row += (
            [f"{mean(group, 'tokens_per_second')[0]:,.0f}", f"{mean(group, 'memory_gib')[0]:.2f}"]
            if done
            else [None, None]
        )
        row.append(", ".join(dict.fromkeys(record.status for record in group)))
        rows.append(row)
    text = f"# {sweep.about}\n\n" + "".join(f"{line}\n" for line in markdown(head, rows))
    text += f"\nppl, paper: {sweep.paper['label']}.\n" if paper else ""
    failed = [record for record in records if record.status == FAILED]
    text += "".join(
        f"\n{record.point.name} failed ({record.point.log}):\n\n"
        + "".join(f"    {line}\n" for line in record.error)
        for record in failed
    )
    return text


def draw(sweep: Sweep, records: list[Record], path: Path) -> None:
    """The final bound by the sweep's x, a line for each combination of the other axes; and its way there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained", dpi=120)
    final, curves = figure.subplots(1, 2)
    for axes in (final, curves):
        axes.spines[["top", "right"]].set_visible(False)
    series = _series(sweep, records)
    _draw_final(final, sweep, series)
    _draw_curves(curves, series)
    figure.suptitle(sweep.about)
    write_figure(figure, path)


def _series(sweep: Sweep, records: list[Record]) -> dict[str, dict[str, list[Record]]]:
    """Groups by the line that they are on, along x."""
    place = list(sweep.axes)[-1] if sweep.x in NUMBERS else sweep.x
    series = {}
    for name, group in by_group(records).items():
        choices = group[0].point.choices
        line = "-".join(value for axis, value in choices.items() if axis not in (place, "seed"))
        series.setdefault(line, {})[name] = group
    return {
        line: dict(sorted(groups.items(), key=lambda named: _x(sweep, named[1]) or 0))
        for line, groups in series.items()
    }


def _x(sweep: Sweep, group: list[Record]) -> float | None:
    """Where a point stands on the plot; None while its number is not known."""
    if sweep.x not in NUMBERS:
        place = sweep.axes[sweep.x].index(group[0].point.choices[sweep.x])
        return sweep.numbers[sweep.x][place] if sweep.x in sweep.numbers else place
    return next((record.result[sweep.x] for record in group if record.status == DONE), None)


def _draw_final(axes, sweep: Sweep, series: dict) -> None:
    """Joined by lines where x is a number."""
    joined = "-" if sweep.x in (*NUMBERS, *sweep.numbers) else ""
    for number, (line, groups) in enumerate(series.items()):
        done = [group for group in groups.values() if any(record.status == DONE for record in group)]
        places = [_x(sweep, group) for group in done]
        means = [mean(group, sweep.y) for group in done]
        errors = None if all(math.isnan(error) for _, error in means) else [error for _, error in means]
        style = {"color": f"C{number}", "marker": "o", "capsize": 3, "linestyle": joined}
        label = ", ".join(filter(None, ["ours" if sweep.paper else "", line]))
        axes.errorbar(places, [value for value, _ in means], errors, label=label, **style)
        _draw_paper(axes, sweep, groups, f"C{number}", line)
    if sweep.x in NUMBERS:
        _count_ticks(axes)
    else:
        _axis_ticks(axes, sweep.axes[sweep.x], sweep.numbers.get(sweep.x))
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    axes.set(xlabel=LABELS.get(sweep.x, sweep.x), ylabel=LABELS[sweep.y])
    seeds = max(len(group) for groups in series.values() for group in groups.values())
    spread = f", mean of {seeds} seeds and its standard error" if seeds > 1 else ""
    axes.set_title(("Validation" if sweep.y == "loss" else "Speed") + spread)
    heading = f"paper: {sweep.paper['label']}" if sweep.paper else None
    if sweep.paper or len(series) > 1:
        axes.legend(frameon=False, fontsize="small", title=heading, title_fontsize="x-small")


def _axis_ticks(axes, names: tuple[str, ...], numbers: tuple[float, ...] | None) -> None:
    """At its values: numbers to scale, others side by side."""
    from matplotlib.ticker import NullFormatter

    places, labels = (numbers, [_short(x) for x in numbers]) if numbers else (range(len(names)), names)
    if min(places) > 0 and max(places) > 10 * min(places):
        axes.set_xscale("log")
    long = sum(map(len, labels)) > 40
    axes.set_xticks(places, labels, rotation=20 if long else 0, ha="right" if long else "center")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15)


def _count_ticks(axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(_short)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _short(number: float, _=None) -> str:
    """139292986: 139M."""
    for size, letter in ((1e15, ""), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number:.0e}" if size == 1e15 else f"{number / size:.3g}{letter}"
    return f"{number:g}"


def _draw_paper(axes, sweep: Sweep, groups: dict, color: str, line: str) -> None:
    """Published numbers at our points' places; where data and scale are others, they say how a line runs."""
    paper = sweep.paper["ppl"] if sweep.paper and sweep.y == "loss" else {}
    found = [(_x(sweep, groups[name]), math.log(paper[name])) for name in groups if name in paper]
    found = [(place, loss) for place, loss in found if place is not None]
    if found:
        joined = "--" if sweep.x in (*NUMBERS, *sweep.numbers) else ""
        style = {"color": color, "marker": "s", "fillstyle": "none", "linestyle": joined}
        axes.plot(*zip(*found, strict=True), label=f"paper, {line}" if line else "paper", **style)


def _draw_curves(axes, series: dict) -> None:
    """Means over the seeds, and thinly each seed; colour by line, darker along x. Of one line, by point."""
    alone, longest = len(series) == 1, max(len(groups) for groups in series.values())
    for number, groups in enumerate(series.values()):
        for place, (name, group) in enumerate(groups.items()):
            seeds = [np.array(record.result["curve"]) for record in group if record.status == DONE]
            if seeds:
                shade = 1 if alone else 1 - 0.8 * (longest - 1 - place) / longest
                tokens, style = seeds[0][:, 0], {"color": f"C{place if alone else number}"}
                style["marker"] = "o" if len(tokens) == 1 else ""
                middle = np.mean([np.interp(tokens, *curve.T) for curve in seeds], axis=0)
                axes.plot(tokens, middle, label=name, linewidth=1.2, alpha=shade, **style)
                for curve in seeds if len(seeds) > 1 else []:
                    axes.plot(*curve.T, linewidth=0.5, alpha=0.5 * shade, **style)
    axes.xaxis.set_major_formatter(_short)
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    axes.set(xlabel="tokens seen", ylabel="bound, nats a token", title="Validation during training")
    axes.legend(frameon=False, fontsize="x-small", ncols=1 + (sum(map(len, series.values())) > 8))
