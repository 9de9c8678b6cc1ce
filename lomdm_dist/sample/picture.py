"""A trajectory as a picture: the first text of each model, coloured by step. matplotlib draws it."""

import warnings
from pathlib import Path

import numpy as np

from lomdm_dist.files import write_figure

COLUMNS, ROW, LETTER = 60, 0.25, 0.086  # letters a line; inches, of a 10-point monospaced font
INK, SOFT, LINE = "#1d1f23", "#5c6068", "#e2dfd8"
MODEL_LOOKS = (("#2f63b8", "-"), ("#b4470f", "--"), ("#2c7a4b", ":"), ("#8a3f9e", "-."))


def draw(models: list[dict], title: str, path: Path) -> None:
    """The trajectories of `trajectory.trajectory`, beside one another, and how many tokens each had when."""
    from matplotlib.figure import Figure

    texts = [_lines(model["samples"][0]["pieces"]) for model in models]
    rows = max(max(line for line, _, _ in places) + 1 for places in texts)
    height = [rows * ROW, 1.1]
    size = len(models) * (COLUMNS * LETTER + 0.4) + 0.4, sum(height) + 2.3
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(2, len(models), height_ratios=height, squeeze=False)
    title = f"First of {title}" if len(models[0]["samples"]) > 1 else title
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    for axis, model, places in zip(axes[0], models, texts, strict=True):
        _draw_text(axis, model, places, rows)
    for axis in axes[1, 1:]:
        axis.remove()
    axes[1, 0].set_subplotspec(axes[1, 0].get_gridspec()[1, :])
    _draw_curves(axes[1, 0], models)
    _draw_legend(figure, axes[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # of a script that the font lacks: a box is drawn
        write_figure(figure, path, dpi=130)


def _lines(pieces: list[str]) -> list[tuple[int, int, str]]:
    """Line, column and letters of each token: lines break between tokens, and where the text does."""
    line, column, places = 0, 0, []
    for piece in pieces:
        first, *more = piece.split("\n")
        shown = first + ("↵" if more else "")
        if column and column + len(shown) > COLUMNS:
            line, column = line + 1, 0
        places.append((line, column, shown))
        column += len(shown)
        if more:
            line, column = line + len(more), len(more[-1])
            if more[-1]:
                places[-1] = (*places[-1][:2], shown + more[-1])
    return places


def _draw_text(axis, model: dict, places: list[tuple[int, int, str]], rows: int) -> None:
    from matplotlib.patches import Rectangle

    axis.set(xlim=(0, COLUMNS), ylim=(rows, 0))
    axis.axis("off")
    axis.set_title(model["label"], loc="left", fontsize=11, fontweight="bold", color=INK, pad=18)
    axis.annotate(model["about"], (0, 1), (0, 6), "axes fraction", "offset points", color=SOFT, fontsize=8)
    for (line, column, letters), at in zip(places, model["samples"][0]["revealed_at"], strict=True):
        share = (at - 1) / max(1, model["steps"] - 1)
        colour = colour_of(share) if at else "none"
        box = {"edgecolor": SOFT if not at else "none", "linestyle": ":", "linewidth": 0.8}
        axis.add_patch(Rectangle((column, line + 0.08), len(letters), 0.84, facecolor=colour, **box))
        for n, letter in enumerate(letters):  # one by one, on a grid: no font's width is exactly LETTER
            style = {"color": INK if letter != "↵" else SOFT, "fontsize": 10, "family": "monospace"}
            axis.text(column + n + 0.5, line + 0.55, letter, ha="center", va="center", **style)


def _draw_curves(axis, models: list[dict]) -> None:
    for n, model in enumerate(models):
        revealed = np.bincount(model["samples"][0]["revealed_at"], minlength=model["steps"] + 1).cumsum()
        colour, dash = MODEL_LOOKS[n % len(MODEL_LOOKS)]
        share = np.linspace(0, 1, len(revealed))
        axis.plot(share, revealed, color=colour, linestyle=dash, label=model["label"])
    axis.set(xlim=(0, 1), ylim=(0, None))
    axis.set_xlabel("share of the steps", fontsize=8, color=SOFT)
    axis.set_ylabel("tokens revealed", fontsize=8, color=SOFT)
    axis.tick_params(colors=SOFT, labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(LINE)
    axis.legend(frameon=False, fontsize=8)


def _draw_legend(figure, axes) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap

    scale = ListedColormap([colour_of(v) for v in np.linspace(0, 1, 64)])
    bar = figure.colorbar(
        ScalarMappable(cmap=scale), ax=axes, location="bottom", shrink=0.3, aspect=25, pad=0.03, anchor=(0, 1)
    )
    bar.set_ticks([0, 1], labels=["first step", "last step"])
    for label, side in zip(bar.ax.get_xticklabels(), ("left", "right"), strict=True):
        label.set_horizontalalignment(side)
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=SOFT)
    bar.outline.set_visible(False)


def colour_of(v: float) -> tuple[float, float, float]:
    """The page's scale in its light form: v in [0, 1] -> sRGB. Even steps of v look even (OKLCH)."""
    return oklch(0.96 - 0.24 * v, 0.035 + 0.075 * v, 110 + 175 * v)


def oklch(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """OKLCH (hue in degrees) -> sRGB in [0, 1], clipped. https://bottosson.github.io/posts/oklab"""
    a, b = chroma * np.cos(np.radians(hue)), chroma * np.sin(np.radians(hue))
    to_cones = [
        [1, 0.3963377774, 0.2158037573],
        [1, -0.1055613458, -0.0638541728],
        [1, -0.0894841775, -1.2914855480],
    ]
    to_linear = [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
    linear = np.clip(np.array(to_linear) @ (np.array(to_cones) @ [lightness, a, b]) ** 3, 0, 1)
    gamma = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return tuple(gamma.tolist())
