"""A checkpoint as a Hugging Face folder that loads with `transformers` alone: `lomdm convert to-hf`.

Its weights go from the checkpoint to the files one shard at a time, so that no process need hold the model.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from lomdm_dist.config import Config, WindowObjective
from lomdm_dist.convert.checkpoint import read_tensor
from lomdm_dist.convert.compare import compare, outputs_of_checkpoint
from lomdm_dist.convert.hf import configuration_lomdm, modeling_lomdm
from lomdm_dist.convert.hf.configuration_lomdm import LomdmConfig
from lomdm_dist.convert.model_card import model_card
from lomdm_dist.data.shards import TokenizerFacts
from lomdm_dist.data.tokenizer import not_text
from lomdm_dist.errors import UserError
from lomdm_dist.files import check_new, new_folder
from lomdm_dist.model.lomdm import permutation_of
from lomdm_dist.train.checkpoint import Checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROOM = 1.3  # a model, and what computing with it takes, over its parameters' bytes in float32


def to_hf(
    checkpoint: Checkpoint,
    out: Path,
    weights: str = "ema",
    dtype: str = "float32",
    max_shard_gb: float = 5.0,
    check: str | None = None,
    bound: dict | None = None,
) -> dict:
    """Write OUT with the `ema` or `raw` weights, and check that it is what the checkpoint is.

    check "parameters" reads every parameter back; "logits", the default where the memory is free, also has
    both models compute, one after the other, on the weights as rounded to dtype. bound: a result of
    `lomdm eval ppl` for the model card. Written beside OUT and renamed when the check has passed, so OUT is
    whole or absent. Raises UserError where OUT holds something, RuntimeError where the export differs.
    """
    check_new(out)
    exported = _without_memory(checkpoint, DTYPES[dtype])
    parameters = sum(p.numel() for p in exported.parameters())
    checkpoint.check_fits(
        {f"{weights}/{name}": p.numel() for name, p in exported.named_parameters()}, weights
    )
    if check is None:
        fits = 4 * ROOM * parameters < psutil.virtual_memory().available
        check = "logits" if fits else "parameters"
    expected = outputs_of_checkpoint(checkpoint, weights, DTYPES[dtype]) if check == "logits" else None
    with new_folder(out) as partial:
        _write_tokenizer(checkpoint.tokenizer(), checkpoint.config.model.length, partial)
        _check_tokenizer(partial, checkpoint.state.data.tokenizer)
        files = _write_weights(checkpoint, weights, exported, max_shard_gb, partial)
        _write_code(exported, partial)
        _generation_config(checkpoint).save_pretrained(partial)
        _public(checkpoint.config).save(partial / "config.yaml")
        _check_weights(checkpoint, weights, exported, partial)
        result = {"checked": check, "parameters": parameters, "files": files, "dtype": dtype}
        if expected is not None:
            result |= compare(expected, checkpoint, partial)
        card, result["card_lacks"] = model_card(checkpoint, weights, out.resolve().name, result, bound)
        (partial / "README.md").write_text(card)
    return result


# What is written.


def _without_memory(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The exported model on the meta device: its config, and its parameters' names and shapes."""
    causal = checkpoint.config.objective.name == "ar"
    kind = modeling_lomdm.LomdmForCausalLM if causal else modeling_lomdm.LomdmForMaskedLM
    with torch.device("meta"):
        exported = kind(hf_config(checkpoint)).to(dtype)
    exported.config.architectures = [kind.__name__]
    exported.config.dtype = dtype
    exported.config.auto_map = {
        "AutoConfig": f"configuration_lomdm.{LomdmConfig.__name__}",
        f"AutoModelFor{'CausalLM' if causal else 'MaskedLM'}": f"modeling_lomdm.{kind.__name__}",
    }
    return exported


def hf_config(checkpoint: Checkpoint) -> LomdmConfig:
    """All that the exported code needs to know; a permutation that was drawn is written out."""
    config, data = checkpoint.config, checkpoint.state.data
    return LomdmConfig(
        vocab_size=config.model.vocab_size,
        pad_token_id=data.tokenizer.pad_id,
        eos_token_id=data.tokenizer.eos_id,
        never_token_ids=list(not_text(checkpoint.tokenizer(), config.model.vocab_size)),
        hidden_size=config.model.width,
        num_hidden_layers=config.model.blocks,
        condition_width=config.model.condition_width,
        packing=data.packing,
        **in_their_words(config),
    )


def in_their_words(config: Config) -> dict:
    """What config.yaml says, and the shapes of the weights do not, under the names of config.json."""
    model, objective = config.model, config.objective
    settings = objective.model_dump(exclude={"name", "time", "time_eps", "permutation_seed"})
    if isinstance(objective, WindowObjective) and objective.order == "permutation":
        settings["permutation"] = permutation_of(objective, model.length).tolist()
    return settings | {
        "mask_token_id": model.mask_id,
        "max_position_embeddings": model.length,
        "num_attention_heads": model.heads,
        "objective": objective.name,
        "attend": config.data.attend,
    }


def _read(checkpoint: Checkpoint, weights: str, name: str, like: Tensor) -> Tensor:
    """A parameter in the shape and the dtype of `like`."""
    tensor = read_tensor(checkpoint, f"{weights}/{name}")
    if not tensor.isfinite().all():
        raise UserError(
            f"{weights}/{name} of checkpoint {checkpoint.folder} holds a number that is not finite"
        )
    return tensor.view(like.shape).to(like.dtype)


def _write_weights(
    checkpoint: Checkpoint, weights: str, exported: PreTrainedModel, max_shard_gb: float, folder: Path
) -> int:
    """model.safetensors, or several and their index. Only one is in memory at a time. Returns how many."""
    likes = exported.state_dict()
    split = split_torch_state_dict_into_shards(likes, max_shard_size=int(max_shard_gb * 10**9))
    with tqdm(total=len(likes), desc="export", unit=" tensors", disable=None) as bar:
        for file, names in split.filename_to_tensors.items():
            tensors = {}
            for name in names:
                tensors[name] = _read(checkpoint, weights, name, likes[name])
                bar.update()
            save_file(tensors, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(0o644)  # it makes files that nobody else may read
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return len(split.filename_to_tensors)


def _write_code(exported: PreTrainedModel, folder: Path) -> None:
    """config.json, and the two files of code that its auto_map names."""
    exported.config.save_pretrained(folder)
    for module in (configuration_lomdm, modeling_lomdm):
        shutil.copy(module.__file__, folder)


def _generation_config(checkpoint: Checkpoint) -> GenerationConfig:
    """The settings of `lomdm sample`, in the words of our `generate`; of `transformers`' for `ar`."""
    config, ids = checkpoint.config, checkpoint.state.data.tokenizer
    length = config.model.length
    steps = {"max_length": length} if config.objective.name == "ar" else {"steps": length}
    return GenerationConfig(
        do_sample=True,
        top_p=config.sampler.top_p,
        top_k=0,
        temperature=config.sampler.temperature,
        eos_token_id=ids.eos_id,
        pad_token_id=ids.eos_id if ids.pad_id is None else ids.pad_id,
        **steps,
    )


def _write_tokenizer(tokenizer, length: int, folder: Path) -> None:
    """The checkpoint's tokenizer, in words that `transformers` 4 and 5 read."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # a batch needs some; attention_mask tells it from text
    tokenizer.model_max_length = length
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # 5 writes a name that 4 does not know
    settings["model_input_names"] = ["input_ids", "attention_mask"]  # 4 would add token_type_ids
    path.write_text(json.dumps(settings, indent=2) + "\n")


def _public(config: Config) -> Config:
    """Without the places of this machine: of an absolute path only its last name is published."""

    def named(path):
        return type(path)(Path(path).name) if Path(path).is_absolute() else path

    data = config.data
    train = [source.model_copy(update={"path": named(source.path)}) for source in data.train]
    data = data.model_copy(update={"train": train, "valid": named(data.valid), "cache": None})
    start = config.train.start_from
    places = {"run": named(config.train.run), "start_from": None if start is None else named(start)}
    run = config.train.model_copy(update=places)
    return config.model_copy(update={"data": data, "train": run})


# What is checked of the files; what the model computes is compared in compare.py.


def _check_tokenizer(folder: Path, expected: TokenizerFacts) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {"vocab_size": len(tokenizer)}
    found |= {f"{name}_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "mask", "pad")}
    wrong = {key: value for key, value in found.items() if getattr(expected, key) not in (value, None)}
    if wrong:
        raise RuntimeError(
            f"the tokenizer in {folder} has {wrong}, the checkpoint was trained with {expected}"
        )


def _check_weights(checkpoint: Checkpoint, weights: str, exported: PreTrainedModel, folder: Path) -> None:
    """Read all parameters back, one at a time: each there once, and bit for bit the checkpoint's."""
    missing = exported.state_dict()
    for name, tensor in _saved(folder):
        like = missing.pop(name, None)
        if like is None or not torch.equal(tensor, _read(checkpoint, weights, name, like)):
            raise RuntimeError(f"{name} in {folder} differs from checkpoint {checkpoint.folder}")
    if missing:
        raise RuntimeError(f"{folder} lacks {', '.join(missing)} of checkpoint {checkpoint.folder}")


def _saved(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)
