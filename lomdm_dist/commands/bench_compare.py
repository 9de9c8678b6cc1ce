"""`lomdm bench compare`: two results of a bench, row by row."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "a", type=Path, metavar="A.json", help="of `bench throughput` or `bench step`, before"
    )
    parser.add_argument("b", type=Path, metavar="B.json", help="the same, after; ratios are of B over A")
    parser.set_defaults(run=_compare)


def _compare(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.study import compare

    result = compare.compare(compare.read_result(options.a), compare.read_result(options.b))
    print(compare.as_markdown(result))
    machine.write_result(options.json, result, {})
