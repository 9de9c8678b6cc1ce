"""What `lomdm fit` prints."""

import numpy as np

from lomdm_dist.study.scaling_law import PUBLISHED, PUBLISHED_SURFACE
from lomdm_dist.study.scaling_study import AHEAD, SOURCE

FAR = 0.01  # of log loss: trainings differ by less


def say(result: dict) -> str:
    """The result in tables; an interval stands in brackets, what is extrapolated has a star."""
    parts = [_table(name, found) for name, found in result["objectives"].items()]
    parts += [_gain_table(result["base"], name, found) for name, found in result["gain"].items()]
    parts.append(
        f"intervals: 95%, {result['draws']} draws. published: {SOURCE};\n"
        "other data and tokenizer, M without the vocabulary projection. --json has all conventions"
    )
    return "\n\n".join(parts)


def _table(name: str, found: dict) -> str:
    top = found["compute"] and found["compute"][1]
    head = f"{name}: {found['trainings']} trainings, {found['points']} points"
    lines = [head + (f", {found['compute'][0]:.2g} to {top:.2g} FLOPs" if top else "")]
    methods = found["surface"], found["parabolas"]
    if any(methods):
        lines += _aligned([*_laws(*methods), *_best(*methods, top)])
    if found["surface"]:
        rms, largest = (found["surface"][key] for key in ("residual_rms", "largest_residual"))
        lines.append(f"  residuals of the surface: {rms:.2%} rms, {largest:.2%} at most")
        if rms > FAR:
            lines.append("  that is far from such a surface: early training? with --curve take a later share")
    if found["surface_of_parameters"]:
        fit = {key: _cell(value) for key, value in found["surface_of_parameters"].items()}
        lines.append("  in parameters: L(N, D) = {E} + {A} N^-{a} + {B} D^-{b}".format(**fit))
    for what, reason in found["missing"].items():
        lines.append(
            f"  {what}: {reason}" if reason.startswith("not determined") else f"  no {what}: {reason}"
        )
    return "\n".join(lines)


def _laws(surface: dict | None, parabolas: dict | None) -> list[list[str]]:
    """Coefficients and exponents, the published ones beside them."""
    theirs, implied, own = PUBLISHED_SURFACE, PUBLISHED_SURFACE.frontier(), PUBLISHED
    labels = [
        ("E, nats a token", "E", theirs.irreducible, None),
        ("A", "A", np.exp(theirs.log_a), None),
        ("a", "a", theirs.alpha, None),
        ("B", "B", np.exp(theirs.log_b), None),
        ("b", "b", theirs.beta, None),
        ("m of M* ~ C^m", "size_exponent", implied.size_exponent, own.size_exponent),
        ("d of D* ~ C^d", "tokens_exponent", 1 - implied.size_exponent, 1 - own.size_exponent),
        ("g of L* = E + K C^-g", "loss_exponent", implied.gamma, None),
        ("g of L* = K C^-g", "power_law_exponent", None, own.gamma),
    ]
    rows = [["", "surface", "parabolas", "published surface", "published parabolas"]]
    for label, key, *published in labels:
        fits = [_told(method, key) for method in (surface, parabolas)]
        rows.append([label, *fits, *("-" if number is None else f"{number:.4g}" for number in published)])
    return rows


def _best(surface: dict | None, parabolas: dict | None, top: float) -> list[list[str]]:
    """The best loss at the largest compute of the data and beyond, and the best size there."""
    rows = []
    ahead = [(k, times) for k, times in enumerate(AHEAD) if np.isfinite(times * top)]
    for k, times in ahead:
        label = f"L* at C = {times * top:.2g}" + (f", {times} x the data *" if times > 1 else "")
        fits = [_told(method and method["best"][k], "loss") for method in (surface, parabolas)]
        published = (f"{law.loss(times * top):.4g}" for law in (PUBLISHED_SURFACE.frontier(), PUBLISHED))
        rows.append([label, *fits, *published])
    for label, key in (("M*", "flops_per_token"), ("D*", "tokens")):
        fits = [_told(method and method["best"][0], key) for method in (surface, parabolas)]
        rows.append([f"{label} at C = {top:.2g}", *fits, "", ""])
    return rows


def _gain_table(base: str, name: str, found: dict) -> str:
    lines = [
        f"compute-equivalent gain of {name} over {base}: {base} takes so many times the compute for its loss"
    ]
    if not found["frontier"]:
        lines.append("  on the frontier it cannot be had: it takes a method that determines the law of both")
    else:
        if not found["overlap"]:
            lines.append("  their ranges of compute do not overlap: all of it is extrapolated")
        rows = [["on the frontier, at C", *found["frontier"]]]
        for budget in zip(*found["frontier"].values(), strict=True):
            rows.append([f"{budget[0]['compute']:.2g}", *map(_gain_cell, budget)])
        lines += _aligned(rows)
    if found["at_size"]:
        rows = [["at the same M, D of", name, f"by more tokens of {base}, surface"]]
        for one in found["at_size"]:
            rows.append([f"M = {one['flops_per_token']:.3g}", f"D = {one['tokens']:.3g}", _gain_cell(one)])
        lines += _aligned(rows)
    told = found["frontier"] or found["at_size"]
    lines += ["  * extrapolated: no trainings of that compute, size or tokens"] if told else []
    return "\n".join(lines)


def _gain_cell(one: dict) -> str:
    return _cell(one["gain"]).replace("inf", "never") + " *" * one["extrapolated"]


def _told(found: dict | None, key: str) -> str:
    """A fitted number, or that the losses do not determine it; what is not finite is left out."""
    if not found or key not in found:
        return "-"
    number = found[key]
    if number is None:
        return "not determined"
    if not all(end is None or np.isfinite(end) for end in number.values()):
        number = {"value": number["value"], "low": None, "high": None}
    return _cell(number if np.isfinite(number["value"]) else None)


def _cell(number: dict | None) -> str:
    if number is None:
        return "-"
    said, low, high = (number[key] if number[key] is None else f"{number[key]:.4g}" for key in number)
    return said if low is None else f"{said} [{low}, {high}]"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return ["  " + "  ".join(row).rstrip() for row in padded]
