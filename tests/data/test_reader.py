"""The stream that ranks read: nothing lost, nothing twice, the same on every grid, whatever is bad."""

import itertools

import numpy as np
import pytest

from lomdm_dist.data.reader import Reader
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.data.store import Access
from lomdm_dist.errors import UserError
from tests.data.made import TOKENIZER, small_members, write_shards

BATCH = 12
GRIDS = [(1, 0), (2, 1), (4, 2), (3, 2)]  # ranks, workers


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """70 sequences, row i full of i, in three shards of members of 4."""
    small_members(monkeypatch, 4)
    return write_shards(tmp_path / "train", [33, 30, 7])


def ids(rows) -> list[int]:
    block = rows.ids.numpy()
    assert (block == block[:, :1]).all()
    return block[:, 0].tolist()


def flat(lists) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def global_batches(
    folder, ranks: int, workers: int, position: int, steps: int, **settings
) -> list[list[int]]:
    """The batches of `steps` steps from a position on, put together from what each rank reads."""
    share = BATCH // ranks
    streams = [
        Reader([ShardSet(folder)], **settings).stream(position + rank * share, BATCH, share, workers)
        for rank in range(ranks)
    ]
    batches = [flat(ids(next(stream)) for stream in streams) for _ in range(steps)]
    for stream in streams:
        stream.close()
    return batches


@pytest.mark.parametrize("window", [None, 2])
def test_two_epochs_on_four_grids(folder, window):
    read = {grid: global_batches(folder, *grid, 0, 12, window=window) for grid in GRIDS}
    stream = flat(read[1, 0])
    assert sorted(stream[:70]) == sorted(stream[70:140]) == list(range(70))
    assert stream[:70] != stream[70:140]
    assert all(batches == read[1, 0] for batches in read.values())


def test_killed_anywhere_and_resumed_on_another_grid(folder):
    """20 trials: what follows is what would have followed."""
    whole = global_batches(folder, 1, 0, 0, 40)
    draws = np.random.default_rng(0)
    for _ in range(20):
        step = int(draws.integers(1, 36))
        ranks, workers = GRIDS[draws.integers(len(GRIDS))]
        assert global_batches(folder, ranks, workers, step * BATCH, 4) == whole[step : step + 4]


def test_fewer_sequences_than_a_batch_and_shards_than_ranks(tmp_path):
    tiny = write_shards(tmp_path / "tiny", [5])
    stream = flat(global_batches(tiny, 4, 2, 0, 5))
    assert all(sorted(stream[k : k + 5]) == list(range(5)) for k in range(0, 60, 5))
    uneven = write_shards(tmp_path / "uneven", [5, 5, 1])
    stream = flat(global_batches(uneven, 2, 1, 0, 2))
    assert sorted(stream[:11]) == sorted(stream[11:22]) == list(range(11))


def test_position_ten_million_computes_no_more(tmp_path, monkeypatch):
    """As many permuted numbers as at position 0 (benchmarks/reader.py has the seconds)."""
    from lomdm_dist.data import order

    calls = []
    feistel = order._feistel
    monkeypatch.setattr(order, "_feistel", lambda n, *rest: calls.append(len(n)) or feistel(n, *rest))
    counts = []
    for position in (0, 10_000_000):
        calls.clear()
        order.Order([order.SourceOrder([10**6] * 40, 0)], [1.0]).at(position, 512)
        counts.append(sum(calls))
    assert counts[1] < 1.2 * counts[0]


def test_sources_are_mixed_and_resumed(tmp_path):
    folders = [write_shards(tmp_path / "a", [40, 10]), write_shards(tmp_path / "b", [30], first=1000)]

    def reader():
        return Reader([ShardSet(f) for f in folders], [0.7, 0.3], seed=5)

    stream = ids(reader().read(0, 1000))
    assert sum(i >= 1000 for i in stream) == 300
    first = [i for i in stream if i < 1000]
    assert sorted(first[:50]) == sorted(first[50:100]) == list(range(50))
    assert ids(reader().read(333, 200)) == stream[333:533]
    assert reader().epochs(1000) == [14.0, 10.0]
    others = [
        Reader([ShardSet(f) for f in folders], w, s).identity() for w, s in (([1, 1], 5), ([0.7, 0.3], 5))
    ]
    assert len({reader().identity(), *others}) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": TOKENIZER | {"sha256": "y"}}, "were made with different tokenizers"),
        ({"packing": "padded"}, "is packed, .* is padded"),
        ({"length": 6}, "sequences of 4 tokens, .* of 6"),
    ],
)
def test_sources_must_be_alike(tmp_path, change, message):
    folders = [write_shards(tmp_path / "a", [4]), write_shards(tmp_path / "b", [4], **change)]
    with pytest.raises(UserError, match=message):
        Reader([ShardSet(f) for f in folders])


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_of_the_time_is_told_and_not_waited_for(folder, workers, monkeypatch):
    """TimeoutError is what an unfinished read looks like, too."""
    reader = Reader([ShardSet(folder)])
    monkeypatch.setattr(Reader, "read", lambda *_: (_ for _ in ()).throw(TimeoutError("the disk")))
    with pytest.raises(TimeoutError, match="the disk"):
        next(reader.stream(0, 12, 12, workers))


def test_the_names_of_sources_do_not_matter_and_their_weights_relatively(tmp_path):
    a, b = write_shards(tmp_path / "a", [40, 10]), write_shards(tmp_path / "b", [30], first=1000)

    def identity(weights, window=None, first=a):
        return Reader([ShardSet(first), ShardSet(b)], weights, window=window).identity()

    assert identity([0.7, 0.3]) == identity([7, 3]) == identity([0.7, 0.3], first=tmp_path / "./a")
    assert len({identity([0.7, 0.3]), identity([0.3, 0.7]), identity([0.7, 0.3], window=1)}) == 3


def break_shard(folder, number: int) -> None:
    path = folder / f"{number:05d}.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_shard_is_an_error_that_names_it(folder, workers):
    break_shard(folder, 1)
    stream = Reader([ShardSet(folder)]).stream(0, 12, 12, workers)
    with pytest.raises(UserError, match=r"00001\.tar was altered"):
        list(itertools.islice(stream, 10))


def test_skipped_sequences_are_replaced_and_counted(folder):
    """All else keeps its place, on every grid; the lost ones' places are filled from the good shards."""
    good = flat(global_batches(folder, 1, 0, 0, 12))
    break_shard(folder, 1)
    reader = Reader([ShardSet(folder)], on_bad_shard="skip")
    rows = reader.read(0, 144)
    lost = {*range(33, 63)}
    found = ids(rows)
    assert [a for a, b in zip(found, good, strict=True) if a != b] == [
        a for a, b in zip(found, good, strict=True) if b in lost
    ]
    assert rows.replaced == sum(i in lost for i in good) and lost.isdisjoint(found)
    assert list(reader.bad[0]) == [1] and "00001.tar was altered" in reader.bad[0][1]
    for ranks, workers in GRIDS:
        assert flat(global_batches(folder, ranks, workers, 0, 12, on_bad_shard="skip")) == found


def test_when_all_shards_are_bad_there_is_an_error(folder):
    for number in range(3):
        break_shard(folder, number)
    with pytest.raises(UserError, match=r"no shard of .* can be used; the last one: .*was altered"):
        Reader([ShardSet(folder)], on_bad_shard="skip").read(0, 10)


def test_check_reads_a_share_of_the_shards_and_looks_at_all(folder):
    break_shard(folder, 1)
    Reader([ShardSet(folder)]).check(0, 2)
    with pytest.raises(UserError, match="00001"):
        Reader([ShardSet(folder)]).check(1, 2)
    Reader([ShardSet(folder, Access(verify="size"))]).check()
    (folder / "00002.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"00002\.tar has 0 bytes"):
        Reader([ShardSet(folder)]).check(0, 2)
    (folder / "00003.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds 00003\.tar, which its manifest\.json does not list"):
        Reader([ShardSet(folder)]).check(0, 2)
    skipping = Reader([ShardSet(folder)], on_bad_shard="skip")
    skipping.check()
    assert list(skipping.bad[0]) == [2, 1]
