"""Two results of a bench side by side: row by row, and what else differs."""

import json
import math
from pathlib import Path

from lomdm_dist.errors import UserError
from lomdm_dist.tables import markdown

ABOUT = ("versions", "machine", "config", "scaling", "sequences")
SECONDS = {"step_seconds": "peak_memory_bytes", "seconds": "peak_activation_bytes"}  # of throughput, of step


def read_result(path: Path) -> dict:
    """A `--json` file of a bench. UserError where it is none."""
    try:
        result = json.loads(path.read_text())
        kinds = {_kind(row) for row in _measured(result)}
        names = [row["name"] for row in result["rows"]]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        kinds, names = set(), []
    if len(kinds) != 1 or len(set(names)) != len(names):
        raise UserError(f"{path} is no result of `lomdm bench throughput` or `bench step` (its --json FILE)")
    return result


def _kind(row: dict) -> str:
    """The key of a row's seconds. Raises one error or another where it is no measurement."""
    kind = next(kind for kind in SECONDS if kind in row)
    numbers = [row[kind], row["spread"], row[SECONDS[kind]], *row.get("phases", {}).values()]
    if not (isinstance(row["name"], str) and row[kind] > 0 and all(map(math.isfinite, numbers))):
        raise ValueError
    return kind


def _measured(result: dict) -> list[dict]:
    return [row for row in result["rows"] if not row.get("error")]


def compare(a: dict, b: dict) -> dict:
    """Rows of both, by name: ratios b / a, and whether the seconds differ by more than both spreads."""
    of_a, of_b = ({row["name"]: row for row in _measured(result)} for result in (a, b))
    rows = [_row(name, of_a[name], of_b[name]) for name in of_a if name in of_b]
    if not rows:
        raise UserError(f"no row is in both: the first has {', '.join(of_a)}; the second {', '.join(of_b)}")
    return {
        "rows": rows,
        "only_in_a": [name for name in of_a if name not in of_b],
        "only_in_b": [name for name in of_b if name not in of_a],
        "differs": _differences({k: a.get(k) for k in ABOUT}, {k: b.get(k) for k in ABOUT}),
    }


def _row(name: str, a: dict, b: dict) -> dict:
    seconds = next(kind for kind in SECONDS if kind in a)
    if seconds not in b:
        raise UserError(f"row {name!r} is of `bench throughput` in one file and of `bench step` in the other")
    memory, difference = SECONDS[seconds], b[seconds] - a[seconds]
    row = {"name": name, "seconds": [a[seconds], b[seconds]], "spread": [a["spread"], b["spread"]]}
    row |= {"ratio": b[seconds] / a[seconds], "beyond_spreads": abs(difference) > a["spread"] + b["spread"]}
    row["memory_ratio"] = b[memory] / a[memory] if a[memory] else None
    if "phases" in a and "phases" in b:
        names = dict.fromkeys([*a["phases"], *b["phases"]])
        row["phases"] = {name: b["phases"].get(name, 0.0) - a["phases"].get(name, 0.0) for name in names}
    row["differs"] = _differences(
        *({k: row_.get(k) for k in ("overrides", "device", "data")} for row_ in (a, b))
    )
    return row


def _differences(a, b, at: str = "") -> dict[str, list]:
    """key.key: [of a, of b], where they are not equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = {}
        for key in dict.fromkeys([*a, *b]):
            found |= _differences(a.get(key), b.get(key), f"{at}.{key}" if at else key)
        return found
    return {} if a == b else {at: [a, b]}


def as_markdown(result: dict) -> str:
    head = ["", "A, seconds", "B, seconds", "B / A", "beyond the spreads", "memory, B / A"]
    rows = []
    for row in result["rows"]:
        seconds = [f"{s:.4f} +- {d:.4f}" for s, d in zip(row["seconds"], row["spread"], strict=True)]
        parts = sorted(row.get("phases", {}).items(), key=lambda part: -abs(part[1]))[:3]
        memory = "" if row["memory_ratio"] is None else f"{row['memory_ratio']:.3f}"
        cells = [
            row["name"],
            *seconds,
            f"{row['ratio']:.3f}",
            "yes" if row["beyond_spreads"] else "no",
            memory,
        ]
        rows.append([*cells, ", ".join(f"{name} {1e3 * s:+.1f}" for name, s in parts)])
    lines = [*markdown([*head, "most changed parts, ms"], rows), ""]
    for row in result["rows"]:
        lines += [f"{row['name']}: {key} {old} -> {new}" for key, (old, new) in row["differs"].items()]
    lines += [f"differs: {key} {old} -> {new}" for key, (old, new) in result["differs"].items()]
    lines += [f"only in {side}: {name}" for side in "ab" for name in result[f"only_in_{side}"]]
    return "\n".join(lines).rstrip()
