"""The order of a stream: permutations, windows, mixtures."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from lomdm_dist.data.order import Order, SourceOrder, _keys, shuffled

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**32))
def test_shuffled_is_a_permutation(size, key):
    assert np.array_equal(np.sort(shuffled(np.arange(size), size, _keys(key))), np.arange(size))


def test_permutations_are_equally_likely():
    """Where each of 33 lands, and where the first two land together: chi-square over 600 keys."""
    size, trials = 33, 600
    images = np.array([shuffled(np.arange(size), size, _keys(5, k)) for k in range(trials)])
    landed = np.stack([np.bincount(images[:, i], minlength=size) for i in range(size)])
    expected = trials / size
    assert chi2.sf(((landed - expected) ** 2 / expected).sum(), (size - 1) ** 2) > 1e-4
    steps = np.bincount((images[:, 1] - images[:, 0]) % size, minlength=size)[1:]
    expected = trials / (size - 1)
    assert chi2.sf(((steps - expected) ** 2 / expected).sum(), size - 2) > 1e-4


@settings(max_examples=40, deadline=None)
@given(SIZES, st.one_of(st.none(), st.integers(1, 10)), st.integers(0, 9), st.integers(0, 500))
def test_each_epoch_is_the_whole_and_any_position_is_reached_directly(sizes, window, seed, start):
    order, total = SourceOrder(sizes, seed, window), sum(sizes)
    stream = order.at(0, 3 * total)
    for epoch in range(3):
        assert np.array_equal(np.sort(stream[epoch * total : (epoch + 1) * total]), np.arange(total))
    start %= 2 * total
    assert np.array_equal(SourceOrder(sizes, seed, window).at(start, total), stream[start : start + total])


def test_epochs_and_seeds_differ():
    order = SourceOrder([50, 50], seed=3)
    assert not np.array_equal(order.at(0, 100), order.at(100, 100))
    assert not np.array_equal(order.at(0, 100), SourceOrder([50, 50], seed=4).at(0, 100))


def test_a_window_mixes_so_many_shards_and_no_more():
    order = SourceOrder([20] * 10, seed=0, window=3)
    shards = order.at(0, 400) // 20
    for epoch in range(2):
        for window in range(4):
            here = shards[epoch * 200 + window * 60 : epoch * 200 + min(200, (window + 1) * 60)]
            assert len(set(here)) == (3 if window < 3 else 1)
            following = epoch * 200 + min(200, (window + 1) * 60)
            ahead = order.shards_ahead(following - 1)
            assert len(ahead) == len(set(ahead)) and set(ahead[: len(set(here))]) == set(here)
            if following < 400:
                assert set(ahead) >= {shards[following]}
    assert not np.array_equal(shards[:200], shards[200:])


def test_without_a_window_the_order_does_not_depend_on_the_shards():
    assert np.array_equal(SourceOrder([60, 40], 1).at(0, 250), SourceOrder([7] * 14 + [2], 1).at(0, 250))


@pytest.mark.parametrize("seed", range(5))
def test_neighbours_of_one_shard_are_as_frequent_as_in_a_full_permutation(seed):
    """Pairs of neighbours in batches of 256: 20 shards of 1,000, within 3 sigma."""
    order = Order([SourceOrder([1000] * 20, seed)], [1.0])
    batches = np.stack([order.at(k * 256, 256)[1] for k in range(78)]) // 1000
    pairs = batches[:, 1:].size
    same = 999 / 19_999
    assert (
        abs((batches[:, 1:] == batches[:, :-1]).sum() - pairs * same) < 3 * (pairs * same * (1 - same)) ** 0.5
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=5),
    st.integers(0, 10**12),
    st.integers(1, 600),
)
def test_sources_are_mixed_in_exact_proportion(weights, start, count):
    order = Order([SourceOrder([500], 0, source=k) for k in range(len(weights))], weights)
    sources, _ = order.at(start, count)
    drawn = [b - a for a, b in zip(order.drawn(start), order.drawn(start + count), strict=True)]
    assert np.array_equal(np.bincount(sources, minlength=len(weights)), drawn)
    for n, weight in zip(order.drawn(start), weights, strict=True):
        assert abs(n - start * weight / sum(weights)) < len(weights) + start * 1e-12


def test_a_source_of_one_sequence_costs_no_more():
    """As many permutations as epochs in a chunk, and chunks no longer than its epochs allow."""
    order = Order([SourceOrder([1], 0), SourceOrder([10**6], 0, source=1)], [0.5, 0.5])
    assert order._chunk_size == 256
    sources, indices = order.at(10**9, 1000)
    assert (sources == 0).sum() == 500 and not indices[sources == 0].any()


def test_seven_and_three_tenths_of_ten_thousand():
    order = Order([SourceOrder([300, 100], 0), SourceOrder([77], 0, source=1)], [0.7, 0.3])
    sources, indices = order.at(0, 10_000)
    assert (sources == 0).sum() == 7_000
    for k, size in ((0, 400), (1, 77)):
        stream = indices[sources == k]
        for epoch in range(len(stream) // size):
            assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
    again = order.at(6_001, 500)
    assert np.array_equal(again[0], sources[6_001:6_501]) and np.array_equal(again[1], indices[6_001:6_501])
