"""Keyed dropout: against its plain mask and autograd, an independent hash in numpy, and chance."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lomdm_dist.ops import dropout
from lomdm_dist.ops.compiled import _compile
from lomdm_dist.ops.dropout import keyed_mask, residual_dropout, row_keys

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU"))]
BRANCH, WIDTH, RATES = 3, 96, (0.1, 0.5)


def sequence_keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seed))


def inputs(rows: int, width: int, dtype=torch.float64, device="cpu", seed=0):
    """x, mixed, gate and a gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, width), (rows, width), (1, width), (rows, width)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(device=device, dtype=dtype) for tensor in drawn]


def value_and_gradients(function, x, mixed, gate, grad):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, mixed, gate)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def standardised(mask: torch.Tensor, rate: float) -> torch.Tensor:
    """Mean 0 and variance 1 under the law that the mask shall have."""
    return (mask.double() - (1 - rate)) / math.sqrt(rate * (1 - rate))


def sigmas(products: torch.Tensor, dim=None) -> float:
    """The largest deviation from 0 of sums of independent variables of variance 1, in sigmas."""
    count = products.numel() if dim is None else products.shape[dim]
    return float((products.sum(dim) / math.sqrt(count)).abs().max())


# width 50,000 makes chunks of two rows; 3,000 rows of 96 take more than two chunks, the last one short
@pytest.mark.parametrize("rows, width", [(0, 8), (1, 1), (5, 50_000), (3000, WIDTH)])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("device", DEVICES)
def test_values_and_gradients_are_those_of_the_plain_reference(device, rate, rows, width):
    keys = row_keys(sequence_keys(1), rows).to(device)
    mask = keyed_mask(keys, BRANCH, width, rate)
    tensors = inputs(rows, width, device=device)
    found = value_and_gradients(lambda *t: residual_dropout(*t, rate, keys, BRANCH), *tensors)
    plain = value_and_gradients(lambda x, mixed, gate: x + gate * (mixed * mask / (1 - rate)), *tensors)
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_is_rounded_once(device):
    """Each result is what float64 gives of the same numbers, to half a unit in the last place."""
    keys, rate = row_keys(sequence_keys(3), 700).to(device), 0.1
    mask = keyed_mask(keys, BRANCH, WIDTH, rate)
    tensors = inputs(len(keys), WIDTH, torch.bfloat16, device)
    found = value_and_gradients(lambda *t: residual_dropout(*t, rate, keys, BRANCH), *tensors)
    wide = [tensor.double() for tensor in tensors]
    exact = value_and_gradients(lambda x, mixed, gate: x + gate * (mixed * mask / (1 - rate)), *wide)
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), theirs, rtol=1.01 * 2**-8, atol=1e-4)


def test_nothing_of_the_mask_is_kept():
    kept = []
    x, mixed, gate, _ = inputs(50, WIDTH, torch.float32)
    mixed.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        residual_dropout(x, mixed, gate, 0.1, row_keys(sequence_keys(1), 50), BRANCH)
    assert [t.data_ptr() for t in kept if t.numel() >= mixed.numel()] == [mixed.data_ptr()]


@given(cuts=st.lists(st.integers(0, 120), max_size=4), branch=st.integers(0, 200), rate=st.floats(0.01, 0.99))
@settings(max_examples=30, deadline=None)
def test_any_split_of_the_rows_gives_the_same(cuts, branch, rate):
    keys = row_keys(sequence_keys(3), 40)
    _, mixed, gate, _ = inputs(len(keys), 24, torch.float32)
    x = torch.zeros_like(mixed)
    whole = residual_dropout(x, mixed, gate, rate, keys, branch)
    ends = [0, *sorted(cuts), len(keys)]
    parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    split = [residual_dropout(x[p], mixed[p], gate, rate, keys[p], branch) for p in parts]
    assert torch.equal(torch.cat(split), whole)
    assert torch.equal(torch.cat([keyed_mask(keys[p], branch, 24, rate) for p in parts]), whole != x)


def test_keys_of_a_sequence_hang_on_it_alone_and_are_all_different():
    sequences = sequence_keys(64)
    keys = row_keys(sequences, 1024)
    assert torch.equal(row_keys(sequences[5:6], 1024), keys[5 * 1024 : 6 * 1024])
    assert torch.equal(row_keys(sequences[5:6], 100), keys[5 * 1024 : 5 * 1024 + 100])
    assert len(keys.unique()) == len(keys)
    for branch in (0, 95):
        rows, channels = dropout._keys(keys[:2048], branch, torch.arange(1, 4097))
        assert len(rows.unique()) == rows.numel() and len(channels.unique()) == channels.numel()


def test_the_hash_is_that_of_unsigned_arithmetic():
    """The same numbers by numpy's unsigned integers, whose shifts are logical."""

    def mix(z):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def numbers(count):
        return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    sequences = sequence_keys(3)
    keys = mix(sequences.numpy().astype(np.uint64)[:, None] + numbers(50)).ravel()
    rows = (mix(keys + np.uint64(BRANCH)) >> np.uint64(32)).astype(np.uint32)
    z = rows[:, None] ^ (mix(numbers(WIDTH)) >> np.uint64(32)).astype(np.uint32)
    z = z * np.uint32(0x7FEB352D)
    z = (z ^ (z >> np.uint32(15))) * np.uint32(0x846CA68B)
    # torch compares signed numbers: the order of the unsigned ones with the upper bit turned
    kept = z ^ np.uint32(2**31) >= round(0.1 * 2**32)
    found = row_keys(sequences, 50)
    assert np.array_equal(found.numpy().view(np.uint64), keys)
    assert np.array_equal(keyed_mask(found, BRANCH, WIDTH, 0.1).numpy(), kept)


@pytest.mark.parametrize("rate", RATES)
def test_kept_share_of_all_of_each_row_and_of_each_channel(rate):
    mask = standardised(keyed_mask(row_keys(sequence_keys(4), 1024), BRANCH, 768, rate), rate)
    assert sigmas(mask) < 4
    assert sigmas(mask, dim=0) < 5  # the largest of 768
    assert sigmas(mask, dim=1) < 5.5  # of 4096
    # and they spread as sums of independent bits do: the variance of the row sums, of the channel sums
    for dim, size in ((0, 4096), (1, 768)):
        shares = mask.sum(dim) / math.sqrt(size)
        assert abs(float((shares**2).mean()) - 1) < 5 * math.sqrt(2 / len(shares))


@pytest.mark.parametrize("rate", RATES)
def test_rows_channels_branches_and_sequences_are_independent(rate):
    one = sequence_keys(1)
    near = torch.cat([one, one ^ 1, one ^ 2**20, one ^ 2**61])  # apart by one bit
    keys = row_keys(near, 1024)
    mask = standardised(keyed_mask(keys, BRANCH, 256, rate), rate)
    assert sigmas(mask[1:] * mask[:-1]) < 4  # neighbouring rows
    assert sigmas(mask[:, 1:] * mask[:, :-1]) < 4  # neighbouring channels
    for sequence in mask.view(4, 1024, 256)[1:]:
        assert sigmas(mask[:1024] * sequence) < 4
    for branch in (0, 1, BRANCH + 1, BRANCH + 2, 90):
        assert sigmas(mask * standardised(keyed_mask(keys, branch, 256, rate), rate)) < 4.5
    # every pair of channels, here and in another branch: 32,640 and 65,536 of them
    pairs = mask.T @ mask / math.sqrt(len(mask))
    assert float(pairs.triu(1).abs().max()) < 6
    other = standardised(keyed_mask(keys, BRANCH + 1, 256, rate), rate)
    assert float((mask.T @ other).abs().max()) / math.sqrt(len(mask)) < 6


@pytest.mark.parametrize("rate", RATES)
def test_rectangles_have_the_parity_of_independent_bits(rate):
    """Row and channel must not merely add up: then the four corners of a rectangle would be tied."""
    keys = row_keys(sequence_keys(2), 1024)
    mask = keyed_mask(keys, BRANCH, 768, rate)
    odd = (1 - (1 - 2 * rate) ** 4) / 2  # probability that an odd number of four is dropped
    generator = torch.Generator().manual_seed(0)
    row, channel = (torch.randint(n, (500_000,), generator=generator) for n in mask.shape)
    for rows_apart, channels_apart in ((1, 1), (1, 64), (1024, 1), (37, 101)):
        other = (row + rows_apart) % mask.shape[0], (channel + channels_apart) % mask.shape[1]
        upper = mask[row, channel] ^ mask[row, other[1]]
        parity = upper ^ mask[other[0], channel] ^ mask[other[0], other[1]]
        sigma = math.sqrt(odd * (1 - odd) / len(row))
        assert abs(float(parity.double().mean()) - odd) < 4 * sigma


def test_without_keys_the_mask_is_torchs_own():
    tensors = inputs(64, WIDTH, torch.float32)
    torch.manual_seed(5)
    found = value_and_gradients(lambda *t: residual_dropout(*t, 0.1, None, BRANCH), *tensors)
    torch.manual_seed(5)
    native = value_and_gradients(lambda x, mixed, gate: x + gate * F.dropout(mixed, 0.1), *tensors)
    for ours, theirs in zip(found, native, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_compiled_functions_are_the_plain_ones():
    """What a GPU runs, compiled for the CPU, over changes of branch, rate, rows and width."""
    for rows, width, rate, branch in (
        (256, 96, 0.1, 0),
        (256, 96, 0.1, 1),
        (256, 96, 0.1, 7),
        (320, 96, 0.5, 8),
        (64, 96, 0.3, 9),
        (64, 128, 0.2, 10),
        (64, 160, 0.7, 11),
    ):
        x, mixed, gate, grad = inputs(rows, width, torch.float32)
        threshold, numbers = dropout._threshold(rate), torch.arange(1, width + 1)
        keys = dropout._keys(row_keys(sequence_keys(1), rows), branch, numbers)
        compiled = _compile(dropout._keys)(row_keys(sequence_keys(1), rows), branch, numbers)
        assert all(torch.equal(a, b) for a, b in zip(compiled, keys, strict=True))
        for function, first in ((dropout._forward, x), (dropout._backward, grad)):
            plain = function(first, mixed, gate, *keys, threshold)
            compiled = _compile(function)(first, mixed, gate, *keys, threshold)
            torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


def test_a_rate_of_almost_one_keeps_almost_nothing():
    rows = row_keys(torch.arange(3), 50)
    assert keyed_mask(rows, 0, 64, 1 - 1e-12).sum() == 0
    assert keyed_mask(rows, 0, 64, 1e-12).all()
