"""Checkpoints of other programs as training checkpoints: `lomdm convert from-hf`.

The result has the weights, as `raw` and as `ema`, and no optimiser: a run starts from it with
`train.start_from`. Nothing that stands in the source is run.
"""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from lomdm_dist.config import Config, load_config, make_config
from lomdm_dist.convert.checkpoint import as_used, read_tensor, save_tensors, seal, verify
from lomdm_dist.convert.hf.configuration_lomdm import LomdmConfig
from lomdm_dist.convert.public import FIRST, Found, read_public, recognise, their_name
from lomdm_dist.convert.to_hf import in_their_words
from lomdm_dist.convert.weights import of_tensors, open_torch, open_weights, state_dict
from lomdm_dist.data.tokenizer import describe, load_tokenizer
from lomdm_dist.errors import UserError, first_line
from lomdm_dist.files import check_new, new_folder
from lomdm_dist.train.checkpoint import WEIGHTS, Checkpoint, DataFacts, State, parameter_shapes

CONFIG = "config.yaml"  # of an export of ours
PACKINGS = ("packed", "wrapped", "padded")
UNKNOWN = "not-known"  # stands in the config for what no public checkpoint says
WANTED = {"length": "tokens a sequence", "heads": "attention heads"}


def from_hf(
    source: Path,
    out: Path,
    versions: dict[str, str],
    layout: str = "auto",
    tokenizer: str | None = None,
    packing: str | None = None,
    overrides: list[str] | tuple[str, ...] = (),
) -> dict:
    """Write OUT, a checkpoint folder, of an export or a public checkpoint; what came of it.

    The written parameters are compared with the source's bit for bit, so OUT is right or absent. `versions`
    are recorded. Raises UserError.
    """
    check_new(out)
    facts = _facts(source)
    found = _find(source, facts, layout)
    tokens = _tokenizer(source, tokenizer)
    config = _config(source, facts, found, tokens, overrides)
    shapes = _checked_shapes(found, config, source)
    packing = packing or found.packing
    if packing not in PACKINGS:
        raise UserError(f"{source}: config.json has packing {packing!r}; known are {', '.join(PACKINGS)}")
    data = DataFacts(tokenizer=describe(tokens), packing=packing, identity=f"imported, {found.layout}")

    def read(name: str) -> Tensor:
        kind, _, name = name.partition("/")
        return found.kinds[kind].read(name).view(shapes[name])

    wanted = {f"{kind}/{name}": shape for kind in WEIGHTS for name, shape in shapes.items()}
    with new_folder(out) as partial:
        save_tensors(partial, wanted, read)
        config.save(partial / "config.yaml")
        tokens.save_pretrained(partial / "tokenizer")
        nothing = dict.fromkeys(("step", "sequences", "tokens", "ema_updates"), 0)
        seal(partial, State(format=2, **nothing, data=data, versions=versions, files={}))
        _check_same(verify(partial).checkpoint, wanted, read)
    return {
        "layout": found.layout,
        "objective": config.objective.name,
        "parameters": sum(torch.Size(shape).numel() for shape in shapes.values()),
        "max_parameter_difference": 0.0,
        "packing": packing,
        "notes": found.notes,
    }


def _facts(source: Path) -> dict:
    """config.json, beside a file or in a folder; empty where there is none."""
    path = (source if source.is_dir() else source.parent) / "config.json"
    if not source.exists():
        raise UserError(f"there is no {source}: give a folder or a file of weights, downloaded before")
    if not path.is_file() or source.suffix == ".ckpt":
        return {}
    try:
        facts = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {first_line(error)}") from None
    return facts if isinstance(facts, dict) else {}


def _find(source: Path, facts: dict, layout: str) -> Found:
    """Recognise a source and give its weights our names. Raises UserError."""
    shadows = None
    if source.is_file() and source.suffix != ".safetensors":
        content = open_torch(source)
        weights, shadows = of_tensors(state_dict(content, source), source), _shadows(content, source)
    else:
        weights = open_weights(source)
    ours = facts.get("model_type") == "lomdm" or "backbone.embedding.weight" in weights.shapes
    if ours and layout in ("auto", "lomdm"):
        return Found("lomdm", dict.fromkeys(WEIGHTS, weights), {}, "", facts.get("packing", "packed"))
    if layout == "lomdm":
        raise UserError(f"{source} is no export of to-hf: it has no tensor backbone.embedding.weight")
    return read_public(recognise(weights.shapes, facts, layout, source), weights, shadows, facts, source)


def _shadows(content: dict, source: Path) -> list[Tensor] | None:
    """Lightning's averages; None where it has none. UserError where they are none."""
    if content.get("ema") is None or isinstance(content["ema"], Tensor):
        return None
    shadows = content["ema"].get("shadow_params") if isinstance(content["ema"], dict) else None
    if not isinstance(shadows, list):
        raise UserError(f"{source}: its `ema` holds no list shadow_params of averaged weights")
    return shadows


def tokenizer_of(folder: Path):
    """The one in an export or a public folder; of an export with the padding that training had. UserError."""
    AutoConfig.register("lomdm", LomdmConfig, exist_ok=True)  # or its config.json makes transformers complain
    tokenizer = load_tokenizer(folder)
    # transformers saves with a tokenizer how it was last called: no part of what it is
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    facts = _facts(folder)
    if facts.get("model_type") == "lomdm" and facts.get("pad_token_id") is None:
        tokenizer.pad_token = None  # to-hf names one, as a batch needs some
    return tokenizer


def _tokenizer(source: Path, name: str | None):
    """The one that is named, or that lies beside the weights."""
    folder = source if source.is_dir() else source.parent
    if name is None and not (folder / "tokenizer.json").is_file():
        raise UserError(f"{source} has no tokenizer: name its own with --tokenizer, such as gpt2")
    return load_tokenizer(name) if name else tokenizer_of(folder)


def _config(source: Path, facts: dict, found: Found, tokenizer, overrides) -> Config:
    """An export brings its own; of a public checkpoint, what is known. Raises UserError."""
    if found.layout == "lomdm":
        if not (source / CONFIG).is_file():
            raise UserError(f"{source} has no {CONFIG}: put that of the export which it was made from there")
        config = load_config(source / CONFIG, overrides)
        _check_tokenizer(tokenizer, config.model.vocab_size, config.model.mask_id, source)
        _check_facts(source, facts, config)
        return config
    _check_tokenizer(tokenizer, found.model["vocab_size"], tokenizer.mask_token_id, source)
    given = {override.partition("=")[0] for override in overrides}
    for key, meaning in WANTED.items():
        if key not in found.model and f"model.{key}" not in given:
            raise UserError(f"{source} does not say its number of {meaning}: add model.{key}=NUMBER")
    values = {
        "model": {"mask_id": tokenizer.mask_token_id} | found.model,
        "objective": {"name": found.objective},
        "data": {"train": UNKNOWN, "valid": UNKNOWN},
        "train": {"run": UNKNOWN, "steps": 1, "global_batch": 1, "micro_batch": 1},
    }
    return make_config(values, overrides, source)


def _check_facts(source: Path, facts: dict, config: Config) -> None:
    """UserError where an export's config.json, which `transformers` reads, contradicts its config.yaml."""
    wrong = [
        f"{key} {facts[key]!r}, not {value!r}"
        for key, value in in_their_words(config).items()
        if facts.get(key, value) != value
    ]
    if wrong:
        raise UserError(f"{source}: config.json has {'; '.join(wrong)} as {CONFIG} has")


def _check_tokenizer(tokenizer, vocab_size: int, mask_id: int, source: Path) -> None:
    described = describe(tokenizer)
    if (described.vocab_size, described.mask_id) != (vocab_size, mask_id):
        raise UserError(
            f"the tokenizer has {described.vocab_size:,} ids and the mask {described.mask_id}; {source} has "
            f"{vocab_size:,} rows and the mask {mask_id}: give its own as --tokenizer"
        )


def _checked_shapes(found: Found, config: Config, source: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters, named as in a checkpoint. UserError where the source has others."""
    shapes, wrong = parameter_shapes(config), []
    theirs = found.kinds["raw"].shapes
    say = str if found.layout == "lomdm" else their_name
    for name, shape in shapes.items():
        flat = as_used(shape)
        if theirs.get(name) != flat:
            has = f"has the shape {list(theirs[name])}, not {list(flat)}" if name in theirs else "is missing"
            wrong.append(f"{say(name)} {has}")
    wrong += [f"{say(name)} is not of the model" for name in theirs if name not in shapes]
    if wrong:
        more = f"; and {len(wrong) - FIRST} more" if len(wrong) > FIRST else ""
        raise UserError(f"{source} does not fit its model ({found.layout}): {'; '.join(wrong[:FIRST])}{more}")
    return shapes


def _check_same(checkpoint: Checkpoint, names, read) -> None:
    """What was written is the source, bit for bit."""
    for name in names:
        if not torch.equal(read_tensor(checkpoint, name), read(name)):
            raise RuntimeError(f"{name} in {checkpoint.folder} is not what was read")
