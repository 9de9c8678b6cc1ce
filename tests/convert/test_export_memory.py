"""Exports of large models: what they take of memory, measured in a process of their own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lomdm_dist.config import load_config
from lomdm_dist.convert.checkpoint import seal
from lomdm_dist.data.tokenizer import describe
from lomdm_dist.model import LoMDM
from lomdm_dist.parallel.layout import whole_layouts
from lomdm_dist.train.checkpoint import DataFacts, State

ROOT = Path(__file__).parents[2]
EXPORT = """
import resource, sys
from lomdm_dist.cli import main
main(["convert", "to-hf", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def make_checkpoint(folder: Path, config_name: str, overrides: list[str] = ()) -> int:
    """A checkpoint (ema only) of a config, which no process ever holds. Returns its parameters.

    Each parameter is one random row, over and over: DCP copies such a view when it writes its file.
    """
    config = load_config(ROOT / f"configs/{config_name}.yaml", overrides)
    with torch.device("meta"):
        layouts = whole_layouts(LoMDM(config.model, config.objective, config.data.attend))
    generator = torch.Generator().manual_seed(0)
    state = {
        f"ema/{name}": (0.05 * torch.randn(layout.shape[-1:], generator=generator)).expand(layout.shape)
        for name, layout in layouts.items()
    }
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)  # or it keeps what a file holds
    dcp.save(state, storage_writer=writer, no_dist=True)
    tokenizer = make_tokenizer(config.model.vocab_size, config.model.mask_id)
    tokenizer.save_pretrained(folder / "tokenizer")
    config.save(folder / "config.yaml")
    facts = DataFacts(tokenizer=describe(tokenizer), packing="packed", identity="0" * 64)
    counters = {"step": 1, "sequences": 1, "tokens": 1, "ema_updates": 1, "versions": {}, "files": {}}
    seal(folder, State(format=2, data=facts, **counters))
    return sum(tensor.numel() for tensor in state.values())


def make_tokenizer(vocab_size: int, mask_id: int) -> PreTrainedTokenizerFast:
    """Words that are numbers; EOS stands before the mask, as GPT-2's."""
    words = {str(k): k for k in range(vocab_size) if k not in (mask_id - 1, mask_id)}
    words |= {"<|endoftext|>": mask_id - 1, "[MASK]": mask_id}
    backend = Tokenizer(models.WordLevel(words))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", mask_token="[MASK]")


def export_in_a_process(*arguments: str) -> tuple[str, int]:
    """What the command says, and the most bytes that the process ever held, of its files in memory too."""
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *said, peak = done.stdout.strip().splitlines()
    return said[-1], int(peak)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["logits", "parameters"])
def test_a_1b_export_takes_less_than_one_and_a_half_times_its_size(check, tmp_path):
    parameters = make_checkpoint(tmp_path / "step-1", "1b")
    assert parameters == 1_141_251_412
    said, peak = export_in_a_process(str(tmp_path / "step-1"), str(tmp_path / "out"), "--check", check)
    print(f"{said}; {peak / 1e9:.2f} GB")
    assert peak < 1.5 * 4 * parameters


@pytest.mark.slow
def test_3b_by_shards_takes_less_than_5_gb(tmp_path):
    larger = ["model.width=3072", "model.blocks=24", "model.heads=24"]
    parameters = make_checkpoint(tmp_path / "step-1", "1b", larger)
    assert parameters > 3e9
    given = [str(tmp_path / "step-1"), str(tmp_path / "out"), "--max-shard-gb", "1", "--check", "parameters"]
    said, peak = export_in_a_process(*given)
    print(f"{said}; {peak / 1e9:.2f} GB")
    assert peak < 5e9
