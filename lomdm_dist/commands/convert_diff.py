"""`lomdm convert diff`: what differs between two checkpoints or exports."""

import argparse
from pathlib import Path

from lomdm_dist.commands.common import WEIGHTS


def add_options(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, help="a run, a checkpoint, an export, or a file of weights")
    parser.add_argument("--weights", choices=["ema", "raw"], default="ema", help=f"of checkpoints; {WEIGHTS}")
    parser.set_defaults(run=_diff)


def _diff(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.convert.diff import diff, lines, open_side

    result = diff(open_side(options.a, options.weights), open_side(options.b, options.weights))
    print("\n".join(lines(result)))
    machine.write_result(options.json, result, {"weights": options.weights})
