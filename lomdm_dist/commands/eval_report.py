"""`lomdm eval report`: one page of a run, what it learned and what its evaluations found."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", type=Path, metavar="RUN", help="a run; results are read from it, and RUN/eval"
    )
    parser.add_argument("--out", type=Path, help="the folder to write (default: RUN/report)")
    parser.set_defaults(run=_report)


def _report(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.evaluate.report import EVALUATIONS, report

    out = options.out or options.run_folder / "report"
    missing = report(options.run_folder, out)
    print(f"made: {out / 'report.html'}, {out / 'report.md'}")
    if missing:
        print(f"not run, and said there: {', '.join(missing)}")
    done = [name for name in EVALUATIONS if name not in missing]
    machine.write_result(options.json, {"out": str(out), "found": done, "missing": missing}, {})
