"""The figure of `lomdm fit`."""

from functools import partial
from pathlib import Path

import numpy as np

from lomdm_dist.files import write_figure
from lomdm_dist.study.scaling_law import PUBLISHED, PUBLISHED_SURFACE, Points
from lomdm_dist.study.scaling_study import WILD, Fits

STYLES = {"surface": "-", "parabolas": "--"}
COMPUTE = "training compute C, FLOPs"
SIZE = "M, training FLOPs a token"
REFERENCE = "other data and tokenizer"
AHEAD = 5  # times the largest compute: how far the lines go beyond the data
WIDTH, HEIGHT = 4.6, 3.8


@WILD
def draw(fits: dict[str, Fits], path: Path) -> None:
    """Best losses, best sizes, residuals, the parabolas of each objective, and gains over the first."""
    from matplotlib.figure import Figure

    panels = [_losses, _sizes, _residuals] if any(one.surface for one in fits.values()) else [_losses, _sizes]
    panels += [partial(_parabolas, name=name) for name, one in fits.items() if one.parabolas]
    base, *others = (one.frontiers.keys() for one in fits.values())
    panels += [_gains] if any(base & one for one in others) else []
    columns = (len(panels) + 1) // 2
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * 2), layout="constrained", dpi=120)
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(2, columns, number)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xscale("log")
        panel(axes, fits)
        axes.title.set_fontsize("medium")
    write_figure(figure, path)


def _span(*points: Points, ahead: float = AHEAD) -> np.ndarray:
    low = min(one.compute.min() for one in points)
    return np.geomspace(low, ahead * max(one.compute.max() for one in points), 100)


def _line(axes, at: np.ndarray, value: np.ndarray, draws: np.ndarray, style: str, colour: str, label: str):
    """value [k], with the middle 95% of the draws [R, k]."""
    axes.plot(at, value, style, color=colour, linewidth=1.4, label=label)
    low, high = np.nanquantile(draws, [0.025, 0.975], axis=0, method="nearest")
    axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


def _laws(axes, fits: dict[str, Fits], what: str) -> None:
    """Loss or size on the frontiers of all, with the draws' band."""
    for number, (name, one) in enumerate(fits.items()):
        at = _span(one.points)
        for method, (law, draws) in one.frontiers.items():
            band = np.stack([getattr(draws, what)(compute) for compute in at], axis=1)
            _line(axes, at, getattr(law, what)(at), band, STYLES[method], f"C{number}", f"{name}, {method}")


def _reference(axes, at: np.ndarray, value: np.ndarray, style: str, method: str, shown: tuple) -> None:
    """A published line, on the plot as the data made it."""
    off = "" if ((value >= shown[0]) & (value <= shown[1])).any() else " (off the plot)"
    axes.plot(at, value, style, color="0.5", linewidth=1.1, label=f"published{off}, {REFERENCE}: {method}")


def _losses(axes, fits: dict[str, Fits]) -> None:
    for number, one in enumerate(fits.values()):
        for run in np.unique(one.points.run):
            of = one.points.run == run
            line = {"marker": "o", "markersize": 2.5, "markeredgewidth": 0, "linewidth": 0.6, "alpha": 0.5}
            axes.plot(one.points.compute[of], one.points.loss[of], color=f"C{number}", **line)
    axes.set_yscale("log")
    _laws(axes, fits, "loss")
    shown, at = axes.get_ylim(), _span(*(one.points for one in fits.values()))
    _reference(axes, at, PUBLISHED.loss(at), ":", "parabolas", shown)
    _reference(axes, at, PUBLISHED_SURFACE.frontier().loss(at), "-.", "surface", shown)
    axes.set(title=f"Best loss for a budget; lines to {AHEAD} x the data", xlabel=COMPUTE)
    axes.set(ylabel="loss, nats a token", ylim=shown)
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.tick_params(axis="y", which="minor", labelsize="small")
    axes.legend(frameon=False, fontsize="x-small")


def _sizes(axes, fits: dict[str, Fits]) -> None:
    axes.set_yscale("log")
    _laws(axes, fits, "size")
    for number, one in enumerate(fits.values()):
        if one.parabolas:
            kept, found = one.parabolas.kept, one.parabolas
            lowest = found.centre - found.coefficients[:, 1] / (2 * found.coefficients[:, 2])
            axes.scatter(found.compute[kept], np.exp(lowest[kept]), s=18, color=f"C{number}", zorder=3)
    shown, at = axes.get_ylim(), _span(*(one.points for one in fits.values()))
    _reference(axes, at, PUBLISHED.size(at), ":", "parabolas", shown)
    axes.set(title="Best size for a budget", xlabel=COMPUTE, ylabel=SIZE, ylim=shown)
    axes.legend(frameon=False, fontsize="x-small")


def _residuals(axes, fits: dict[str, Fits]) -> None:
    for number, (name, one) in enumerate(fits.items()):
        if one.surface:
            points = one.points
            residual = 100 * np.log(points.loss / one.surface[0].loss(points.size, points.tokens))
            axes.scatter(
                points.compute, residual, s=10, color=f"C{number}", alpha=0.7, linewidth=0, label=name
            )
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set(title="Residuals of the surface", xlabel=COMPUTE, ylabel="loss above the surface, %")
    axes.legend(frameon=False, fontsize="x-small")


def _parabolas(axes, fits: dict[str, Fits], name: str) -> None:
    from matplotlib import colormaps

    found = fits[name].parabolas
    for k, compute in enumerate(found.compute):
        colour = colormaps["viridis"](0.9 * k / (len(found.compute) - 1))
        size, loss = found.points.size[found.budget == k], found.points.loss[found.budget == k]
        axes.scatter(size, loss, s=12, color=colour)
        at = np.geomspace(size.min(), size.max(), 60)
        log_loss = np.polynomial.polynomial.polyval(np.log(at) - found.centre[k], found.coefficients[k])
        style = "-" if found.kept[k] else ":"
        axes.plot(at, np.exp(log_loss), style, color=colour, linewidth=1.2, label=f"C = {compute:.2g}")
    axes.set(title=f"{name}: a parabola a budget", xlabel=SIZE, ylabel="loss, nats a token")
    axes.legend(frameon=False, fontsize="x-small", loc="lower left")


def _gains(axes, fits: dict[str, Fits]) -> None:
    base, first = next(iter(fits.items()))
    for number, (name, one) in enumerate(fits.items()):
        at = _span(one.points, ahead=1)
        for method in one.frontiers if name != base else ():
            if method in first.frontiers:
                value, draws = (
                    np.stack([mine.compute_for(theirs.loss(compute)) / compute for compute in at], axis=-1)
                    for mine, theirs in zip(first.frontiers[method], one.frontiers[method], strict=True)
                )
                _line(axes, at, value, draws, STYLES[method], f"C{number}", f"{name}, {method}")
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set(title=f"Compute-equivalent gain over {base}", xlabel=COMPUTE)
    axes.set(ylabel=f"compute of {base} for the same loss, times")
    axes.legend(frameon=False, fontsize="x-small")
