"""A checkpoint as a Hugging Face folder that loads with `transformers` alone: `lomdm convert to-hf`."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoTokenizer

from lomdm_dist.convert.hf.configuration_lomdm import LomdmConfig
from lomdm_dist.convert.hf.modeling_lomdm import LomdmForMaskedLM
from lomdm_dist.data.shards import TokenizerFacts
from lomdm_dist.errors import UserError
from lomdm_dist.files import new_folder
from lomdm_dist.model import LoMDM
from lomdm_dist.train.checkpoint import Checkpoint

TOLERANCE = 1e-4  # of float32 arithmetic; a wrong weight or formula is off by far more
CHECKED_SEQUENCES = 2


def to_hf(checkpoint: Checkpoint, out: Path, weights: str) -> dict:
    """Write OUT with the `ema` or `raw` weights, and check that it computes what the checkpoint does.

    Written beside OUT and renamed when the check has passed, so OUT is whole or absent. Raises
    UserError where OUT holds something, RuntimeError where the export differs from the checkpoint.
    """
    _check_exportable(checkpoint)
    model, tokenizer = checkpoint.build_model(weights), checkpoint.tokenizer()
    with new_folder(out) as partial:
        _write_model(model, _hf_config(checkpoint), partial)
        _write_tokenizer(tokenizer, checkpoint.config.model.length, partial)
        (partial / "README.md").write_text(_model_card(checkpoint, weights, out.resolve().name))
        checkpoint.config.save(partial / "config.yaml")
        _check_tokenizer(partial, checkpoint.state.data.tokenizer)
        differences = _compare(model, partial, checkpoint)
    return differences | {"parameters": sum(p.numel() for p in model.parameters())}


def _check_exportable(checkpoint: Checkpoint) -> None:
    objective = checkpoint.config.objective
    if objective.name not in ("mdlm", "lomdm"):
        raise UserError(f"to-hf exports mdlm and lomdm so far; {checkpoint.folder} is {objective.name}")
    plain = {"schedule": "power", "normalize": "norm_sig", "head": "transformer"}
    other = [f"{k}={getattr(objective, k)}" for k, v in plain.items() if getattr(objective, k, v) != v]
    if other:
        raise UserError(
            f"to-hf does not export the ablation {' '.join(other)} so far: {checkpoint.folder} has it"
        )


def _hf_config(checkpoint: Checkpoint) -> LomdmConfig:
    model, objective, data = checkpoint.config.model, checkpoint.config.objective, checkpoint.state.data
    return LomdmConfig(
        vocab_size=model.vocab_size,
        mask_token_id=model.mask_id,
        pad_token_id=data.tokenizer.pad_id,
        eos_token_id=data.tokenizer.eos_id,
        max_position_embeddings=model.length,
        hidden_size=model.width,
        num_hidden_layers=model.blocks,
        num_attention_heads=model.heads,
        condition_width=model.condition_width,
        objective=objective.name,
        c1=objective.c1,
        c2=objective.c2,
        packing=data.packing,
        attend=checkpoint.config.data.attend,
        torch_dtype="float32",
    )


def _write_model(model: LoMDM, config: LomdmConfig, folder: Path) -> None:
    """model.safetensors, config.json, and the two files of code that config.json's auto_map names."""
    LomdmConfig.register_for_auto_class()
    LomdmForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
    with torch.device("meta"):
        exported = LomdmForMaskedLM(config)
    exported.load_state_dict(model.state_dict(), assign=True)  # shares the memory; refuses other names
    exported.save_pretrained(folder)


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


@torch.no_grad()
def _compare(model: LoMDM, folder: Path, checkpoint: Checkpoint) -> dict[str, float]:
    """Load the export as a stranger does, and compare all that it computes. Raises RuntimeError."""
    exported = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    x, z, valid = _random_batch(checkpoint)
    features, reverse, condition = model.see(z, valid)
    seen = exported(z, attention_mask=valid)
    logits = _difference(model.backbone.output(features[valid], condition), seen.logits[valid])
    psi = _difference(reverse.exponent.expand(z.shape), seen.exponents)
    phi = _difference(
        model.order(x, valid).exponent.expand(x.shape), exported.order_exponents(x, attention_mask=valid)
    )
    if not all(difference <= TOLERANCE for difference in (logits, psi, phi)):  # so that nan fails too
        raise RuntimeError(
            f"the export in {folder} differs from checkpoint {checkpoint.folder}: logits by up to "
            f"{logits:.3g}, exponents by up to {psi:.3g} (psi) and {phi:.3g} (phi), more than {TOLERANCE:g}"
        )
    return {"max_logit_difference": logits, "max_exponent_difference": max(psi, phi)}


def _random_batch(checkpoint: Checkpoint) -> tuple[Tensor, Tensor, Tensor]:
    """Clean x, z with about half of it masked, and valid, all [B, L]; the last row has padding."""
    config, generator = checkpoint.config.model, torch.Generator().manual_seed(0)
    shape = (CHECKED_SEQUENCES, config.length)
    x = torch.randint(config.vocab_size - 1, shape, generator=generator)
    x = x + (x >= config.mask_id)  # clean text never holds the mask token
    z = torch.where(torch.rand(shape, generator=generator) < 0.5, config.mask_id, x)
    valid = torch.ones(shape, dtype=torch.bool)
    valid[-1, (config.length + 1) // 2 :] = False
    return x, z, valid


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference; 0 where both are -inf, nan where either is."""
    return torch.where(ours == theirs, 0.0, (ours - theirs).abs()).max().item()


def _check_tokenizer(folder: Path, expected: TokenizerFacts) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # it has no code
    found = {"vocab_size": len(tokenizer)}
    found |= {f"{name}_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "mask", "pad")}
    wrong = {key: value for key, value in found.items() if getattr(expected, key) not in (value, None)}
    if wrong:
        raise RuntimeError(
            f"the tokenizer in {folder} has {wrong}, the checkpoint was trained with {expected}"
        )


def _model_card(checkpoint: Checkpoint, weights: str, name: str) -> str:
    config, progress = checkpoint.config, checkpoint.progress
    objective, data = config.objective, checkpoint.state.data
    order = {
        "lomdm": f"learned order, exponents c1 + c2 NormSig with c1 = {objective.c1}, c2 = {objective.c2}",
        "mdlm": "random order, every exponent 1 (c1 = 1, c2 = 0)",
    }[objective.name]
    return MODEL_CARD.format(
        name=name,
        objective=objective.name,
        order=order,
        steps=f"{progress.step:,}",
        tokens=f"{progress.tokens:,}",
        weights={"ema": "average over the steps (ema)", "raw": "of the last step (raw)"}[weights],
        length=config.model.length,
        packing={
            "packed": "documents end to end, EOS after each",
            "wrapped": "documents end to end, EOS after each, and BOS and EOS around each sequence",
            "padded": "one document a sequence, EOS at its end, then padding; give `attention_mask`",
        }[data.packing],
    )


MODEL_CARD = """\
---
library_name: transformers
pipeline_tag: fill-mask
tags: [masked-diffusion, {objective}]
---

# A masked diffusion language model

| | |
|---|---|
| objective | {objective}: {order} |
| trained | {steps} steps, {tokens} tokens seen |
| weights | {weights} |
| sequences | {length} tokens; {packing} |

Load and sample (`torch`, `numpy` and `transformers` are all it needs; the code is in this folder):

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer
model = AutoModelForMaskedLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
print(tokenizer.batch_decode(model.sample(num=2, seed=0)))
```

`model(input_ids)` gives `logits` for the masked positions (-inf at the mask token) and the `exponents` seen
from there; `model.order_exponents(input_ids)` gives those of a clean text: larger is generated earlier.
Texts were encoded without special tokens but EOS after each: `tokenizer(text, add_special_tokens=False)`.

`model.nelbo(input_ids)` estimates an upper bound on -log p(x), in nats a sequence. A perplexity made of it,
exp(sum of the bounds / number of tokens), is itself an upper bound; compare it only with other bounds.
"""
