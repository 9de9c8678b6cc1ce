"""Tables and figures of benchmarks/results/evidence.json, for docs/evidence.md."""

import math
import statistics
import sys
from pathlib import Path

from lomdm_dist.files import write_figure

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAIRS = {"A, hatA": 2, "A, confidence": 3, "hatA, confidence": 4}  # places in a row's curve
SIGNALS = {"advantage_std": 1, "log_q_ratio_std": 2, "exponent_std": 3}
UNCUT, CUT = "nll_per_token", "nll_per_token_cut"
MDLM = ("mdlm", "mdlm_long")


def report(kept: dict) -> None:
    groups = by_group(kept["rows"])
    print(bounds(groups), differences(groups), worth(groups), paces(groups), sep="\n\n")
    if "seconds_a_step" not in kept:
        sys.exit("no seconds a step are kept, so no more is told: python -m benchmarks.evidence speed")
    seconds = {group: statistics.median(found) for group, found in kept["seconds_a_step"]["rows"].items()}
    print("", *ratios(groups, seconds), sep="\n\n")
    draw_curves(groups, kept, seconds)
    draw_order(groups)


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
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


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


def differences(groups: dict[str, list[dict]]) -> str:
    """Of each row to MDLM's of the same seed and steps: both saw the texts in the same order."""
    twins = {(row["seed"], row["steps"]): row for name in MDLM for row in groups.get(name, [])}
    lines = []
    for group, rows in groups.items():
        pairs = [(row, twins.get((row["seed"], row["steps"]))) for row in rows]
        pairs = [(row, twin) for row, twin in pairs if twin]
        if pairs and group not in MDLM:
            found = [[less(row[key], twin[key]) for row, twin in pairs] for key in (UNCUT, CUT)]
            lines.append([group, len(pairs), *map(said, found)])
    return table(("row less mdlm", "seeds", "uncut", "cut at 1e-3"), lines)


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


def ratios(groups: dict[str, list[dict]], seconds: dict[str, float]) -> list[str]:
    """When the learned orders are where MDLM ends, by validation during training: shares of its own."""
    lines = []
    base = groups.get("mdlm", [])
    for group in ("lomdm", "lomdm_uniform"):
        shares = []
        for row in groups.get(group, []):
            twin = next((b for b in base if b["seed"] == row["seed"]), None)
            if twin and (step := step_of(row["curve"], twin["curve"][-1][1])):
                shares.append(step / twin["steps"])
        if not shares:
            lines.append(f"{group}: never at MDLM's last bound within its own steps")
            continue
        cost, work = (
            seconds[group] / seconds["mdlm"],
            groups[group][0]["flops_a_step"] / base[0]["flops_a_step"],
        )
        times = {"steps": 1.0, "seconds": cost, "FLOPs": work}
        text = ", ".join(
            f"{said([share * factor for share in shares], 2)} of its {name}" for name, factor in times.items()
        )
        lines.append(
            f"{group}: at MDLM's last bound after {text} ({len(shares)} of {len(groups[group])} seeds)"
        )
    return lines


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * panels, 4.2), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
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
    """The bound by steps, by time and by FLOPs, of the rows of three seeds."""
    figure, panels = _figure(3)
    for number, group in enumerate(group for group in groups if group in seconds):
        steps, means, errors = average(groups[group], 1)
        factors = (1.0, seconds[group] / 60, groups[group][0]["flops_a_step"])
        for axes, factor in zip(panels, factors, strict=True):
            places = [step * factor for step in steps]
            axes.plot(places, means, color=f"C{number}", label=group)
            low, high = ([m + sign * 2 * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
            axes.fill_between(places, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
    for axes, name in zip(panels, ("steps", "minutes of one core", "training FLOPs"), strict=True):
        axes.axhline(kept["unigram_nats"], color="0.5", linestyle=":", linewidth=1)
        axes.set(xlabel=name, ylabel="validation bound, nats a token")
    panels[0].text(
        0, kept["unigram_nats"], " entropy of single tokens", va="bottom", fontsize="small", color="0.4"
    )
    panels[0].legend(frameon=False)
    write_figure(figure, DOCS / "evidence_curves.png")


def draw_order(groups: dict[str, list[dict]]) -> None:
    """Correlations over training, and what the gradient through the order is made of."""
    figure, panels = _figure(2)
    rows = groups["lomdm"]
    for name, place in PAIRS.items():
        steps, means, errors = average(rows, place)
        panels[0].errorbar(steps, means, errors, label=name, marker="o", markersize=3, capsize=2)
    panels[0].axhline(0, color="0.6", linewidth=0.8)
    panels[0].set(
        xlabel="steps", ylabel="Pearson, mean over texts", title="lomdm: correlation at masked positions"
    )
    panels[0].legend(frameon=False)
    for name, place in SIGNALS.items():
        steps, means, _ = average(rows, place, "signals")
        panels[1].plot(steps, means, label=name)
    panels[1].set(xlabel="steps", yscale="log", title="lomdm: L1 - L2, log q(z1) - log q(z2), exponents")
    panels[1].legend(frameon=False)
    write_figure(figure, DOCS / "evidence_order.png")
