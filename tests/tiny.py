"""A tiny corpus, and tiny models really trained on it. For fixtures of all test folders."""

import shutil
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed.checkpoint as dcp
import yaml

from lomdm_dist.convert.checkpoint import seal
from lomdm_dist.data.prepare import Request, prepare
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.train.checkpoint import Checkpoint
from tests.distributed.grids import on_processes, train

REPOSITORY = Path(__file__).parent.parent
VOCABULARY, LENGTH = 300, 16


def prepare_tiny(out: Path, packing: str = "packed", tokenizer: str = "bpe") -> Path:
    """Token shards of a little English, with a new BPE tokenizer or that of a folder; returns OUT."""
    text = out.with_name(out.name + ".txt")
    text.write_text("\n".join(topics[name] for name in sorted(topics)[:12]))
    vocabulary = VOCABULARY if tokenizer == "bpe" else None
    request = Request((str(text),), tokenizer, LENGTH, vocabulary, packing, 0.1, sample_by="line")
    prepare(request, out)
    return out


def tiny_config(data: Path, run: Path, objective: str | dict = "lomdm") -> dict:
    """Plain values of a config: 2 blocks of width 32, rates so large that all of it moves at once."""
    return {
        "model": {
            "vocab_size": VOCABULARY,
            "mask_id": ShardSet(data / "train").tokenizer.mask_id,
            "length": LENGTH,
            "width": 32,
            "blocks": 2,
            "heads": 2,
            "condition_width": 16,
        },
        "objective": objective if isinstance(objective, dict) else {"name": objective},
        "data": {"train": str(data / "train"), "valid": str(data / "valid")},
        "optim": {"learning_rate": 0.01, "heads_learning_rate": 0.01, "warmup_steps": 0, "ema_decay": 0.5},
        "train": {
            "run": str(run),
            "steps": 8,
            "global_batch": 8,
            "micro_batch": 8,
            "precision": "fp32",
            "log_every": 1,
        },
    }


def train_tiny(config: dict) -> Path:
    """Train by a config in a process of its own; returns the run's folder."""
    run = Path(config["train"]["run"])
    path = run.with_name(run.name + ".yaml")
    path.write_text(yaml.safe_dump(config))
    on_processes(1, train, [], None, path)
    return run


def randomize(run: Path, out: Path, overrides: list[str] | tuple[str, ...] = ()) -> Checkpoint:
    """A copy of a run's checkpoint with random weights, others for raw than for ema, and no moments.

    With overrides of the config, of another objective say: then of the model that they mean. Few steps of
    training leave the gates near zero and the exponents near c1: too near for a comparison.
    """
    checkpoint = Checkpoint(run, overrides)
    shutil.copytree(checkpoint.folder, out, ignore=shutil.ignore_patterns("*.distcp", ".metadata"))
    checkpoint.config.save(out / "config.yaml")
    generator, state = torch.Generator().manual_seed(0), {}
    for kind in ("raw", "ema"):
        for name, shape in checkpoint.shapes().items():
            state[f"{kind}/{name}"] = 0.2 * torch.randn(shape, generator=generator)
    dcp.save(state, checkpoint_id=out, no_dist=True)
    seal(out, checkpoint.state)
    return Checkpoint(out)
