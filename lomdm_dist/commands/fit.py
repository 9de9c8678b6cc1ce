"""`lomdm fit`: scaling laws of a sweep, and what one objective gains over another."""

import argparse
from pathlib import Path

from lomdm_dist.commands.common import positive
from lomdm_dist.errors import UserError
from lomdm_dist.secrets import say

POINTS = "points.json or points.csv of a sweep, or a CSV with objective, flops_per_token, tokens, loss"
OBJECTIVE = "which; the first is what the others are measured against (default: all, mdlm first)"
CURVE = "take the validations during a training, too, from this share of its tokens on (0.25)"
BINS = "parabolas over so many ranges of compute, where the points do not form budgets; with --curve: budgets"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("points", nargs="+", type=Path, metavar="POINTS", help=POINTS)
    parser.add_argument("--objective", nargs="+", metavar="NAME", help=OBJECTIVE)
    parser.add_argument("--curve", nargs="?", type=float, const=0.25, metavar="SHARE", help=CURVE)
    parser.add_argument("--bins", type=int, metavar="K", help=BINS)
    parser.add_argument(
        "--bootstrap", type=int, default=1000, metavar="DRAWS", help="for the intervals (1000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (0)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it")
    parser.set_defaults(run=_fit)


def _fit(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.files import check_figure
    from lomdm_dist.study import scaling_figure, scaling_study, scaling_table
    from lomdm_dist.study.scaling_points import read_trainings

    positive(options, "bins")
    if options.bootstrap < 100:
        raise UserError(f"--bootstrap {options.bootstrap}: a 95% interval takes 100 draws or more")
    if options.curve is not None and not 0 <= options.curve < 1:
        raise UserError(f"--curve {options.curve:g}: give a share of a training's tokens, 0 to 1")
    if options.plot:
        check_figure(options.plot)
    trainings, left_out, repeated = read_trainings(options.points)
    by_objective = _by_objective(trainings, options.objective)
    if options.plot and any(one.flops_per_token is None for those in by_objective.values() for one in those):
        raise UserError("--plot draws losses against compute, and some rows have no flops_per_token")
    say(f"fit: {len(trainings)} trainings of {', '.join(by_objective)}, {options.bootstrap} draws\n")
    of_all = (
        f"{left_out} of {len(trainings) + repeated + left_out} rows left out: their trainings did not finish"
    )
    try:
        fits = scaling_study.fit_all(
            by_objective, options.bootstrap, options.seed, options.curve, options.bins
        )
    except UserError as error:
        raise UserError(
            f"{error}; {of_all}: let the sweep finish first" if left_out else str(error)
        ) from None
    base, *others = fits
    result = {
        "objectives": {name: scaling_study.describe(fits[name], by_objective[name]) for name in fits},
        "base": base,
        "gain": {name: scaling_study.gain(fits[base], fits[name], by_objective[name]) for name in others},
        "draws": options.bootstrap,
        "unfinished": left_out,
        "repeated": repeated,
        "convention": scaling_study.CONVENTION,
    }
    print(scaling_table.say(result))
    if left_out:
        print(f"\n{of_all}")
    if repeated:
        print(f"\n{repeated} rows left out: each repeats a training that was given already")
    if options.plot:
        scaling_figure.draw(fits, options.plot)
        print(f"drawn: {options.plot}")
    machine.write_result(options.json, result, {})


def _by_objective(trainings: list, wanted: list[str] | None) -> dict[str, list]:
    """The trainings of each objective that is asked for, in that order. UserError."""
    there = list(dict.fromkeys(training.objective for training in trainings))
    names = list(dict.fromkeys(wanted or sorted(there, key=lambda name: name != "mdlm")))
    if wanted and len(wanted) > len(names):
        raise UserError(f"--objective {' '.join(wanted)}: give each objective once")
    for name in names:
        if name not in there:
            raise UserError(f"--objective {name}: the points are of {', '.join(there)}")
    return {name: [one for one in trainings if one.objective == name] for name in names}
