"""Attention inside runs of tokens, and rotary positions, against the plain forms: values and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lomdm_dist.ops.attention import Sight, attention, choose_attention
from lomdm_dist.ops.rotary import rotary_table, rotate

HEADS, WIDTH = 2, 6


def value_and_gradient(function, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    qkv = qkv.clone().requires_grad_()
    out = function(qkv)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return out.detach(), qkv.grad


def by_one_mask(qkv: torch.Tensor, lengths: list[int], causal: bool) -> torch.Tensor:
    """Everything at once, with all scores between tokens of different runs struck out."""
    run = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    sees = run[:, None] == run[None]
    sees = sees.tril() if causal else sees
    q, k, v = qkv.permute(1, 2, 0, 3)
    scores = (q @ k.transpose(-2, -1) / WIDTH**0.5).masked_fill(~sees, -torch.inf)
    return (scores.softmax(dim=-1) @ v).transpose(0, 1)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    causal=st.booleans(),
    kernel=st.sampled_from(["sdpa", "plain"]),
)
def test_a_token_sees_its_own_run(lengths, causal, kernel):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    sights = [Sight(causal, max(lengths), starts, kernel)]
    if len(set(lengths)) == 1:
        sights.append(Sight(causal, lengths[0], None, kernel))
    qkv = torch.randn(sum(lengths), 3, HEADS, WIDTH, dtype=torch.float64)
    expected = value_and_gradient(lambda x: by_one_mask(x, lengths, causal), qkv)
    for sight in sights:
        for ours, plain in zip(
            value_and_gradient(lambda x, s=sight: attention(x, s), qkv), expected, strict=True
        ):
            assert torch.allclose(ours, plain, atol=1e-10)


def test_rotary_positions():
    """As complex numbers: the pair (i, i + d/2) is turned by position times base**(-2i/d)."""
    qkv = torch.randn(3 * 5, 3, HEADS, WIDTH, dtype=torch.float64)
    position = torch.arange(5, dtype=torch.float64).repeat(3)
    angles = position[:, None] * 10_000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    pairs = (
        torch.complex(*qkv[:, :2].chunk(2, dim=-1))
        * torch.polar(torch.ones(()).double(), angles)[:, None, None]
    )
    expected = torch.cat([torch.cat([pairs.real, pairs.imag], dim=-1), qkv[:, 2:]], dim=1)
    table = rotary_table(5, WIDTH, "cpu")
    assert torch.allclose(rotate(qkv, table), expected, atol=1e-6)
    each = tuple(angles.repeat(3, 1) for angles in table)  # tokens that each have a position of their own
    assert torch.equal(rotate(qkv, each), rotate(qkv, table))
    assert rotate(qkv.bfloat16(), table).dtype == torch.bfloat16


def test_rotary_turns_by_the_position():
    """Scores of q and k depend on the distance alone."""
    qkv = torch.randn(1, 3, 1, WIDTH, dtype=torch.float64).repeat(8, 1, 1, 1)
    q, k, _ = rotate(qkv, rotary_table(8, WIDTH, "cpu")).unbind(1)
    scores = (q[:, 0] @ k[:, 0].T).diagonal(offset=2)
    assert torch.allclose(scores, scores[:1].expand_as(scores), atol=1e-6) and scores.std() < 1e-6


def test_the_kernel_is_chosen_for_the_device():
    cpu = torch.device("cpu")
    assert choose_attention("auto", cpu, torch.float32) == "sdpa"
    assert choose_attention("plain", cpu, torch.float32) == "plain"
    with pytest.raises(ValueError, match="flash-attn needs a GPU"):
        choose_attention("flash_attn", cpu, torch.bfloat16)
