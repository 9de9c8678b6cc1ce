"""The points that scaling laws are fitted to, from a sweep's points.json or points.csv or another table."""

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lomdm_dist.errors import UserError, first_line
from lomdm_dist.study.scaling_law import Points, distinct

DONE = "done"


@dataclass(frozen=True)
class Training:
    """A finished training. loss: its last uncut validation bound, nats a token.

    flops_per_token: of training, forward and backward, a clean token; None where the table does not have it.
    curve [k, 2]: tokens and loss of its validations, in order, its end the last of them.
    """

    objective: str
    flops_per_token: float | None
    parameters: float | None
    tokens: float
    loss: float
    curve: np.ndarray
    seed: str | None = None


def read_trainings(paths: list[Path]) -> tuple[list[Training], int, int]:
    """The finished trainings; how many rows are of others, how many repeat one. UserError with the row."""
    trainings, left_out = [], 0
    for path in paths:
        for number, row in enumerate(_rows(path), 1):
            if row.get("status") not in (None, "", DONE):
                left_out += 1
            else:
                trainings.append(_training(row, f"{path}, row {number}"))
    if not trainings:
        none = f": none of {left_out} is done, let the sweep finish" if left_out else ""
        raise UserError(f"{', '.join(map(str, paths))}: no row of a finished training{none}")
    once = _once(trainings)
    return once, left_out, len(trainings) - len(once)


def _once(trainings: list[Training]) -> list[Training]:
    """Each training once, in order, with the longest curve it was given.

    The same are those of one objective, size, tokens and loss, unless both tell a seed and it differs.
    """
    kept: dict[tuple, list[Training]] = {}
    for one in trainings:
        size = one.parameters if one.flops_per_token is None else one.flops_per_token
        alike = kept.setdefault((one.objective, *(f"{x:.9g}" for x in (size, one.tokens, one.loss))), [])
        for k, other in enumerate(alike):
            if one.seed == other.seed or None in (one.seed, other.seed):
                alike[k] = max(other, one, key=lambda training: len(training.curve))
                break
        else:
            alike.append(one)
    return [one for alike in kept.values() for one in alike]


def _rows(path: Path) -> list[dict]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix != ".json":
            return _table(text, path)
        found = json.loads(text)
        if isinstance(found, dict) and "convention" in found and "objectives" in found:
            raise UserError(
                f"{path} is what `lomdm fit --json` wrote, not points: give the sweep's points.json"
            )
        rows = found["points"] if isinstance(found, dict) else found
        # a sweep has what came of a point under `result`
        return [row | (row.get("result") or {}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        unlike = isinstance(error, KeyError | TypeError | AttributeError)
        reason = "not a list of rows" if unlike else getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{path} is no table of points (points.json, points.csv): {reason}") from None


def _table(text: str, path: Path) -> list[dict]:
    """The rows of a CSV. UserError where it has other columns, or a row has more cells than the header."""
    table = csv.DictReader(text.splitlines())
    if "objective" not in (table.fieldnames or ()):
        found = ", ".join(map(repr, table.fieldnames or ())) or "none"
        raise UserError(f"{path} has no column objective; found, between commas: {found[:200]}")
    rows = list(table)
    for number, row in enumerate(rows, 1):
        if None in row:
            raise UserError(
                f"{path}, row {number} has {len(table.fieldnames) + len(row[None])} cells, and the header "
                f"{len(table.fieldnames)}: a comma inside a number or a name? put quotes around it"
            )
    return rows


def _training(row: dict, where: str) -> Training:
    if not row.get("objective"):
        raise UserError(f"{where} has no objective; columns: objective, flops_per_token, tokens, loss")
    tokens, loss = _number(row, "tokens", where), _number(row, "loss", where)
    size = _number(row, "flops_per_token", where, optional=True)
    flops = _number(row, "flops", where, optional=True)
    parameters = _number(row, "parameters", where, optional=True)
    if size is None and flops is not None:
        size = flops / tokens
    if size is None and parameters is None:
        raise UserError(f"{where} has neither flops_per_token (of training, a clean token) nor parameters")
    seed = None if row.get("seed") in (None, "") else str(row["seed"])
    return Training(row["objective"], size, parameters, tokens, loss, _curve(row, tokens, loss, where), seed)


def _number(row: dict, name: str, where: str, optional: bool = False) -> float | None:
    given = row.get(name)
    if given in (None, ""):
        if optional:
            return None
        raise UserError(f"{where} has no {name}; columns: objective, flops_per_token, tokens, loss")
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(f"{where}: {name} is {given!r}, not a positive number; mend it or leave the row out")
    return number


def _curve(row: dict, tokens: float, loss: float, where: str) -> np.ndarray:
    given = row.get("curve") or []
    try:
        given = json.loads(given) if isinstance(given, str) else given
        curve = np.array(given, dtype=np.float64).reshape(-1, 2)
    except (ValueError, TypeError):
        raise UserError(f"{where}: curve is not [[tokens, loss], ...]") from None
    if not (np.isfinite(curve) & (curve > 0)).all():
        raise UserError(f"{where}: curve has a value that is not a positive number")
    curve = curve[curve[:, 0] < 0.999 * tokens]
    return np.concatenate([curve[curve[:, 0].argsort()], [[tokens, loss]]])


def points_of(trainings: list[Training], since: float | None = None, size: str = "flops_per_token") -> Points:
    """A point a training, or where `since` is given one a validation from that share of its tokens on.

    UserError where there is none.
    """
    curves = [kept_curve(training, since) for training in trainings]
    if since is not None and max(map(len, curves)) < 2:
        raise UserError(f"--curve: no row of {trainings[0].objective} has a curve from there on")
    lengths = [len(curve) for curve in curves]
    sizes = np.repeat([getattr(training, size) for training in trainings], lengths)
    tokens, loss = np.concatenate(curves).T
    return Points(sizes, tokens, loss, np.repeat(np.arange(len(trainings)), lengths))


def kept_curve(training: Training, since: float | None) -> np.ndarray:
    """[k, 2]: tokens, loss."""
    curve = training.curve
    return curve[-1:] if since is None else curve[curve[:, 0] >= since * training.tokens]


def points_at_budgets(trainings: list[Training], since: float, count: int) -> Points:
    """Losses of all curves that pass them, at `count` compute budgets that three sizes or more have.

    Between two validations log loss is taken linear in log tokens. Empty where there is no such budget.
    """
    found = []
    sizes = np.array([training.flops_per_token for training in trainings])
    curves = [np.log(kept_curve(training, since)) for training in trainings]
    low, high = (np.log(sizes) + [curve[end, 0] for curve in curves] for end in (0, -1))
    tried = np.linspace(low.min(), high.max(), 512)
    among = [at for at in tried if len(distinct(sizes[(low <= at) & (at <= high)])) >= 3]
    for log_c in np.linspace(among[0], among[-1], count) if among else []:
        for run in np.flatnonzero((low <= log_c) & (log_c <= high)):
            log_tokens = log_c - np.log(sizes[run])
            loss = np.exp(np.interp(log_tokens, *curves[run].T))
            found.append((sizes[run], np.exp(log_tokens), loss, run))
    columns = np.array(found).reshape(-1, 4).T
    return Points(*columns[:3], columns[3].astype(int))
