"""`lomdm bench step`: what a step costs, and each trick's gain."""

import argparse
from pathlib import Path

from lomdm_dist.commands.common import OVERRIDES, device, positive
from lomdm_dist.files import check_figure
from lomdm_dist.secrets import say


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="a YAML file of a LoMDM, e.g. configs/owt.yaml")
    parser.add_argument("--sequences", type=int, default=8, help="masked sequences in a micro-batch (8)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each row is measured (5)")
    parser.add_argument(
        "--rows", nargs="+", metavar="NAME", help="some of the rows, by their names in the table"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES)
    parser.set_defaults(run=_bench_step)


def _bench_step(options) -> None:
    positive(options, "sequences", "rounds")
    say(f"bench step: {options.rounds} rounds of {options.sequences} sequences")
    from lomdm_dist import machine
    from lomdm_dist.config import load_config
    from lomdm_dist.study import bench

    if options.plot:
        check_figure(options.plot)
    config = load_config(options.config, options.overrides)
    result = bench.bench_step(config, options.sequences, options.rounds, device(), options.rows)
    print(bench.as_markdown(result))
    if options.plot:
        bench.draw(result, options.plot)
        print(f"drawn: {options.plot}")
    machine.write_result(options.json, result, config.as_dict())
