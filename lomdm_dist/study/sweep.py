"""A sweep: a base config, the points that differ from it, and what is on disk of each.

    about: heading of the table and the plot
    base: configs/lm1b.yaml                     as in --config
    set: {train.steps: 500000}                  changes of the base that all points share
    axes:                                       every combination of their values is a point
      objective.name: [mdlm, lomdm]             an axis is a key of the config and its values,
      size:                                     or names, each with the keys that it sets
        small: {model.width: 512, model.blocks: 8}
        large: {model.width: 1024, model.blocks: 24}
    seeds: [0, 1, 2]                            each point once a seed; by default the base's alone
    x: parameters                               of the plot: an axis, by default the last; parameters; flops
    y: loss                                     or tokens_per_second
    runs: runs/model_size                       by default runs/NAME-OF-THE-FILE; point P trains in RUNS/P
    paper: {label: what of, ppl: {lomdm-small: 34.3}}    published numbers of points, to stand beside

A list of points is one axis of names. Base, data and runs are read from the folder that the command runs in.
"""

import contextlib
import difflib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lomdm_dist.config import Config, keys_of, load_config, read_values
from lomdm_dist.errors import UserError
from lomdm_dist.model.flops import step_flops_a_sequence
from lomdm_dist.train.checkpoint import LATEST, STATE, find_checkpoint, parameter_shapes

KEYS = ("about", "base", "set", "axes", "seeds", "x", "y", "runs", "paper")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")  # a folder's, and a word of a command line
LONGEST = 255 - len(".log")  # name, so that a file system takes its log's
OWN = ("points.json", "points.csv", "table.md", "plot.png", "lock", "slurm")  # a sweep's files in its folder
NUMBERS = ("parameters", "flops")  # that may be the plot's x, besides an axis
MEASURES = ("loss", "tokens_per_second")  # that may be its y
CONVENTION = {
    "loss": "validation bound after the last step, of the first train.valid_sequences sequences, in nats a "
    "predicted token; not cut; exact for ar",
    "weights": "raw: of the last step, not their average",
    "flops": "tokens x flops_per_token: forward and backward, matrix products and attention, counted from "
    "the shapes (model/flops.py), without the embedding's lookup",
    "tokens": "clean ones that were predicted, all epochs counted; padding is not",
    "parameters": "all, embeddings and scheduler heads too",
    "seconds": "training alone: without start, validation and saving",
}
# what makes a run another one: the rest changes speed, memory and what is kept
DECISIVE = {
    "model": Config.model_fields["model"].annotation.model_fields.keys(),
    "objective": None,  # all that it has
    "optim": Config.model_fields["optim"].annotation.model_fields.keys(),
    "evaluate": Config.model_fields["evaluate"].annotation.model_fields.keys(),
    "data": {"train", "valid", "attend", "window"},
    "train": {"start_from", "global_batch", "precision", "seed", "valid_sequences"},
}


class Diverged(UserError):
    """A training that is done, and has come to nothing."""


@dataclass(frozen=True)
class Point:
    """One training. `group` is its name without the seed, `choices` the name of its value on each axis."""

    name: str
    group: str
    choices: dict[str, str]
    overrides: tuple[str, ...]  # all, train.run too
    config: Config

    @property
    def run(self) -> Path:
        return self.config.train.run

    @property
    def log(self) -> Path:
        """What its processes print."""
        return self.run.with_name(self.name + ".log")

    @cached_property
    def identity(self) -> str:
        """A hash of the config but for its folder: a point that failed is tried again when it has changed."""
        values = self.config.as_dict()
        del values["train"]["run"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Sweep:
    name: str
    about: str
    base: Path
    folder: Path  # RUNS
    axes: dict[str, tuple[str, ...]]  # names of values
    numbers: dict[str, tuple[float, ...]]  # the values themselves, of axes where all are numbers
    x: str
    y: str
    paper: dict | None  # label, ppl by group
    points: tuple[Point, ...]
    config: Config  # the base, with what all points share


def load_sweep(path: Path, overrides: list[str]) -> Sweep:
    """Every point of a sweep file, its config checked; `overrides` change all of them. UserError."""
    values = read_values(path, "sweep", "base:, axes:")
    _check_plain(values, path)
    _check_keys(values, path)
    _check_kinds(values, path)
    axes = {str(axis): _choices(str(axis), given, path) for axis, given in values["axes"].items()}
    _check_axes(values["axes"], path)
    names = {axis: tuple(choices) for axis, choices in axes.items()}
    numbers = {str(axis): found for axis, given in values["axes"].items() if (found := _numbers(given))}
    shared = [f"{key}={_text(value)}" for key, value in values.get("set", {}).items()]
    if seeds := values.get("seeds"):
        axes["seed"] = {f"s{seed}": [f"train.seed={seed}"] for seed in seeds}
    _check_free(overrides, _owners(shared, axes, path), path)
    base, folder = Path(values["base"]), Path(values.get("runs", Path("runs") / path.stem))
    _check_folder(folder, path)
    points = [
        _point(base, folder, dict(zip(axes, combination, strict=True)), axes, shared, overrides)
        for combination in itertools.product(*axes.values())
    ]
    _check_distinct(points, path)
    _check_names([point.name for point in points], path)
    x, y = values.get("x", list(names)[-1]), values.get("y", MEASURES[0])
    if x not in (*names, *NUMBERS):
        raise UserError(f"sweep {path}: x is {x}, but there are {', '.join((*names, *NUMBERS))}")
    if y not in MEASURES:
        raise UserError(f"sweep {path}: y is {y}, but there are {' and '.join(MEASURES)}")
    paper = _paper(values.get("paper"), {point.group for point in points}, path)
    about, config = values.get("about", path.stem), load_config(base, [*shared, *overrides])
    return Sweep(path.stem, about, base, folder, names, numbers, x, y, paper, tuple(points), config)


def _check_plain(values: dict, path: Path) -> None:
    """That the values are a tree of text, numbers, lists and sections, without YAML's merges."""
    try:
        json.dumps(values)
    except ValueError:
        raise UserError(
            f"sweep {path}: an anchor (&name) holds an alias (*name) of itself: write out what it stands for"
        ) from None
    except (TypeError, RecursionError) as error:
        raise UserError(
            f"sweep {path}: text, numbers, lists and sections are wanted, not too deep ({error})"
        ) from None
    if any("<<" in section for section in _sections(values)):
        raise UserError(f"sweep {path}: merges (<<) are not supported: write the keys out")


def _sections(value) -> Iterator[dict]:
    """All that a value holds, itself too."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _sections(item)


def _check_keys(values: dict, path: Path) -> None:
    for key in values.keys() - set(KEYS):
        near = difflib.get_close_matches(str(key), KEYS, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(KEYS)}"
        raise UserError(f"sweep {path}: unknown key {key}{hint}")
    for key in ("base", "axes"):
        if not values.get(key):
            raise UserError(
                f"sweep {path}: {key} is missing" + (": it has no points" if key == "axes" else "")
            )


def _check_kinds(values: dict, path: Path) -> None:
    kinds = {"base": "a path", "runs": "a path", "about": "text", "x": "text", "y": "text", "seeds": "a list"}
    for key, given in values.items():
        wanted = kinds.get(key, "a section")
        kind = {"a list": list, "a section": dict}.get(wanted, str)
        if not isinstance(given, kind) or (kind is not dict and not given):
            shown = repr(given) if given or given is None else f"{given!r}, which is empty"
            hint = " (in quotes)" if wanted == "text" and not isinstance(given, dict | list) else ""
            raise UserError(f"sweep {path}: {key}: {wanted} is wanted{hint}, got {shown}")
    seeds = values.get("seeds", [])
    if len(set(map(str, seeds))) < len(seeds):
        raise UserError(f"sweep {path}: seeds {seeds} hold one twice")


def _check_axes(axes: dict, path: Path) -> None:
    """Their names: each once, and none that means something else."""
    hints = {"seed": "write seeds: [0, 1, ...], or call it otherwise"}
    hints |= dict.fromkeys(NUMBERS, "as x: it means a number of each point; call the axis otherwise")
    for axis in map(str, axes):
        if axis in hints:
            raise UserError(f"sweep {path}: an axis cannot be called {axis}: {hints[axis]}")
        if list(map(str, axes)).count(axis) > 1:
            raise UserError(f"sweep {path}: axes has {axis} twice")


def _check_folder(folder: Path, path: Path) -> None:
    """That RUNS is a folder, or can be made."""
    try:
        blocking = next((place for place in (folder, *folder.parents) if place.exists()), None)
        problem = f"{blocking} is a file" if blocking and not blocking.is_dir() else None
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    if problem:
        raise UserError(f"sweep {path}: runs: {str(folder)!r} cannot be a folder: {problem}")


def _choices(axis: str, given, path: Path) -> dict[str, list[str]]:
    """The values of an axis: name, and the overrides that each means."""
    if not isinstance(given, list | dict) or not given:
        raise UserError(f"sweep {path}: axis {axis} has no values")
    choices = {}
    for value in given:
        name = str(value) if isinstance(given, dict) or isinstance(value, str) else _name(axis, value)
        if isinstance(given, dict):
            if not isinstance(given[value], dict):
                raise UserError(f"sweep {path}: axis {axis}: {name} is no section of key: value")
            keys = given[value]
        else:
            keys = {axis: value}
        if not NAME.fullmatch(name):
            raise UserError(
                f"sweep {path}: axis {axis}: {name!r} is no name for a folder; write the axis as NAMES, each "
                "with the keys that it sets"
            )
        if name in choices:
            raise UserError(f"sweep {path}: axis {axis} has {name} twice")
        choices[name] = [f"{key}={_text(item)}" for key, item in keys.items()]
    return choices


def _numbers(given: list | dict) -> tuple[float, ...]:
    """The values, or names, of an axis, where all are finite numbers; or ()."""
    try:
        found = tuple(math.nan if isinstance(value, bool) else float(value) for value in given)
    except (TypeError, ValueError, OverflowError):
        return ()
    return found if all(map(math.isfinite, found)) else ()


def _name(axis: str, value) -> str:
    """`model.width` of 512: width_512."""
    short = f"{value:g}" if isinstance(value, float) else _text(value)
    value = short if not isinstance(value, float) or float(short) == value else repr(value)
    return f"{axis.rpartition('.')[2]}_{value}"


def _text(value) -> str:
    """As the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _owners(shared: list[str], axes: dict[str, dict[str, list[str]]], path: Path) -> dict[str, str]:
    """Who says what a key is, an axis or the sweep itself. UserError where the file says it twice."""
    owners = {"train.run": "the sweep's own folder"}
    taken = dict(owners)
    _claim(shared, "set", taken, path)
    for axis, choices in axes.items():
        who, keys = "seeds" if axis == "seed" else f"axis {axis}", set()
        for texts in choices.values():
            mine = dict(taken)
            _claim(texts, who, mine, path)
            keys |= mine.keys() - taken.keys()
        owners |= dict.fromkeys(keys, who)
        taken |= owners
    return owners


def _claim(texts: list[str], who: str, taken: dict[str, str], path: Path) -> None:
    """Put what the overrides set into `taken`. UserError where something is there."""
    for text in texts:
        for key in sorted(_changed(text, taken)):
            raise UserError(
                f"sweep {path}: {who} has {text!r}, but {taken[key]} says what {key} is: leave out one"
            )
        taken |= dict.fromkeys(_keys(text), who)


def _keys(text: str) -> set[str]:
    """That an override sets. UserError."""
    try:
        return keys_of(text)
    except ValueError:
        raise UserError(f"override {text!r}: the value is not valid YAML") from None


def _changed(text: str, taken: dict[str, str]) -> set[str]:
    """The taken keys that an override would change; a whole section replaces all that is in it."""
    name, equals, _ = text.partition("=")
    inside = {key for key in taken if equals and key.startswith(f"{name}.")}
    return inside | (_keys(text) & taken.keys())


def _check_free(overrides: list[str], owners: dict[str, str], path: Path) -> None:
    """What an axis sets cannot be set for all points."""
    for override in overrides:
        for key in sorted(_changed(override, owners)):
            raise UserError(f"override {override!r}: in sweep {path} {owners[key]} says what {key} is")


def _check_distinct(points: list[Point], path: Path) -> None:
    seen = {}
    for point in points:
        other = seen.setdefault(point.identity, point)
        if other is not point:
            raise UserError(
                f"sweep {path}: {other.name} and {point.name} are the same training: leave out one"
            )


def _check_names(names: list[str], path: Path) -> None:
    """That each point has a folder and a log of its own, beside the sweep's files."""
    taken = dict.fromkeys(OWN, "a file of the sweep itself")
    for name in names:
        if len(name) > LONGEST:
            raise UserError(
                f"sweep {path}: point {name[:40]}... has a name of {len(name)} letters, the most is "
                f"{LONGEST}: write its axes as NAMES, each with the keys that it sets"
            )
        for file, what in (
            (name, f"the folder of point {name}"),
            (f"{name}.log", f"the log of point {name}"),
        ):
            if file in taken:
                raise UserError(f"sweep {path}: {file} would be {what}, and {taken[file]}: rename a value")
            taken[file] = what


def _paper(paper: dict | None, groups: set[str], path: Path) -> dict | None:
    """Checked; names that YAML reads as numbers are text here."""
    if paper is None:
        return None
    if paper.keys() != {"label", "ppl"} or not isinstance(paper["ppl"], dict):
        raise UserError(f"sweep {path}: paper has the keys label, and ppl with a number a point")
    if not isinstance(paper["label"], str):
        raise UserError(f"sweep {path}: paper: label: text is wanted (in quotes), got {paper['label']!r}")
    ppls = {str(name): ppl for name, ppl in paper["ppl"].items()}
    if len(ppls) < len(paper["ppl"]):
        raise UserError(f"sweep {path}: paper: ppl has a point twice")
    for name, ppl in ppls.items():
        if name not in groups:
            near = difflib.get_close_matches(name, groups, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"sweep {path}: paper has {name}, which is no point{hint}")
        if type(ppl) not in (int, float) or not 1 <= ppl < math.inf:
            raise UserError(f"sweep {path}: paper: {name}: a perplexity is wanted, got {ppl!r}")
    return {"label": paper["label"], "ppl": ppls}


def _point(base: Path, folder: Path, choices: dict, axes: dict, shared: list[str], overrides) -> Point:
    group = "-".join(name for axis, name in choices.items() if axis != "seed")
    name = "-".join(choices.values())
    own = [text for axis, choice in choices.items() for text in axes[axis][choice]]
    changes = (*shared, *own, *overrides, f"train.run={folder / name}")
    try:
        config = load_config(base, changes)
        if not config.train.valid_every:
            raise UserError("train.valid_every is 0, but points are compared by their validations: set it")
        if config.evaluate.time == "uniform":
            raise UserError(
                "evaluate.time uniform cuts the bound, and cut bounds do not compare: leave it out"
            )
    except UserError as error:
        raise UserError(f"point {name}: {error}") from None
    return Point(name, group, choices, changes, config)


def is_done(point: Point) -> bool:
    """By its run's last checkpoint. UserError where that is of another config."""
    if not (point.run / LATEST).exists():
        return False
    folder = find_checkpoint(point.run)
    try:
        step = int(json.loads((folder / STATE).read_text())["step"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"point {point.name}: {folder / STATE} is damaged: remove {folder}") from None
    different = _differences(point.config, load_config(folder / "config.yaml"))
    if step > point.config.train.steps:
        different.append(f"it has done {step} steps, train.steps is {point.config.train.steps}")
    if different:
        raise UserError(
            f"point {point.name}: {point.run} was trained with another config ({'; '.join(different)}): move "
            "it away, or give the sweep another folder (runs: in its file)"
        )
    return step == point.config.train.steps


def _differences(wanted: Config, trained: Config) -> list[str]:
    ours, theirs = wanted.as_dict(), trained.as_dict()
    return [
        f"{section}.{key} was {theirs[section].get(key)}, is {ours[section].get(key)}"
        for section, keys in DECISIVE.items()
        for key in sorted(keys or ours[section].keys() | theirs[section].keys())
        if ours[section].get(key) != theirs[section].get(key)
    ]


def objects(lines: str) -> list[dict]:
    """The rows of metrics.jsonl; a line that is cut, as a running training's last may be, is left out."""
    found = []
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def flops_per_token(config: Config) -> float:
    """FLOPs of a training step, forward and backward, a clean token."""
    return step_flops_a_sequence(config) / config.model.length


def result_of(point: Point) -> dict:
    """What a training that is done has come to; the numbers' meaning: CONVENTION.

    curve: [tokens, loss] of each validation. UserError where its metrics do not say.
    """
    path = point.run / "metrics.jsonl"
    try:
        return _result(point, objects(path.read_text(errors="replace")))
    except FileNotFoundError:
        problem = "is missing"
    except (KeyError, TypeError, ValueError, ArithmeticError):
        problem = "is damaged"
    raise UserError(f"point {point.name}: {path} {problem}: move {point.run} away, to train it anew")


def _result(point: Point, lines: list[dict]) -> dict:
    config = point.config
    logs = [line for line in lines if "tokens" in line]
    valid = [line for line in lines if "valid_nll_per_token" in line]
    if not logs or not valid:
        raise UserError(
            f"point {point.name}: {point.run / 'metrics.jsonl'} holds no validation: move {point.run} away"
        )
    if valid[-1]["valid_nll_per_token"] is None:  # nan or infinite
        raise Diverged(
            f"point {point.name}: its last validation is no number: it has diverged; {point.run} stays"
        )
    seen = ([0, *(line["step"] for line in logs)], [0, *(line["tokens"] for line in logs)])
    valid = [line for line in valid if line["valid_nll_per_token"] is not None]  # it may have come back
    curve = [[round(np.interp(line["step"], *seen)), line["valid_nll_per_token"]] for line in valid]
    tokens, seconds = logs[-1]["tokens"], sum(line["seconds"] for line in logs)
    return {
        "objective": config.objective.name,
        "parameters": sum(map(math.prod, parameter_shapes(config).values())),
        "flops_per_token": flops_per_token(config),
        "tokens": tokens,
        "flops": flops_per_token(config) * tokens,
        "loss": curve[-1][1],
        "ppl": math.exp(curve[-1][1]),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "memory_gib": max(line["memory"] for line in logs),
        "seed": config.train.seed,
        "curve": curve,
    }
