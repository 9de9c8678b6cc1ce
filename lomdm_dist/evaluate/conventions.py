"""Under which convention a perplexity is computed: how a text is cut into pieces, and what is counted.

A published number compares with another of its own convention only, so each has a name. The presets are
those of the public trainers (docs/evaluation.md has them as a table); `bound` is ours.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lomdm_dist.config import Config
from lomdm_dist.data.pack import cut, pad, wrap
from lomdm_dist.data.shards import ShardSet, token_dtype, unpack
from lomdm_dist.data.tokenizer import bos_id
from lomdm_dist.errors import UserError


@dataclass(frozen=True)
class Preset:
    """A convention.

    wrapped        BOS before and EOS after each piece, of L - 2 tokens of text; both are masked and counted
    zero_shot_eos  whether, in the texts of another data set, EOS stands after each document; in the data
                   that a model was trained on it does
    given          tokens at the beginning of each piece that are neither masked nor counted
    evaluate       overrides: times
    """

    wrapped: bool = False
    zero_shot_eos: bool = True
    given: int = 0
    evaluate: tuple[str, ...] = ()


CUT = ("evaluate.time=uniform", "evaluate.time_eps=1e-3")
PRESETS = {
    "bound": Preset(),
    "mdlm": Preset(wrapped=True, zero_shot_eos=False, evaluate=CUT),
    "duo": Preset(wrapped=True, zero_shot_eos=False, evaluate=CUT),
    "bd3lm": Preset(zero_shot_eos=False, given=1, evaluate=CUT),
    "md4": Preset(zero_shot_eos=False, evaluate=(*CUT, "evaluate.below=guessed")),
}


@dataclass(frozen=True)
class Pieces:
    """Sequences in memory, [n, L], as `ShardSet` has them on disk. pad_id: None where all is text."""

    rows: np.ndarray
    pad_id: int | None
    dropped_tokens: int  # of the end, which filled no piece

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        return self.rows.shape[1]

    def batch(self, indices: np.ndarray, device) -> tuple[Tensor, Tensor | None]:
        """x [n, L] int64 on the device, and valid [n, L], None where all is text."""
        return unpack(torch.from_numpy(self.rows[indices]), self.pad_id, device)


def pieces_of_shards(shards: ShardSet, preset: Preset, tokenizer, limit: int | None) -> ShardSet | Pieces:
    """The sequences of prepared data under a preset, whose documents end in EOS: cut anew where it wraps."""
    if not preset.wrapped or shards.manifest.packing == "wrapped":
        return shards
    _check_room(shards.length)
    if shards.manifest.packing == "packed":
        rows = len(shards) if limit is None else -(-limit * (shards.length - 2) // shards.length)
        needed = min(len(shards), rows)
        return wrap_stream(shards.rows(np.arange(needed)).ravel(), shards.length, tokenizer)
    tokens = shards.rows(np.arange(len(shards))).ravel()
    tokens = tokens[tokens != shards.pad_id]
    ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
    return wrap_documents(np.split(tokens, ends + 1)[: len(ends)], shards.length, shards.pad_id, tokenizer)


def pieces_of_documents(
    documents: list[np.ndarray], preset: Preset, packing: str, length: int, tokenizer
) -> Pieces:
    """Documents of a data set that the model has not seen, encoded, without EOS, under a preset.

    packing is that of the data it was trained on; `padded` begins a piece with each document.
    """
    eos = [tokenizer.eos_token_id] if preset.zero_shot_eos or packing == "padded" else []
    dtype = token_dtype(len(tokenizer))
    documents = [np.concatenate([document, np.array(eos)]).astype(dtype) for document in documents]
    stream = np.concatenate([np.empty(0, dtype), *documents])
    if preset.wrapped:
        _check_room(length)
    if packing == "padded":
        pad_id = tokenizer.pad_token_id
        if preset.wrapped:
            return wrap_documents(documents, length, pad_id, tokenizer)
        lengths = np.array([len(document) for document in documents], np.int64)
        return Pieces(pad(stream, lengths, length, pad_id), pad_id, 0)
    if preset.wrapped or packing == "wrapped":
        return wrap_stream(stream, length, tokenizer)
    rows = cut(stream, length)
    return Pieces(rows, None, len(stream) - rows.size)


def _check_room(length: int) -> None:
    if length < 3:
        raise UserError(
            f"BOS and EOS around each piece leave no room in {length} tokens: use another --preset"
        )


def wrap_stream(stream: np.ndarray, length: int, tokenizer) -> Pieces:
    """A row of tokens cut every L - 2, BOS before and EOS after each piece."""
    rows = cut(stream, length - 2)
    return Pieces(wrap(rows, bos_id(tokenizer), tokenizer.eos_token_id), None, len(stream) - rows.size)


def wrap_documents(documents: list[np.ndarray], length: int, pad_id: int, tokenizer) -> Pieces:
    """A piece each of documents that end in EOS: BOS, its first L - 2 tokens, EOS, padding."""
    rows, dropped = np.full((len(documents), length), pad_id, token_dtype(len(tokenizer))), 0
    for row, document in zip(rows, documents, strict=True):
        kept = document[:-1][: length - 2]
        row[: len(kept) + 2] = [bos_id(tokenizer), *kept, tokenizer.eos_token_id]
        dropped += len(document) - 1 - len(kept)
    return Pieces(rows, pad_id, dropped)


def describe(name: str, config: Config, packing: str, zero_shot: bool = False) -> dict:
    """What a perplexity under a preset needs beside it to be compared: in words.

    packing is that of the data that the model was trained on.
    """
    preset, length, eps = PRESETS[name], config.model.length, config.evaluate.time_eps
    wrapped, padded = preset.wrapped or packing == "wrapped", packing == "padded"
    pieces = f"{length} tokens, no BOS"
    if wrapped:
        pieces = f"{length - 2} tokens of text, BOS before and EOS after"
    if padded:
        pieces += ", one document each, padded" + (" or cut off" if wrapped else ", a long one in several")
    eos = padded or not zero_shot or preset.zero_shot_eos
    first = "" if not preset.given else ", but for the first of each piece, which is given"
    return {
        "preset": name,
        "bound": _bound_in_words(config, eps),
        "time": None if config.objective.name == "ar" else config.evaluate.time,
        "denominator": f"{'all tokens, BOS and EOS among them' if wrapped else 'all tokens'}"
        f"{' but padding' if padded else ''}{first}",
        "pieces": pieces,
        "document_eos": "after each document" if eos else "none between documents",
        "trained_on": packing,
        "attend": config.data.attend,
    }


def _bound_in_words(config: Config, eps: float) -> str:
    if config.objective.name == "ar":
        return "exact likelihood, left to right"
    if config.evaluate.time != "uniform":
        return f"uncut; nll_per_token_cut leaves out times below {eps:g}"
    if config.evaluate.below == "guessed":
        return f"times from {eps:g}, and ln(V - 1) for each token that is still masked there"
    return f"cut: leaves out times below {eps:g}, which nll_per_token_uncut has"
