"""Where the time of a step went: phases of the step by kinds of work, from a trace of torch's profiler.

A step is cut into pieces in which one thing happens, so the cells of the table add up to the step. Without
kernels in the trace the pieces are the host's: the innermost operation of the thread that trains, or
communication, where that thread has no operation while one is in flight. With kernels they are the GPU's: a
kernel that computes, else one that communicates, else nothing. A kernel is of the phase in which it was
launched; where nothing runs, the phase is the one the host is in.
"""

import bisect
import gzip
import itertools
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lomdm_dist.errors import UserError
from lomdm_dist.ops.phase import PHASES

STEP = "step "  # and its number: the range around a step
MARK = "phase:"  # and its name: a phase begins (ops/phase.py)
OTHER = "other"  # what no phase covers
COMMUNICATION, IDLE = "communication", "idle"  # on a CPU idle is Python, and torch around its operations
KINDS = ("matrix products", "attention", "pointwise", COMMUNICATION, "copies", IDLE)
TOP = 10

# The kind of an operation or a kernel: the first whose pattern is in its name, else pointwise.
_PATTERNS = {
    COMMUNICATION: r"^c10d::|^gloo:|^record_param_comms|nccl",
    "attention": r"attention|attn|flash|fmha|sdpa",
    "matrix products": r"^aten::\w*(mm|mv|dot)_?$|gemm|gemv|cutlass|cublas|nvjet|xmma|_tem_",
    "copies": r"^aten::(cat|clone|stack|fill_|zero_)$|^mem(cpy|set)|copy|catarray|fillfunctor",
}
_KINDS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _PATTERNS.items()}
_WORK = re.compile(r"^(?!autograd::|torch::)\w+::|^cpp_fused|^triton")
# What only describes tensors, or calls others: the time of its own is torch's, not the operation's.
_AROUND = re.compile(
    r"^aten::(_local_scalar_dense|_reshape_alias|_to_copy|_unsafe_view|alias|as_strided|chunk|contiguous"
    r"|detach_?|einsum|empty\w*|expand|expand_as|flatten|is_nonzero|item|layer_norm|lift_fresh|linear|matmul"
    r"|narrow|new_empty\w*|new_zeros|ones|permute|reshape|resize_|resolve_\w+|scaled_dot_product_attention|select|set_"
    r"|slice|split\w*|squeeze|t|to|transpose|unbind|unflatten|unsqueeze|view|view_as|zeros|zeros_like)$"
)
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_HOST = ("cpu_op", "user_annotation")


class Piece(NamedTuple):
    """From `start` to `end`, microseconds, one thing happens."""

    start: float
    end: float
    what: Any


class Work(NamedTuple):
    """An operation or a kernel; phase: where it was launched, None where that is when it runs."""

    name: str
    kind: str
    phase: str | None = None


def read_trace(path: Path) -> dict:
    """UserError where it cannot be read, or is no trace."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
            trace = json.load(file)
        if not all(isinstance(event, dict) for event in trace["traceEvents"]):
            raise TypeError
    except (ValueError, EOFError, KeyError, TypeError, gzip.BadGzipFile, zlib.error):
        raise UserError(f"{path} is no trace of torch's profiler, or is cut short") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return trace


def where_time_went(trace: dict) -> dict:
    """Means over the traced steps, in seconds. UserError where there is none.

    seconds         {phase: {kind: of a step}}; all together are step_seconds
    communication   in_flight, and of that under computation, which the table counts as computation
    operations      those that took longest, besides idle
    peak_bytes      {phase: bytes}, where allocations were traced: of the GPU; on a CPU above what there was
                    when the trace began
    """
    events = trace["traceEvents"]
    steps = [event for event in _ranges(events) if re.fullmatch(rf"{STEP}\d+", event["name"])]
    if not steps:
        raise UserError("the trace has no steps: it is not one of train.profile")
    phases = _phases(events)
    on_gpu = any(event.get("cat") in _ON_GPU for event in events)
    computing, talking = _of_gpu(events, phases) if on_gpu else _of_host(events, steps[0]["tid"])

    cells, operations = defaultdict(lambda: defaultdict(float)), defaultdict(float)
    in_flight = under = 0.0
    for step in steps:
        for piece in overlay(_piece(step), computing, talking, phases):
            compute, talk, phase = piece.what
            work = compute or talk or Work(IDLE, IDLE)
            seconds = (piece.end - piece.start) / 1e6 / len(steps)
            cells[work.phase or phase or OTHER][work.kind] += seconds
            operations[work[:2]] += seconds
            in_flight += seconds if talk else 0.0
            under += seconds if talk and compute else 0.0
    step_seconds = sum(step["dur"] for step in steps) / 1e6 / len(steps)
    return {
        "steps": sorted(int(step["name"].removeprefix(STEP)) for step in steps),
        "rank": trace.get("distributedInfo", {}).get("rank", 0),
        "device": "cuda" if on_gpu else "cpu",
        "step_seconds": step_seconds,
        "seconds": {phase: dict(kinds) for phase, kinds in cells.items()},
        "communication": {"in_flight": in_flight, "under_computation": under},
        "operations": _longest(operations, step_seconds),
        "peak_bytes": _peaks(events, steps, phases, on_gpu),
    }


def _ranges(events: list[dict]) -> Iterator[dict]:
    return (event for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation")


def _piece(event: dict, what: Any = None) -> Piece:
    return Piece(event["ts"], event["ts"] + event["dur"], what)


def _phases(events: list[dict]) -> list[Piece]:
    """Each lasts until the next mark, in whatever thread that is."""
    marks = [(event["ts"], event["name"]) for event in _ranges(events) if event["name"].startswith(MARK)]
    marks = [*sorted(marks), (float("inf"), f"{MARK}None")]
    names = [name.removeprefix(MARK) for _, name in marks]
    return [
        Piece(start, end, None if name == "None" else name)
        for (start, _), (end, _), name in zip(marks, marks[1:], names, strict=False)
    ]


def _of_host(events: list[dict], thread: int) -> tuple[list[Piece], list[Piece]]:
    """What the thread that trains computes, and what any thread communicates: pieces of Work."""
    own, talking = [], []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _ON_HOST:
            name = event["name"]
            if name.startswith("gloo:"):
                talking.append(_piece(event, Work(name, COMMUNICATION)))
            elif event["tid"] == thread and event["cat"] == "cpu_op":
                is_work = _WORK.match(name) and not _AROUND.match(name)
                own.append(_piece(event, Work(name, kind_of(name) if is_work else IDLE)))
    own = innermost(own)
    talking += [piece for piece in own if piece.what.kind == COMMUNICATION]
    computing = [piece for piece in own if piece.what.kind not in (COMMUNICATION, IDLE)]
    return computing, innermost(talking)


def _of_gpu(events: list[dict], phases: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Kernels of all streams that compute, and that communicate: pieces of Work."""
    launches = {_correlation(event): event["ts"] for event in events if event.get("cat") in _LAUNCHES}
    pieces = {True: [], False: []}
    for event in events:
        if event.get("cat") in _ON_GPU:
            kind = kind_of(event["name"])
            phase = _at(phases, launches.get(_correlation(event), event["ts"])) or OTHER
            pieces[kind == COMMUNICATION].append(_piece(event, Work(event["name"], kind, phase)))
    return innermost(pieces[False]), innermost(pieces[True])


def _correlation(event: dict) -> int | None:
    """What a kernel has in common with the call that launched it."""
    return event.get("args", {}).get("correlation")


def kind_of(name: str) -> str:
    """What kind an operation or a kernel is of."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "pointwise")


def innermost(pieces: Iterable[Piece]) -> list[Piece]:
    """Disjoint pieces, in order, of some that lie in each other or overlap: who began last has the time."""
    found, open_ones, now = [], [], float("-inf")
    for piece in [*sorted(pieces, key=lambda p: (p.start, -p.end)), Piece(float("inf"), float("inf"), None)]:
        while open_ones and now < piece.start:
            last = open_ones[-1]
            end = min(last.end, piece.start)
            if end > now:
                found.append(Piece(now, end, last.what))
                now = end
            if last.end <= now:
                open_ones.pop()
        open_ones.append(piece)
        now = piece.start
    return found


def overlay(window: Piece, *layers: list[Piece]) -> Iterator[Piece]:
    """The window, cut where a piece of the layers, each disjoint and in order, begins or ends.

    What is in a cut is a tuple: of each layer what it has there, or None.
    """
    inside = [[p for p in layer if p.start < window.end and p.end > window.start] for layer in layers]
    edges = {time for layer in inside for piece in layer for time in piece[:2]}
    cuts = [window.start, *sorted(t for t in edges if window.start < t < window.end), window.end]
    at = [0] * len(layers)
    for start, end in itertools.pairwise(cuts):
        here = []
        for k, layer in enumerate(inside):
            while at[k] < len(layer) and layer[at[k]].end <= start:
                at[k] += 1
            begun = at[k] < len(layer) and layer[at[k]].start <= start
            here.append(layer[at[k]].what if begun else None)
        yield Piece(start, end, tuple(here))


def _at(pieces: list[Piece], time: float) -> Any:
    """What there is at a time, or None."""
    k = bisect.bisect_right(pieces, time, key=lambda piece: piece.start) - 1
    return pieces[k].what if k >= 0 and time < pieces[k].end else None


def _longest(operations: dict[tuple[str, str], float], step_seconds: float) -> list[dict]:
    named = sorted((work for work in operations if work[1] != IDLE), key=operations.get, reverse=True)
    return [
        {"name": name, "kind": kind, "seconds": seconds, "share": seconds / step_seconds}
        for name, kind in named[:TOP]
        for seconds in [operations[name, kind]]
    ]


def _peaks(events: list[dict], steps: list[dict], phases: list[Piece], on_gpu: bool) -> dict[str, int]:
    """The largest total that the allocator had in each phase."""
    windows, peaks = sorted(_piece(step, True) for step in steps), defaultdict(int)
    for event in events:
        known = event.get("name") == "[memory]" and event["args"]["Device Type"] == int(on_gpu)
        if known and _at(windows, event["ts"]):
            phase = _at(phases, event["ts"]) or OTHER
            peaks[phase] = max(peaks[phase], event["args"]["Total Allocated"])
    return dict(peaks)


def as_text(result: dict) -> str:
    """The result of `where_time_went` as a table, in milliseconds."""
    seconds, step, peaks = result["seconds"], result["step_seconds"], result["peak_bytes"]
    named = KINDS if result["device"] == "cuda" else (*KINDS[:-1], "Python, idle")
    rows = [["ms", *named, "all", "share", *(["peak MiB"] if peaks else [])]]
    sums = dict.fromkeys(KINDS, 0.0)
    order = [*PHASES, OTHER, *seconds]  # the last of another version's
    for phase in sorted(seconds, key=order.index):
        cells = {kind: seconds[phase].get(kind, 0.0) for kind in KINDS}
        sums = {kind: sums[kind] + cells[kind] for kind in KINDS}
        rows.append([phase, *_row(cells, step), *_mebibytes(peaks, peaks.get(phase, 0))])
    rows.append(["step", *_row(sums, step), *_mebibytes(peaks, max(peaks.values(), default=0))])
    rows.append(["share", *(f"{part / step:.1%}" for part in sums.values()), "100.0%"])
    return "\n".join([_heading(result), *_aligned(rows), *_notes(result)])


def _row(cells: dict[str, float], step: float) -> list[str]:
    total = sum(cells.values())
    return [*(f"{1e3 * part:.2f}" for part in (*cells.values(), total)), f"{total / step:.1%}"]


def _mebibytes(peaks: dict, value: int) -> list[str]:
    return [f"{value / 2**20:.1f}"] if peaks else []


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows if k < len(row)) for k in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _heading(result: dict) -> str:
    first, *_, last = [*result["steps"], result["steps"][-1]]
    steps = f"step {first}" if first == last else f"the mean of steps {first} to {last}"
    return f"where the time went: {steps}, rank {result['rank']}, {result['device']}"


def _notes(result: dict) -> list[str]:
    flight, under = (1e3 * result["communication"][name] for name in ("in_flight", "under_computation"))
    notes = [
        f"communication in flight {flight:.2f} ms: {under:.2f} ms under computation, counted there, and "
        f"{flight - under:.2f} ms exposed"
    ]
    if result["peak_bytes"]:
        above = "of the GPU" if result["device"] == "cuda" else "above what there was when the trace began"
        notes.append(f"peak: what the allocator had at most, {above}")
    notes.append("longest:")
    for row in result["operations"]:
        notes.append(
            f"{1e3 * row['seconds']:10.2f} ms {row['share']:6.1%}  {row['name'][:78]} ({row['kind']})"
        )
    return notes
