"""`lomdm bench profile`: where the time of a run's traced steps went."""

import argparse
from pathlib import Path

from lomdm_dist.errors import UserError

CONVENTION = {
    "seconds": "means over the traced steps; all cells of a trace add up to its step",
    "phases": "of ops/phase.py, forward and backward; other: what none covers",
    "kinds": "matrix products; attention, fused; pointwise: also norms, reductions, gathers; communication "
    "that is exposed; copies: also fills and concatenations; idle: on a CPU Python and torch around its "
    "operations, on a GPU no kernel",
    "cpu": "times of their own of the operations of the thread that trains",
    "cuda": "times of kernels, over all streams, in the phase that launched them",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a run folder, whose traces are read, or a trace")
    parser.set_defaults(run=_bench_profile)


def _bench_profile(options) -> None:
    from lomdm_dist import machine
    from lomdm_dist.study.trace import as_text, read_trace, where_time_went

    traces = {}
    for path in _traces(options.path):
        traces[str(path)] = where_time_went(read_trace(path))
        print(f"{path}\n{as_text(traces[str(path)])}\n")
    machine.write_result(options.json, {"traces": traces, "convention": CONVENTION}, _config(options.path))


def _traces(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("profile/trace-*.json.gz")) or sorted(path.glob("trace-*.json.gz"))
    if not found:
        raise UserError(
            f"{path} has no traces: train with train.profile.steps=[FIRST,LAST], which writes them to "
            "RUN/profile"
        )
    return found


def _config(path: Path) -> dict:
    """The config of the run that was traced, where it is known."""
    from lomdm_dist.config import load_config

    files = [folder / "config.yaml" for folder in (path, *path.resolve().parents[:2])]
    return next((load_config(file).as_dict() for file in files if file.is_file()), {})
