"""Tables and figures of benchmarks/results/evidence.json, for docs/evidence.md."""

import math
import statistics
import sys
from pathlib import Path

import numpy as np
from scipy import stats

from lomdm_dist.files import write_figure
from lomdm_dist.tables import markdown

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAIRS = {"A, hatA": 2, "A, confidence": 3, "hatA, confidence": 4}  # places in a row's curve
SIGNALS = {"advantage_std": 1, "log_q_ratio_std": 2, "exponent_std": 3}
UNCUT, CUT = "nll_per_token", "nll_per_token_cut"
# each with what is compared to it: MDLM, and what a learned order has in place of one
BASES = (("mdlm", "mdlm_long"), ("no_order",), ("c_1.3_0_uniform",))
DRAWN = ("ar", "mdlm", "lomdm", "no_order", "lomdm_uniform", "c_1.3_1.25_uniform", "c_1.3_0_uniform")
LONG = ("mdlm_long", "lomdm_long", "c_1.3_1.25_uniform_long")
MEASURES = ("steps", "seconds", "FLOPs")


def report(kept: dict) -> None:
    groups = by_group(kept["rows"])
    if not groups:
        sys.exit("no row is kept: python -m benchmarks.evidence keep")
    tables = [bounds(groups), *(differences(groups, base) for base in BASES), worth(groups), paces(groups)]
    print(*filter(None, tables), sep="\n\n")
    if "seconds_a_step" not in kept:
        sys.exit("no seconds a step are kept, so no more is told: python -m benchmarks.evidence speed")
    seconds = {group: statistics.median(found) for group, found in kept["seconds_a_step"]["rows"].items()}
    print("", budgets(groups, seconds), ends(groups), sep="\n\n")
    draw_curves(groups, kept, seconds)
    if "lomdm" in groups:
        draw_order(groups["lomdm"])


def by_group(rows: dict[str, dict]) -> dict[str, list[dict]]:
    groups = {}
    for row in rows.values():
        groups.setdefault(row["group"], []).append(row)
    return groups


def mean(values: list[float]) -> tuple[float, float]:
    """And its standard error, nan of one."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def said(values: list[float | None], digits: int = 4) -> str:
    if None in values:
        return "-"
    middle, error = mean(values)
    return f"{middle:.{digits}f}" + ("" if math.isnan(error) else f" +- {error:.{digits}f}")


def table(names: tuple[str, ...], rows: list[list]) -> str:
    return "\n".join(markdown(names, rows)) if rows else ""


def less(value: float | None, other: float | None) -> float | None:
    return None if None in (value, other) else value - other


def bounds(groups: dict[str, list[dict]]) -> str:
    """The uncut bound decides; the cut one stands beside it. Of one seed the error of the estimate."""
    lines = []
    for group, rows in groups.items():
        uncut, cut = ([row[key] for row in rows] for key in (UNCUT, CUT))
        bound = said(uncut) if len(rows) > 1 else f"{uncut[0]:.4f} ({rows[0]['standard_error'] or 0:.4f})"
        away = said([less(a, b) for a, b in zip(uncut, cut, strict=True)])
        perplexity, flops = math.exp(mean(uncut)[0]), rows[0]["flops_a_step"] * rows[0]["steps"]
        cells = [group, len(rows), bound, f"{perplexity:.2f}", said(cut), away]
        lines.append([*cells, f"{rows[0]['tokens']:,}", f"{flops:.2e}"])
    names = ("row", "seeds", "bound, nats a token", "ppl", "cut at 1e-3", "cut away", "tokens", "FLOPs")
    return table(names, lines)


def pairs_with(rows: list[dict], groups: dict[str, list[dict]], base: tuple[str, ...]) -> list[tuple]:
    """Each row with the base's of the same seed and steps, where there is one."""
    twins = {(row["seed"], row["steps"]): row for name in base for row in groups.get(name, [])}
    found = [(row, twins.get((row["seed"], row["steps"]))) for row in rows if row["group"] not in base]
    return [(row, twin) for row, twin in found if twin]


def differences(groups: dict[str, list[dict]], base: tuple[str, ...]) -> str:
    """With Student's interval: of three seeds it is 4.3 standard errors to each side."""
    lines = []
    for group, rows in groups.items():
        if pairs := pairs_with(rows, groups, base):
            uncut, cut = ([less(row[key], twin[key]) for row, twin in pairs] for key in (UNCUT, CUT))
            lines.append([group, len(pairs), said(uncut), interval(uncut), said(cut)])
    return table(
        (f"less {base[0]}, same seed", "seeds", "uncut", "95% interval", "cut at 1e-3"),
        lines,
    )


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    middle, error = mean(values)
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return f"{middle - reach:.3f} to {middle + reach:.3f}"


def worth(groups: dict[str, list[dict]]) -> str:
    """What the learned order gives to the very network that was trained under it."""
    lines = []
    for group, rows in groups.items():
        found = [
            row["variants"]["unordered"][UNCUT] - row[UNCUT] for row in rows if "unordered" in row["variants"]
        ]
        if found:
            spread = said([row["signals"][-1][SIGNALS["exponent_std"]] for row in rows], 3)
            lines.append([group, len(found), spread, said(found)])
    names = ("row", "seeds", "exponents' spread at the end", "bound with c2 = 0, less the bound")
    return table(names, lines)


def paces(groups: dict[str, list[dict]]) -> str:
    """One network in random order at several c1: the uncut bound has to be the same, the cut one is not."""
    lines = [
        [row["group"], name.removeprefix("c1_"), f"{bound[UNCUT]:.5f}", f"{bound[CUT]:.4f}"]
        for rows in groups.values()
        for row in rows
        for name, bound in row["variants"].items()
        if name.startswith("c1_")
    ]
    return table(("row", "c1", "bound", "cut at 1e-3"), lines)


def budgets(groups: dict[str, list[dict]], seconds: dict[str, float]) -> str:
    """What a row lacks when MDLM's steps, seconds or FLOPs are spent, and the share of them after which
    it first is where MDLM ends: by the validations during training."""
    lines = []
    for group in (*DRAWN, *LONG[1:]):
        pairs = pairs_with(groups.get(group, []), groups, BASES[0])
        for measure in MEASURES if group != "ar" and pairs else ():
            behind, shares = [], []
            for row, twin in pairs:
                factor = cost(row, seconds)[measure] / cost(twin, seconds)[measure]
                last = twin["curve"][-1][1]
                behind.append(value_at(row["curve"], twin["steps"] / factor) - last)
                if step := step_of(row["curve"], last):
                    shares.append(factor * step / twin["steps"])
            reached = f"{said(shares, 2)} ({len(shares)} of {len(pairs)})" if shares else "never"
            lines.append([group, measure, said(behind, 3), reached])
    return table(("row", "MDLM's", "behind when they are spent", "at MDLM's end after a share of"), lines)


def cost(row: dict, seconds: dict[str, float]) -> dict[str, float]:
    """Of one step; its seconds are those of the timed row with the same objective and times."""
    objective = row["objective"]
    uniform = objective["name"] == "lomdm" and objective["time"] == "uniform"
    second = seconds["lomdm_uniform" if uniform else objective["name"]]
    return dict(zip(MEASURES, (1.0, second, row["flops_a_step"]), strict=True))


def ends(groups: dict[str, list[dict]]) -> str:
    """The order's signals at the end: correlations of the last validation, the last fifth's deviations."""
    lines = []
    for group, rows in groups.items():
        places = [row["curve"][-1][place] for row in rows for place in PAIRS.values()]
        if None not in places:
            last = [said([row["curve"][-1][place] for row in rows], 2) for place in PAIRS.values()]
            late = [said([late_median(row, place) for row in rows], 3) for place in SIGNALS.values()]
            lines.append([group, *last, *late])
    return table(("row", *PAIRS, *SIGNALS), lines)


def late_median(row: dict, place: int) -> float:
    found = [signal[place] for signal in row["signals"] if signal[0] > 0.8 * row["steps"]]
    return statistics.median(found)


def value_at(curve: list[list], step: float) -> float:
    steps, values, *_ = zip(*curve, strict=True)
    return float(np.interp(step, steps, values))


def step_of(curve: list[list], bound: float) -> float | None:
    """The step at which a curve of validations first is at a bound, between two of them."""
    before = None
    for step, value, *_ in curve:
        if value <= bound:
            return (
                step
                if before is None
                else before[0] + (step - before[0]) * (before[1] - bound) / (before[1] - value)
            )
        before = step, value
    return None


def _figure(panels: int):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * panels, 4.2), layout="constrained", dpi=120)
    axes = figure.subplots(1, panels)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def average(rows: list[dict], place: int, key: str = "curve") -> tuple[list[float], list[float], list[float]]:
    """Steps, means over the seeds of what stands at a place of a curve, standard errors (0 of one)."""
    found = zip(*(row[key] for row in rows), strict=True)
    points = [
        (each[0][0], *mean([one[place] for one in each]))
        for each in found
        if None not in [one[place] for one in each]
    ]
    steps, means, errors = zip(*points, strict=True)
    return list(steps), list(means), [0.0 if math.isnan(error) else error for error in errors]


def draw_curves(groups: dict[str, list[dict]], kept: dict, seconds: dict[str, float]) -> None:
    """The bound by steps, by time and by FLOPs, and of the longer rows. Dashed: random order."""
    figure, panels = _figure(4)
    for number, group in enumerate(group for group in (*DRAWN, *LONG) if group in groups):
        steps, means, errors = average(groups[group], 1)
        row = groups[group][0]
        line = "--" if row["objective"]["name"] == "mdlm" or row["objective"].get("c2") == 0 else "-"
        chosen = panels[3:] if group in LONG else panels[:1] if group == "ar" else panels[:3]
        factors = [1.0, cost(row, seconds)["seconds"] / 60, row["flops_a_step"]]
        for axes, factor in zip(chosen, factors, strict=False):
            places = [step * factor for step in steps]
            axes.plot(places, means, line, color=f"C{number}", label=group)
            low, high = ([m + sign * 2 * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
            axes.fill_between(places, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
    for axes, name in zip(panels, ("steps", "minutes of one core", "training FLOPs", "steps"), strict=True):
        axes.set(xlabel=name, ylabel="validation bound, nats a token")
        axes.legend(frameon=False, fontsize="small", loc="upper right", bbox_to_anchor=(1, 0.96))
    for axes in panels[1:3]:
        axes.set_ylim(3.4, 4.6)
    panels[3].set_ylim(top=4.6)
    level = kept["unigram_nats"]
    panels[0].axhline(level, color="0.5", linestyle=":", linewidth=1)
    panels[0].annotate("entropy of single tokens", (1, level), xycoords=("axes fraction", "data"), ha="right",
                       va="bottom", fontsize="small", color="0.4")  # fmt: skip
    write(figure, "evidence_curves.png")


def write(figure, name: str) -> None:
    write_figure(figure, DOCS / name)
    print(f"drawn: docs/{name}")


def draw_order(rows: list[dict]) -> None:
    """Correlations over training, and what the gradient through the order is made of."""
    figure, panels = _figure(3)
    for name, place in PAIRS.items():
        steps, means, errors = average(rows, place)
        bars = [2 * error for error in errors]
        panels[0].errorbar(steps, means, bars, label=name, marker="o", markersize=3, capsize=2)
    panels[0].axhline(0, color="0.6", linewidth=0.8)
    panels[0].axvspan(0, 500, color="0.9", linewidth=0)
    panels[0].set(ylabel="Pearson at masked positions, mean over texts", title="lomdm: correlations")
    names = {"advantage_std": "L1 - L2", "log_q_ratio_std": "log q(z1) - log q(z2)"}
    for name, label in names.items():
        steps, means, _ = average(rows, SIGNALS[name], "signals")
        panels[1].plot(steps, means, label=label)
    panels[1].set(yscale="log", ylabel="nats a text", title="lomdm: deviations of what REINFORCE multiplies")
    steps, means, _ = average(rows, SIGNALS["exponent_std"], "signals")
    panels[2].plot(steps, means)
    panels[2].set(ylabel="standard deviation within a text", title="lomdm: exponents")
    for axes in panels:
        axes.set_xlabel("steps")
    for axes in panels[:2]:
        axes.legend(frameon=False)
    write(figure, "evidence_order.png")
