"""What padding costs: a micro-batch of unpacked sentences, LoMDM, forward and backward.

`left out` is what training does: padding is not embedded, not attended to, not computed. `computed` runs
the same batch with every padded position in it and a mask over the keys, as is usual. Lengths are drawn
like those of LM1B's sentences (log-normal, mean 28 of 128 tokens); in the other rows all are alike.

    python benchmarks/padding.py    # two minutes; writes benchmarks/results/padding.md
"""

import os
import statistics
import time
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from lomdm_dist import machine
from lomdm_dist.config import load_config
from lomdm_dist.model import LoMDM, backbone
from lomdm_dist.ops.attention import Sight
from lomdm_dist.parallel.engine import Alone
from lomdm_dist.train.step import backpropagate, draw_noise

ROOT = Path(__file__).resolve().parent.parent
SEQUENCES, ROUNDS = 32, 5
SMALL = [
    "model.blocks=4",
    "model.width=384",
    "model.heads=6",
    "model.vocab_size=8192",
    "train.precision=fp32",
]


def lengths(kind: str, length: int) -> Tensor:
    if kind != "sentences":
        return torch.full((SEQUENCES,), int(kind))
    drawn = torch.empty(SEQUENCES).log_normal_(3.17, 0.55, generator=torch.Generator().manual_seed(0))
    return drawn.round().long().clamp(2, length)


def computed(valid: Tensor):
    """Patches under which padding is computed, and no real token sees it."""

    def context(self, shape, valid=None, documents=None, dropout=None):
        whole = real_context(self, shape, None, None, dropout)
        return whole if valid is None else whole._replace(sight=Masked(valid, shape[1]))

    def attention(qkv: Tensor, sight) -> Tensor:
        if isinstance(sight, Sight):
            return real_attention(qkv, sight)
        q, k, v = qkv.unflatten(0, (-1, sight.length)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=sight.valid[:, None, None, :])
        return seen.transpose(1, 2).flatten(0, 1)

    real_context, real_attention = backbone.Backbone.context, backbone.attention
    return mock.patch.object(backbone.Backbone, "context", context), mock.patch.object(
        backbone, "attention", attention
    )


class Masked:
    def __init__(self, valid: Tensor, length: int):
        self.valid, self.length = valid, length


def main() -> None:
    config = load_config(ROOT / "configs/lm1b_unpacked.yaml", [*SMALL, f"train.micro_batch={SEQUENCES}"])
    model = LoMDM(config.model, config.objective).train()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # gates, heads and output start at zero, where all losses are alike
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    length = config.model.length
    x = torch.randint(200, 8192, (SEQUENCES, length), generator=torch.Generator().manual_seed(1))
    noise = draw_noise(config, 0, torch.arange(SEQUENCES), torch.device("cpu"))

    def run(valid: Tensor | None) -> tuple[float, float, float]:
        model.zero_grad()
        start = time.perf_counter()
        stats = backpropagate(Alone(model), x, valid, noise, config)
        seconds = time.perf_counter() - start
        norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
        return seconds, float(stats["bound"]), float(norm)

    kinds = ["sentences", str(length), str(length // 2), str(length // 4)]
    valids = {kind: torch.arange(length) < lengths(kind, length)[:, None] for kind in kinds}
    seconds, values = {}, {}
    for number in range(ROUNDS + 1):
        for kind, valid in valids.items():
            for way in ("left out", "computed"):
                if way == "computed":
                    first, second = computed(valid)
                    with first, second:
                        taken, *values[kind, way] = run(valid)
                else:
                    taken, *values[kind, way] = run(valid)
                if number:
                    seconds.setdefault((kind, way), []).append(taken)
    lines = [
        "| lengths | real | left out, s | computed, s | ratio | of all real | loss differs by | norm by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    medians = {key: statistics.median(taken) for key, taken in seconds.items()}
    for kind, valid in valids.items():
        ours, theirs = (medians[kind, way] for way in ("left out", "computed"))
        differs = [
            abs(a / b - 1) for a, b in zip(values[kind, "left out"], values[kind, "computed"], strict=True)
        ]
        cells = [kind, f"{valid.float().mean():.2f}", f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]
        cells += [f"{ours / medians[str(length), 'left out']:.2f}", *(f"{d:.1e}" for d in differs)]
        lines.append(f"| {' | '.join(cells)} |")
    about = (
        f"`python benchmarks/padding.py`, {machine.cpu()}, "
        f"{torch.get_num_threads()} threads of {os.cpu_count()} cores, torch {torch.__version__}, float32, "
        f"{config.model.blocks} blocks of {config.model.width}, V = {config.model.vocab_size:,}. {SEQUENCES} "
        f"sequences of {length}; medians of {ROUNDS} rounds in turns. Real: share of the positions; of all "
        "real: `left out` over its own time where no position is padding."
    )
    table = "\n".join(lines)
    (Path(__file__).parent / "results" / "padding.md").write_text(f"# Padding\n\n{about}\n\n{table}\n")
    print(table)


if __name__ == "__main__":
    main()
