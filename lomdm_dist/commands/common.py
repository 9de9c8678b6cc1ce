"""What the commands share: options, and checks of them."""

import argparse
import contextlib
import difflib
from collections.abc import Iterable

from lomdm_dist.errors import UserError

OVERRIDES = "change the config: optim.learning_rate=1e-4 train.run=runs/mine ..."
A_CHECKPOINT = "a run folder (its latest) or a checkpoint"
MOST = {"num": 1_000_000, "steps": 100_000}  # of what is drawn: more is a slip of the hand
PLACES = ("run", "debug", "json", "data", "checkpoint", "judge", "input", "include_path", "save_samples")
WEIGHTS = "ema (default): the average over training; raw: of the last step"


def checkpoint_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, help=A_CHECKPOINT)
    parser.add_argument("--weights", choices=["ema", "raw"], default="ema", help=WEIGHTS)


def only(overrides: list[str], *allowed: str) -> list[str]:
    """Overrides of a checkpoint's config: of what may differ from its training. UserError."""
    for override in overrides:
        if not any(override.partition("=")[0].startswith(name) for name in allowed):
            raise UserError(f"override {override!r}: a trained model takes {' and '.join(allowed)} only")
    return overrides


def check_pace(path: str, overrides: list[str]) -> list[str]:
    """c1 and c2 are of the learned order's exponents. UserError."""
    from lomdm_dist.config import load_config
    from lomdm_dist.train.checkpoint import find_checkpoint

    objective = load_config(find_checkpoint(path) / "config.yaml").objective
    if not objective.pace and any(override.startswith("objective.") for override in overrides):
        kind = f"{objective.name} with a polynomial schedule" if objective.name == "lomdm" else objective.name
        raise UserError(f"{' '.join(overrides)}: {path} is {kind}; only lomdm's exponents have c1 and c2")
    return overrides


def check_names(kind: str, asked: Iterable[str], names: Iterable[str]) -> None:
    """UserError where one is none of the names."""
    for name in asked:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise UserError(f"there is no {kind} {name}; {hint}")


def positive(options, *names: str) -> None:
    """UserError where an option, or one of its list, is less than 1 or more than makes sense."""
    if not 0 <= getattr(options, "seed", 0) < 2**63:
        raise UserError(f"--seed {options.seed}: give 0 to 2**63 - 1")
    for name in names:
        given = getattr(options, name)
        for value in given if isinstance(given, list | tuple) else [given]:
            if value is not None and not 1 <= value <= MOST.get(name, value):
                most = f" to {MOST[name]:,}" if name in MOST else " or more"
                raise UserError(f"--{name.replace('_', '-')} {value}: give 1{most}")


def length_of(options, most: int, usual: int | None = None) -> int:
    """Tokens of a sample, by default `usual`, at most what the model was trained at. UserError."""
    length = options.length or min(usual or most, most)
    if length > most:
        raise UserError(f"--length {length}: the model was trained at {most}")
    return length


@contextlib.contextmanager
def processes(options):
    """The grid of the processes that a launcher started; None for one that was started plainly.

    An evaluation shares its sequences out over them (`grid.data_rank` of `grid.data_size`); each has the
    whole model. `grid.first` prints and writes the result.
    """
    from lomdm_dist.parallel.grid import join, process_grid, world_size

    if world_size() == 1:
        yield None
        return
    given = {name: str(value) for name, value in vars(options).items() if name not in PLACES}
    alike = {"the command": options.run.__name__} | {f"--{n.replace('_', '-')}": v for n, v in given.items()}
    with process_grid(store=join(alike)) as grid:
        yield grid


def device(grid=None):
    """Where this process computes."""
    import torch

    if grid is not None:
        return grid.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
