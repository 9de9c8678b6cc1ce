"""What one micro-batch's forward and backward pass costs, and each trick switched off in turn.

All rows are measured in turns in one run, so that a machine that is busy now and then is so for all.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from lomdm_dist.config import Config
from lomdm_dist.errors import UserError
from lomdm_dist.files import write_figure
from lomdm_dist.machine import wait_for
from lomdm_dist.model import LoMDM, backbone
from lomdm_dist.model.flops import step_flops_a_sequence
from lomdm_dist.model.kernels import choose_kernels
from lomdm_dist.ops import compiled
from lomdm_dist.ops.precision import wide
from lomdm_dist.parallel.engine import Alone
from lomdm_dist.study.activations import SavedBytes, activation_bytes
from lomdm_dist.tables import markdown
from lomdm_dist.train.step import backpropagate, draw_noise

PLAIN = {"kernels.loss": "plain", "kernels.attention": "plain"}


@dataclass(frozen=True)
class Case:
    """A row: an objective, keys of the config that it changes, and what is done another way."""

    name: str
    objective: str
    changes: dict
    patch: Callable = contextlib.nullcontext


@dataclass
class Row:
    """Forward and backward of one case: flops counted by torch; bytes that autograd keeps at its peak."""

    name: str
    seconds: float
    spread: float  # half the distance of the quartiles
    flops: int
    peak_activation_bytes: int
    choice: str


def cases(device: torch.device) -> list[Case]:
    """LoMDM first, then with one thing changed each; MDLM; and both without any trick."""
    with_compile = device.type in compiled.COMPILED_ON
    flipped = {"kernels.compile": "off" if with_compile else "on"}
    return [
        Case("lomdm", "lomdm", {}),
        Case("lomdm, joint", "lomdm", {"train.two_samples": "joint"}),
        Case("lomdm, all logits", "lomdm", {"kernels.loss": "plain"}),
        Case("lomdm, plain attention", "lomdm", {"kernels.attention": "plain"}),
        Case("lomdm, norm and modulation apart", "lomdm", {}, _norms_apart),
        Case(f"lomdm, {'eager' if with_compile else 'compiled'}", "lomdm", flipped),
        Case("lomdm, attention recomputed", "lomdm", {"train.recompute": "attention"}),
        Case("lomdm, blocks recomputed", "lomdm", {"train.recompute": "block"}),
        Case("lomdm, no trick", "lomdm", PLAIN | {"train.two_samples": "joint"}, _norms_apart),
        Case("mdlm", "mdlm", {}),
        Case("mdlm, all logits", "mdlm", {"kernels.loss": "plain"}),
        Case("mdlm, no trick", "mdlm", PLAIN, _norms_apart),
    ]


def bench_step(
    config: Config, sequences: int, rounds: int, device: torch.device, only: list[str] | None = None
) -> dict:
    """Rows for `sequences` masked sequences through the denoiser, LoMDM's and MDLM's alike, and the floors.

    A LoMDM row has half as many texts, each masked twice. `only` these rows, or all. Raises UserError
    where that cannot be.
    """
    if config.objective.name != "lomdm":
        raise UserError(f"bench step compares LoMDM with others: objective.name is {config.objective.name}")
    if config.parallel.tensor_parallel > 1:
        ranks = config.parallel.tensor_parallel
        raise UserError(f"bench step measures one process, but parallel.tensor_parallel is {ranks}")
    if config.train.recompute == "auto":
        raise UserError("train.recompute is auto: say what to measure: none, attention or block")
    if sequences % 2:
        raise UserError(f"--sequences {sequences} is odd, but each text is masked twice")
    todo = [case for case in cases(device) if only is None or case.name in only]
    if unknown := set(only or ()) - {case.name for case in todo}:
        names = ", ".join(repr(case.name) for case in cases(device))
        raise UserError(f"no row is called {', '.join(map(repr, sorted(unknown)))}; there are {names}")
    table = _measure(todo, config, sequences, rounds, device)
    return {
        "rows": [vars(row) for row in table],
        "floor": floors(config, table, sequences, device),
        "sequences": sequences,
    }


def _measure(todo: list[Case], config: Config, sequences: int, rounds: int, device) -> list[Row]:
    """All cases in turns: once to count operations, once to count bytes, once unmeasured, then timed."""
    models = {name: _model(config, name, device) for name in ("lomdm", "mdlm")}
    seconds = {case.name: [] for case in todo}
    rows, counted = {}, {}
    with tqdm(total=len(todo) * (rounds + 3), desc="bench", disable=None) as bar:
        for number in range(rounds + 3):
            first = number % len(todo)  # no row is always the one after the largest
            for case in todo[first:] + todo[:first]:
                with prepared(case, models[case.objective], config, sequences) as run:
                    if number == 0:
                        counted[case.name] = _count_flops(run)
                    elif number == 1:
                        rows[case.name] = _count_bytes(run)
                    elif taken := _time(run, device):
                        seconds[case.name] += [taken] if number > 2 else []  # the first compiles kernels
                bar.update()
    table = []
    for case in todo:
        saved, choice = rows[case.name]
        table.append(Row(case.name, *middle(seconds[case.name]), counted[case.name], saved, choice))
    return table


def middle(seconds: list[float]) -> tuple[float, float]:
    """The median, and half the distance between the quartiles, which is 0 of one."""
    taken = seconds * (2 if len(seconds) == 1 else 1)
    low, median, high = statistics.quantiles(taken, n=4, method="inclusive")
    return median, (high - low) / 2


@contextlib.contextmanager
def prepared(case: Case, model: LoMDM, config: Config, sequences: int):
    """A function that runs a case's forward and backward pass once."""
    config, device = _changed(config, case, sequences), next(model.parameters()).device
    texts = config.train.global_batch
    x = torch.randint(config.model.vocab_size, (texts, config.model.length), device=device)
    x[x == config.model.mask_id] = (config.model.mask_id + 1) % config.model.vocab_size
    noise = draw_noise(config, 0, torch.arange(texts), device)
    noise.time[:, 0] = (torch.arange(texts) + 0.5) / texts  # so few texts are masked as many are
    before = set(compiled.COMPILED_ON)

    def run():
        backpropagate(Alone(model), x, None, noise, config)

    try:
        run.model, run.choice = model, choose_kernels(model, config, device)
        with case.patch():
            yield run
    finally:
        compiled.COMPILED_ON.clear()
        compiled.COMPILED_ON.update(before)


def floors(config: Config, rows: list[Row], sequences: int, device: torch.device) -> dict:
    """What the rows are to be held against.

    ratios   LoMDM's floating-point operations over MDLM's, as they must be and as these runs had them
    seconds  that a row's operations take at the speed of this machine's matrix products
    bytes    that autograd has to keep of a row with the usual kernels, by formula
    """
    of = {row.name: row for row in rows}
    pairs = {
        "lomdm / mdlm, all logits": ("lomdm", "mdlm, all logits"),
        "lomdm / mdlm, no trick": ("lomdm", "mdlm, no trick"),
        "lomdm / mdlm": ("lomdm", "mdlm"),
        "lomdm, all logits / mdlm, all logits": ("lomdm, all logits", "mdlm, all logits"),
    }
    pairs = {name: both for name, both in pairs.items() if set(both) <= set(of)}
    expected = {c.name: _model_flops(config, c, sequences) for c in cases(device) if c.name in of}
    rate = matmul_rate(config, device)
    return {
        "ratios": {
            name: {
                "floor": expected[ours] / expected[theirs],
                "floor_of_these_masks": of[ours].flops / of[theirs].flops,
                "measured": of[ours].seconds / of[theirs].seconds,
            }
            for name, (ours, theirs) in pairs.items()
        },
        "matmul_flops_per_second": rate,
        "seconds": {row.name: row.flops / rate for row in rows},
        "bytes": {
            case.name: sum(activation_bytes(_changed(config, case, sequences)).values())
            for case in cases(device)
            if case.name in of and case.patch is contextlib.nullcontext and not case.changes.keys() & PLAIN
        },
    }


def _model(config: Config, objective: str, device: torch.device) -> LoMDM:
    config = _changed(config, Case("", objective, {}), 2)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    return LoMDM(config.model, config.objective, config.data.attend).to(device, dtype).train()


def _changed(config: Config, case: Case, sequences: int) -> Config:
    objective = config.objective
    timed = {"time": objective.time, "time_eps": objective.time_eps}
    chosen = objective.model_dump() if case.objective == "lomdm" else {"name": case.objective} | timed
    config = Config.model_validate(config.model_dump() | {"objective": chosen})
    texts = sequences // 2 if case.objective == "lomdm" else sequences
    usual = {"train.global_batch": texts, "train.micro_batch": texts, "train.two_samples": "split"}
    return config.changed(usual | case.changes)


def _model_flops(config: Config, case: Case, sequences: int) -> float:
    """FLOPs that one masked sequence needs in the denoiser, expected over the masks."""
    changed = _changed(config, case, sequences)
    flops = step_flops_a_sequence(changed, every_position=changed.kernels.loss == "plain")
    return flops / changed.objective.samples


def _count_flops(run) -> int:
    """torch knows the plain products of attention, not the fused kernel of the CPU."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    run.model.zero_grad()
    return counter.get_total_flops()


def _count_bytes(run) -> tuple[int, str]:
    with SavedBytes(run.model) as saved:
        run()
    return saved.peak, run.choice


def _time(run, device: torch.device) -> float:
    run.model.zero_grad()
    wait_for(device)
    start = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - start


def matmul_rate(config: Config, device: torch.device) -> float:
    """FLOP/s of the largest matrix product of a block, the best of five."""
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    width, tokens = config.model.width, 4 * config.model.length
    a = torch.randn(tokens, width, device=device, dtype=dtype)
    b = torch.randn(width, 4 * width, device=device, dtype=dtype)
    product, best = a @ b, float("inf")
    for _ in range(5):
        wait_for(device)
        start = time.perf_counter()
        torch.mm(a, b, out=product)
        wait_for(device)
        best = min(best, time.perf_counter() - start)
    return 2 * tokens * width * 4 * width / best


def _norms_apart():
    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        normed = (F.layer_norm(wide(x), x.shape[-1:]) * wide(self.scale())).to(x.dtype)
        return normed * (1 + scale) + shift

    return mock.patch.object(backbone.ModulatedNorm, "forward", forward)


def as_markdown(result: dict) -> str:
    """The rows beside LoMDM's own, or the first, then the ratios to MDLM and their floors."""
    rows, floor = result["rows"], result["floor"]
    own = next((row for row in rows if row["name"] == "lomdm"), rows[0])
    head = ["", "seconds", "+-", f"of {own['name']}", "TFLOP", "of the matmul rate"]
    head += ["kept, MiB", f"of {own['name']}", "by formula"]
    measured = []
    for row in rows:
        kept = row["peak_activation_bytes"]
        cells = [row["name"], f"{row['seconds']:.3f}", f"{row['spread']:.3f}"]
        cells += [f"{row['seconds'] / own['seconds']:.2f}", f"{row['flops'] / 1e12:.3f}"]
        cells += [f"{floor['seconds'][row['name']] / row['seconds']:.0%}"]
        cells += [f"{kept / 2**20:,.0f}", f"{kept / own['peak_activation_bytes']:.2f}"]
        known = floor["bytes"].get(row["name"])
        measured.append([*cells, f"{known / 2**20:,.0f}" if known else None])
    ratios = []
    for name, ratio in floor["ratios"].items():
        cells = [ratio["measured"], ratio["floor"], ratio["measured"] / ratio["floor"]]
        cells += [ratio["floor_of_these_masks"]]
        ratios.append([name, *(f"{cell:.3f}" for cell in cells)])
    of_ratios = ("ratio of seconds", "measured", "floor", "measured / floor", "floor of these masks")
    return "\n".join([*markdown(head, measured), "", *markdown(of_ratios, ratios)])


def draw(result: dict, path: Path) -> None:
    """Bars of seconds and of kept bytes."""
    from matplotlib.figure import Figure

    rows = result["rows"][::-1]
    figure = Figure(figsize=(11, 0.35 * len(rows) + 1.5))
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row["name"] for row in rows]
    left.barh(names, [row["seconds"] for row in rows], xerr=[row["spread"] for row in rows], color="tab:blue")
    left.plot([result["floor"]["seconds"][name] for name in names], names, "k|", label="at the matmul rate")
    left.set_xlabel("seconds, forward and backward")
    left.legend(frameon=False)
    right.barh(names, [row["peak_activation_bytes"] / 2**30 for row in rows], color="tab:orange")
    right.set_xlabel("kept for the backward pass, GiB")
    figure.tight_layout()
    write_figure(figure, path, dpi=150)
