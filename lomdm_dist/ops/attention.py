"""Attention inside runs of tokens that lie end to end; padding is in none, and costs nothing."""

import functools
import importlib.util
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Sight(NamedTuple):
    """Who sees whom: tokens see those of their own run, and no others; in a causal one, those before."""

    causal: bool
    length: int  # of every run; of the longest where they differ
    starts: Tensor | None = None  # [runs + 1], int32: where they differ, the first token of each, and N
    kernel: str = "sdpa"


class Memory(NamedTuple):
    """In the place of a `Sight`: tokens that follow on others, whose keys and values are kept. Causal."""

    past: Tensor  # [2, B, H, most tokens, d]: keys and values, filled in as they come
    first: int  # tokens of each sequence that came before these


def choose_attention(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel of this machine: the package flash-attn where it is installed and can, else PyTorch's own.

    Raises ValueError where `wanted` cannot be had.
    """
    can = device.type == "cuda" and dtype == torch.bfloat16 and importlib.util.find_spec("flash_attn")
    if wanted == "flash_attn" and not can:
        raise ValueError("the package flash-attn needs a GPU and bf16, and must be installed")
    if wanted == "auto":
        return "flash_attn" if can else "sdpa"
    return wanted


def attention(qkv: Tensor, sight: Sight | Memory) -> Tensor:
    """qkv [N, 3, H, d], heads and their width -> [N, H, d]. Scores are scaled by 1 / sqrt(d)."""
    if isinstance(sight, Memory):
        return _remembering(qkv, sight)
    if sight.kernel == "flash_attn":
        return _flash_attn(qkv, sight)
    if sight.starts is None:
        q, k, v = qkv.unflatten(0, (-1, sight.length)).permute(2, 0, 3, 1, 4)  # each [B, H, L, d]
        return _dense(q, k, v, sight).transpose(1, 2).flatten(0, 1)
    if qkv.is_cuda and qkv.dtype == torch.bfloat16 and sight.kernel == "sdpa":
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0) if sight.causal else (-1, -1)
        q, k, v = qkv.unbind(1)
        runs = sight.starts, sight.starts, sight.length, sight.length
        return varlen_attn(q, k, v, *runs, window_size=window)
    lengths = sight.starts.diff().tolist()
    seen = [_dense(*run.permute(1, 2, 0, 3)[:, None], sight)[0] for run in qkv.split(lengths)]
    return torch.cat(seen, dim=1).transpose(0, 1)


def _dense(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """Each [B, H, L, d]."""
    if sight.kernel == "plain":
        return _plain(q, k, v, sight.causal)
    return F.scaled_dot_product_attention(q, k, v, is_causal=sight.causal)


def _remembering(qkv: Tensor, memory: Memory) -> Tensor:
    q, *new = qkv.unflatten(0, (memory.past.shape[1], -1)).permute(2, 0, 3, 1, 4)  # each [B, H, n, d]
    seen = memory.first + q.shape[2]
    memory.past[:, :, :, memory.first : seen] = torch.stack(new)
    keys, values = memory.past[:, :, :, :seen]
    places = torch.arange(seen, device=qkv.device)
    mask = places <= places[memory.first :, None]  # [n, seen]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).transpose(1, 2).flatten(0, 1)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The reference, with all scores in memory, float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-2, -1)).to(wide) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).tril() == 0, -torch.inf)
    return scores.softmax(dim=-1).to(q.dtype) @ v


def _flash_attn(qkv: Tensor, sight: Sight) -> Tensor:
    packed, varlen = _flash_attn_functions()
    if sight.starts is None:
        return packed(qkv.unflatten(0, (-1, sight.length)), causal=sight.causal).flatten(0, 1)
    return varlen(qkv, sight.starts, sight.length, causal=sight.causal)


@functools.cache
def _flash_attn_functions():
    from flash_attn import flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func

    return flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func
