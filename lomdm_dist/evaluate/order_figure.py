"""The figure of `lomdm eval order`."""

from pathlib import Path

from lomdm_dist.files import write_figure

NAMES = {"A_hatA": "A, hatA", "A_confidence": "A, confidence", "hatA_confidence": "hatA, confidence"}


def draw(result: dict, path: Path) -> None:
    """Correlations by time, parts of speech early and late, exponents by frequency; of what there is."""
    from matplotlib.figure import Figure

    panels = [_correlations] if "correlations" not in result["missing"] else []
    panels += [_speech] if result["speech"] else []
    panels += [_frequency] if result["exponent_by_frequency"] else []
    figure = Figure(figsize=(4.6 * max(1, len(panels)), 3.8), layout="constrained", dpi=120)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        axes.spines[["top", "right"]].set_visible(False)
        panel(axes, result)
    write_figure(figure, path)


def _correlations(axes, result: dict) -> None:
    thirds = ("early", "middle", "late")
    for shift, (pair, name) in enumerate(NAMES.items()):
        found = [result["correlations"][third][pair] for third in thirds]
        places = [k + 0.08 * (shift - 1) for k in range(3)]
        axes.errorbar(
            places,
            [value["mean"] for value in found],
            [value["standard_error"] for value in found],
            marker="o",
            capsize=3,
            label=name,
        )
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xticks(range(3), ["early\nt > 2/3", "middle\n", "late\nt <= 1/3"])
    axes.set(title="Correlation at masked positions", ylabel="Pearson, mean over texts")
    axes.legend(frameon=False, fontsize="small")


def _speech(axes, result: dict) -> None:
    classes = ("noun", "verb", "article", "preposition")
    for shift, (name, part) in zip((-0.2, 0.2), result["speech"].items(), strict=True):
        found = [part["shares"].get(c, {"mean": 0.0, "standard_error": 0.0}) for c in classes]
        axes.bar(
            [k + shift for k in range(len(classes))],
            [value["mean"] for value in found],
            0.38,
            yerr=[value["standard_error"] for value in found],
            capsize=3,
            label="{}: steps {}-{}".format(name, *part["steps"]),
        )
    axes.set_xticks(range(len(classes)), classes)
    axes.set(title="Parts of speech, as they appear", ylabel="share of the tokens revealed")
    axes.legend(frameon=False, fontsize="small")


def _frequency(axes, result: dict) -> None:
    rows = [row for row in result["exponent_by_frequency"] if row["types"]]
    middles = [(row["least"] * row["most"]) ** 0.5 for row in rows]
    values, errors = [row["exponent"] for row in rows], [row["standard_error"] for row in rows]
    axes.errorbar(middles, values, errors, marker="o", capsize=3)
    axes.set_xscale("log")
    axes.set(
        title="Exponent by frequency of the token",
        xlabel="occurrences in the data",
        ylabel="mean exponent (large: early)",
    )
