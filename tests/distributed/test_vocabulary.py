"""A vocabulary that does not divide over the ranks: GPT-2's 50,258 on two and four of them."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from lomdm_dist.cli import main
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
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export", trust_remote_code=True)
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert len(tokenizer) == config["vocab_size"] == VOCABULARY and config["tie_word_embeddings"] is False
    assert tokenizer.mask_token_id == config["mask_token_id"]
