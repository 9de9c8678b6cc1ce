"""A vocabulary that does not divide over the ranks: GPT-2's 50,258 on two and four of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from lomdm_dist.cli import main
from lomdm_dist.ops.cross_entropy import linear_cross_entropy
from tests.distributed.grids import on_processes
from tests.distributed.runs import curve
from tests.distributed.test_grids import TOLERANCE, contents, on_grid, train
from tests.tiny import prepare_tiny

VOCABULARY = 50_258


@pytest.fixture(scope="module")
def gpt2_sized(tmp_path_factory, tiny_data) -> Path:
    """Shards of a tokenizer with as many tokens as GPT-2's and the mask, most of them never in a text."""
    folder = tmp_path_factory.mktemp("large")
    tokenizer = AutoTokenizer.from_pretrained(tiny_data / "tokenizer")
    tokenizer.save_pretrained(folder / "tokenizer")
    path = folder / "tokenizer/tokenizer.json"
    written = json.loads(path.read_text())
    vocabulary = written["model"]["vocab"]
    for number in range(len(vocabulary), VOCABULARY):
        vocabulary[f"<{number}>"] = number
    path.write_text(json.dumps(written))
    return prepare_tiny(folder / "data", tokenizer=str(folder / "tokenizer"))


def test_the_loss_is_that_of_one_process_and_no_padding_is_exported(gpt2_sized, base, tmp_path):
    data = [f"data.train={gpt2_sized / 'train'}", f"data.valid={gpt2_sized / 'valid'}"]
    size = [f"model.vocab_size={VOCABULARY}", "model.width=16", "model.heads=4", "model.blocks=1"]
    options = [*base, *data, *size, "train.steps=2", "train.global_batch=4", "train.micro_batch=4"]
    runs = {grid: tmp_path / grid for grid in ("1", "tp2", "tp4")}
    for grid, run in runs.items():
        processes, place = on_grid(grid)
        on_processes(processes, train, [*options, *place, f"train.run={run}"])
    for grid in ("tp2", "tp4"):
        for key in ("loss", "grad_norm"):
            ours, theirs = curve(runs[grid], key), curve(runs["1"], key)
            assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=TOLERANCE)
    state = contents(runs["tp4"] / "checkpoints/step-2")
    assert state["raw/backbone.embedding.weight"].shape == (VOCABULARY, 16)
    assert state["raw/backbone.output.bias"].shape == (VOCABULARY,)
    main(["convert", "to-hf", str(runs["tp4"]), str(tmp_path / "export")])
    with safe_open(tmp_path / "export/model.safetensors", "pt") as exported:
        rows = {name: exported.get_slice(name).get_shape()[0] for name in exported.keys()}  # noqa: SIM118
    assert rows["backbone.output.weight"] == rows["backbone.embedding.weight"] == VOCABULARY


def cross_entropy_on(size: int, vocab_size: int) -> list[torch.Tensor]:
    """Values and gradients of the split projection, with CE and mean both in the loss; one odd vocabulary."""
    from lomdm_dist.parallel.grid import process_grid

    with process_grid(size) as grid:
        generator = torch.Generator().manual_seed(0)
        rows = -(-vocab_size // size) * size
        hidden = torch.randn(9, 6, generator=generator, requires_grad=True)
        weight, bias = torch.randn(8, 6, generator=generator), torch.randn(8, generator=generator)
        values = torch.rand(vocab_size, generator=generator).requires_grad_()
        targets = torch.randint(3, vocab_size, (9,), generator=generator)
        part = slice(grid.tensor_rank * rows // size, (grid.tensor_rank + 1) * rows // size)
        weight, bias = (t[part].clone().requires_grad_() for t in (weight, bias))
        group = grid.tensor_group if size > 1 else None
        ce, mean = linear_cross_entropy(hidden, weight, bias, targets, 2, vocab_size, values, group)
        weights = torch.rand(2, 9, generator=generator)
        ((ce * weights[0]).sum() + (mean.log() * weights[1]).sum()).backward()
        return [t.detach() for t in (ce, mean, hidden.grad, values.grad, weight.grad, bias.grad)]


@pytest.mark.parametrize("vocab_size", [8, 7, 5])  # on four ranks: even, padded, and one that is all padding
def test_a_split_projection_is_the_whole_one(vocab_size):
    (ce, mean, hidden, values, weight, bias), *_ = on_processes(1, cross_entropy_on, 1, vocab_size)
    of_ranks = on_processes(4, cross_entropy_on, 4, vocab_size)
    for ours in of_ranks:
        for mine, whole in zip(ours[:4], (ce, mean, hidden, values), strict=True):
            assert torch.allclose(mine, whole, atol=1e-6)
    for whole, parts in ((weight, [r[4] for r in of_ranks]), (bias, [r[5] for r in of_ranks])):
        together = torch.cat(parts)
        assert torch.allclose(together[:vocab_size], whole[:vocab_size], atol=1e-6)
        assert (together[vocab_size:] == 0).all() and not together.isnan().any()
