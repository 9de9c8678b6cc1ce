"""The fused operations on a GPU, compiled and with its attention kernels, against the plain forms there."""

import importlib.util

import pytest
import torch

from lomdm_dist.ops.attention import Sight, attention
from lomdm_dist.ops.masked_linear_ce import masked_linear_ce, plain_masked_linear_ce
from lomdm_dist.ops.rotary import _turned, rotary_table, rotate
from tests.ops.test_attention import value_and_gradient
from tests.ops.test_masked_linear_ce import outcome, problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FLASH = pytest.mark.skipif(not importlib.util.find_spec("flash_attn"), reason="needs the package flash-attn")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("with_values", [False, True])
def test_the_loss(dtype, tolerance, with_values):
    for rows in (0, 1, 100, 333):  # one compiled kernel, whatever the number of rows
        given = {name: tensor.cuda() for name, tensor in problem(rows, 997, dtype).items()}
        found = outcome(masked_linear_ce, given, 997, with_values, chunk=64)
        plain = outcome(plain_masked_linear_ce, given, 997, with_values)
        pairs = zip([found[0], *found[1]], [plain[0], *plain[1]], strict=True)
        for ours, theirs in [*pairs, *((found[2][name], plain[2][name]) for name in plain[2])]:
            scale = max(1.0, float(theirs.double().norm()))
            assert float((ours.double() - theirs.double()).norm()) < tolerance * scale


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_rotary(dtype, tolerance):
    for sequences, length in ((3, 16), (2, 128), (5, 17)):
        qkv = torch.randn(sequences * length, 3, 4, 64, device="cuda").to(dtype)
        table = rotary_table(length, 64, "cuda")
        found = value_and_gradient(lambda x, t=table: rotate(x, t), qkv)
        plain = value_and_gradient(lambda x, t=table: _turned(x, *t), qkv)
        for ours, theirs in zip(found, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", ["sdpa", pytest.param("flash_attn", marks=FLASH)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_attention(kernel, causal, alike):
    lengths = [64] * 4 if alike else [1, 70, 128, 33]
    starts = None if alike else torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    qkv = torch.randn(sum(lengths), 3, 4, 64, device="cuda").bfloat16()
    found = value_and_gradient(lambda x: attention(x, Sight(causal, max(lengths), starts, kernel)), qkv)
    plain = value_and_gradient(
        lambda x: attention(x, Sight(causal, max(lengths), starts, "plain")), qkv.float()
    )
    for ours, theirs in zip(found, plain, strict=True):
        assert (ours.float() - theirs).norm() < 2e-2 * theirs.norm()
