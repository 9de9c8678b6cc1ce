"""The public checkpoints of the family, in our names: MDLM, BD3LM, Duo, and their autoregressive baselines.

All of them are one backbone, SEDD's DiT, under the same names. A file in Hugging Face's form has config.json
beside it; one of Lightning's has the weights of the last step (`state_dict`) and their average
(`ema.shadow_params`, a list in the order of the parameters). What they do not share:

    mdlm    masks; time is no input unless `time_conditioning`
    bd3lm   masks, blocks of tokens from left to right; adaLN may be absent (`adaln`)
    duo     uniform noise instead of masks; time is an input
    ar      causal attention, no adaLN

Every tensor is used, or named in an error. Where adaLN is absent, one is made that changes nothing: shift
and scale 0, gates 1. The facts are from the public code: kuleshov-group/mdlm and bd3lms, s-sahoo/duo.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lomdm_dist.convert.weights import Weights, of_tensors
from lomdm_dist.errors import UserError
from lomdm_dist.model.initial import draw_start

LAYOUTS = ("mdlm", "bd3lm", "duo", "ar")
PREFIX = "backbone."
OUTSIDE = {
    "vocab_embed.embedding": "embedding.weight",
    "sigma_map.mlp.0.weight": "condition.mlp.0.weight",
    "sigma_map.mlp.0.bias": "condition.mlp.0.bias",
    "sigma_map.mlp.2.weight": "condition.mlp.2.weight",
    "sigma_map.mlp.2.bias": "condition.mlp.2.bias",
    "output_layer.norm_final.weight": "output.norm.weight",
    "output_layer.linear.weight": "output.weight",
    "output_layer.linear.bias": "output.bias",
    "output_layer.adaLN_modulation.weight": "output.modulation.weight",
    "output_layer.adaLN_modulation.bias": "output.modulation.bias",
}
IN_BLOCK = {
    "norm1.weight": "norm1.weight",
    "attn_qkv.weight": "qkv.weight",
    "attn_out.weight": "attention_out.weight",
    "norm2.weight": "norm2.weight",
    "mlp.0.weight": "mlp_in.weight",
    "mlp.0.bias": "mlp_in.bias",
    "mlp.2.weight": "mlp_out.weight",
    "mlp.2.bias": "mlp_out.bias",
    "adaLN_modulation.weight": "modulation.weight",
    "adaLN_modulation.bias": "modulation.bias",
}
ROTARY = "backbone.rotary_emb.inv_freq"  # says the width of a head
BUFFERS = {ROTARY, "sampling_eps_min", "sampling_eps_max"}  # the latter BD3LM's range of noise in training
FREQUENCIES, DEFAULT_CONDITION = 256, 128
FIRST = 4  # names that an error lists
PACKING = {"mdlm": "wrapped", "duo": "wrapped", "bd3lm": "packed", "ar": "wrapped"}  # of their own training
NOTES = {
    "mdlm": [],
    "bd3lm": [
        "BD3LM sees the masked block and, in a second stream, the clean blocks before it, which is not done "
        "here: its backbone is a masked model of random order, which sees the whole text"
    ],
    "duo": [
        "Duo is trained on uniform noise, never on masks: its backbone is a start for a masked model, and "
        "the embedding of the mask token is one that it never used"
    ],
    "ar": [
        "the public AR begins with BOS, which it does not predict: here the mask token, which it never saw, "
        "stands before the text, and the first token is predicted from it"
    ],
}
AT_TIME_ZERO = "time is an input of this network: here it is always 0"


@dataclass(frozen=True)
class Found:
    """A checkpoint of another program, its weights under our names."""

    layout: str
    kinds: dict[str, Weights]  # raw and ema; the same one where there is only one
    model: dict  # what is known of the config's section
    objective: str
    packing: str
    notes: list[str] = field(default_factory=list)


def recognise(names: Iterable[str], facts: dict, asked: str, source) -> str:
    """One of LAYOUTS, by config.json (`facts`) and the names of the tensors. Raises UserError."""
    names = set(names)
    kind = str(facts.get("model_type", "")).lower()
    if kind == "gpt2" or any(name.endswith("wte.weight") for name in names):
        raise UserError(
            f"{source} is GPT-2 itself, with learned positions, biases and tied embeddings, which the "
            "backbone here has not: of AR models, the baselines of the MDLM family can be imported"
        )
    if f"{PREFIX}vocab_embed.embedding" not in names:
        raise UserError(
            f"{source} is of no layout known here: it has no tensor {PREFIX}vocab_embed.embedding, but "
            f"{', '.join(sorted(names)[:FIRST]) or 'nothing'}"
        )
    said = "ar" if facts.get("causal") else kind if kind in LAYOUTS else None
    if said and asked not in ("auto", said):
        raise UserError(f"--layout {asked}: the config.json in {source} says {said}")
    if said or asked != "auto":
        return said or asked
    adaln, blocks = f"{PREFIX}sigma_map.mlp.0.weight" in names, "sampling_eps_min" in names
    if adaln and blocks:
        return "bd3lm"
    if not adaln and not blocks:
        return "ar"
    may_be = "MDLM's or Duo's" if adaln else "BD3LM's or its AR baseline's"
    raise UserError(f"{source}: its tensors may be {may_be}, which have the same names: say --layout")


def read_public(layout: str, raw: Weights, shadows: list[Tensor] | None, facts: dict, source) -> Found:
    """A source under our names. Raises UserError where a tensor is unknown, or config.json says otherwise."""
    model = _sizes(raw.shapes, facts, source) | _heads(raw, facts, source)
    notes = list(NOTES[layout])
    if layout != "ar" and facts.get("time_conditioning", layout == "duo"):
        notes.append(AT_TIME_ZERO)
    if "sampling_eps_min" in raw.shapes:
        notes.append(
            "sampling_eps_min and sampling_eps_max, BD3LM's range of noise in training, are not used"
        )
    if shadows is None:
        notes.append("it has one set of weights, which is both raw and ema here")
    raw_here = _renamed(raw, model, source)
    ema = raw_here if shadows is None else _renamed(_averages(raw, shadows, source), model, source)
    kinds = {"raw": raw_here, "ema": ema}
    return Found(layout, kinds, model, "ar" if layout == "ar" else "mdlm", PACKING[layout], notes)


def _averages(raw: Weights, shadows: list[Tensor], source) -> Weights:
    """Lightning's averages have no names: they are in the order of the parameters."""
    names = [name for name in raw.shapes if name not in BUFFERS]
    shapes = [raw.shapes[name] for name in names]
    if [tuple(tensor.shape) for tensor in shadows if isinstance(tensor, Tensor)] != shapes:
        raise UserError(f"{source}: its ema.shadow_params are not those of the {len(names)} parameters")
    return of_tensors(dict(zip(names, shadows, strict=True)), source)


def _sizes(shapes: dict[str, tuple], facts: dict, source) -> dict:
    """The model's sizes, read off its shapes; config.json must not say otherwise."""
    vocab_size, width = _two(shapes, "vocab_embed.embedding", source)
    numbers = {found[1] for name in shapes if (found := re.match(r"backbone\.blocks\.(\d+)\.", name))}
    sizes = {"vocab_size": vocab_size, "width": width, "blocks": len(numbers)}
    if f"{PREFIX}sigma_map.mlp.0.weight" in shapes:
        sizes["condition_width"] = _two(shapes, "sigma_map.mlp.0.weight", source)[0]
    for ours, theirs in {"vocab_size": "vocab_size", "width": "hidden_dim", "blocks": "n_blocks"}.items():
        if facts.get(theirs, sizes[ours]) != sizes[ours]:
            raise UserError(f"{source}: config.json says {theirs} {facts[theirs]}, its tensors {sizes[ours]}")
    sizes |= {
        ours: facts[key]
        for ours, key in {"length": "model_length", "dropout": "dropout"}.items()
        if key in facts
    }
    return {"condition_width": DEFAULT_CONDITION} | sizes


def _two(shapes: dict[str, tuple], name: str, source) -> tuple[int, int]:
    shape = shapes[PREFIX + name]
    if len(shape) != 2:
        raise UserError(f"{source}: {PREFIX}{name} has the shape {list(shape)}, no matrix's")
    return shape


def _heads(raw: Weights, facts: dict, source) -> dict:
    """Their number, which only the rotary frequencies and config.json know."""
    if ROTARY not in raw.shapes:
        return {"heads": facts["n_heads"]} if "n_heads" in facts else {}
    found, width = raw.read(ROTARY), raw.shapes[f"{PREFIX}vocab_embed.embedding"][1]
    count = found.numel()
    expected = 10_000 ** -(torch.arange(count) / max(count, 1))
    fits = found.dim() == 1 and count and width % (2 * count) == 0
    if not fits or not torch.allclose(found, expected, rtol=1e-4):
        raise UserError(f"{source}: {ROTARY} is not that of whole heads, of base 10,000, the only one here")
    heads = width // (2 * count)
    if facts.get("n_heads", heads) != heads:
        raise UserError(f"{source}: config.json says n_heads {facts['n_heads']}, {ROTARY} means {heads}")
    return {"heads": heads}


def _renamed(weights: Weights, model: dict, source) -> Weights:
    """Under our names, with the adaLN that is absent made up."""
    theirs = {ours: name for name in weights.shapes if (ours := _our_name(name)) is not None}
    unknown = [name for name in weights.shapes if name not in BUFFERS and _our_name(name) is None]
    if unknown:
        raise UserError(f"{source}: no place for {_some(unknown)}")
    made = {} if any("sigma_map" in name for name in weights.shapes) else _no_modulation(model)
    if both := sorted(made.keys() & theirs.keys()):
        raise UserError(
            f"{source}: {PREFIX}sigma_map is missing, but there is {_some(theirs[n] for n in both)}"
        )
    shapes = {ours: weights.shapes[name] for ours, name in theirs.items()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in made.items()}

    def read(name: str) -> Tensor:
        return made[name] if name in made else weights.read(theirs[name])

    return Weights(shapes, read)


def their_name(ours: str) -> str:
    """The public name of one of our parameters, for an error; ours where there is none."""
    block = re.fullmatch(r"backbone\.blocks\.(\d+)\.(.+)", ours)
    table = IN_BLOCK if block else OUTSIDE
    wanted = block[2] if block else ours.removeprefix(PREFIX)
    for name, mine in table.items():
        if mine == wanted:
            return f"{PREFIX}blocks.{block[1]}.{name}" if block else PREFIX + name
    return ours


def _our_name(name: str) -> str | None:
    block = re.fullmatch(r"backbone\.blocks\.(\d+)\.(.+)", name)
    if block:
        return f"{PREFIX}blocks.{block[1]}.{IN_BLOCK[block[2]]}" if block[2] in IN_BLOCK else None
    found = OUTSIDE.get(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    return None if found is None else PREFIX + found


def _no_modulation(model: dict) -> dict[str, Tensor]:
    """adaLN that changes nothing, and a condition as a new model has it, so that it can learn to."""
    width, condition = model["width"], model["condition_width"]
    made = {
        "condition.mlp.0.weight": _start("condition.mlp.0.weight", FREQUENCIES, condition, FREQUENCIES),
        "condition.mlp.0.bias": _start("condition.mlp.0.bias", FREQUENCIES, condition),
        "condition.mlp.2.weight": _start("condition.mlp.2.weight", condition, condition, condition),
        "condition.mlp.2.bias": _start("condition.mlp.2.bias", condition, condition),
        "output.modulation.weight": torch.zeros(2 * width, condition),
        "output.modulation.bias": torch.zeros(2 * width),
    }
    gates = torch.zeros(6, width)  # shift, scale and gate of attention, then of the MLP
    gates[[2, 5]] = 1
    for number in range(model["blocks"]):
        made[f"blocks.{number}.modulation.weight"] = torch.zeros(6 * width, condition)
        made[f"blocks.{number}.modulation.bias"] = gates.flatten()
    return {PREFIX + name: tensor for name, tensor in made.items()}


def _start(name: str, inputs: int, *shape: int) -> Tensor:
    """As in a new model of seed 0 (model/initial.py)."""
    tensor, bound = torch.empty(shape), inputs**-0.5
    draw_start(tensor.view(-1), 0, PREFIX + name, (-bound, bound), torch.arange)
    return tensor


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:FIRST]) + (f" and {len(names) - FIRST} more" if len(names) > FIRST else "")
