"""What the first rank makes of the signs of all; what real processes do is in tests/distributed."""

import time

import pytest
import torch.distributed as dist

from lomdm_dist.config import FaultsConfig
from lomdm_dist.parallel import watch as module
from lomdm_dist.parallel.watch import DATA, PASSES, SAVING, Sign, Watch, _ranks


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Of a job that says that it has six ranks on two hosts, and steps of 0.1 s."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    watch = Watch(store, FaultsConfig(hang_seconds=10, slow_factor=4), tmp_path)
    watch.places = [("machine", 100 + rank, "ab"[rank // 3]) for rank in range(6)]
    watch.durations.extend([0.1] * 10)
    monkeypatch.setattr(watch, "_tell", lambda _: None)
    return watch


def signs(watch, **others) -> None:
    """All are in the passes of step 20, 12 s ago, but for some: r3=Sign(...)."""
    usual = Sign(1, 20, PASSES, 12.0, last=(0.01, 0.09), mean=(0.01, 0.08), probe=0.001)
    watch.signs = {rank: others.get(f"r{rank}", usual) for rank in range(6)}


def test_who_is_behind_is_named(watch):
    signs(watch, r4=Sign(1, 20, DATA, 11.0), r2=Sign(1, 21, DATA, 12.0))
    watch._judge()
    text = watch.verdict.text
    assert text.startswith("rank 4 (process 104 on b): no progress in data of step 20 for 11 s, where a step")
    assert (
        "(ranks 0-1, 3, 5 in the forward and backward passes of step 20; rank 2 in data of step 21)" in text
    )
    assert watch.verdict.stacks


def test_all_in_one_collective_are_named_together(watch):
    signs(watch)
    watch._judge()
    assert watch.verdict.text.startswith(
        "ranks 0-5: no progress in the forward and backward passes of step 20"
    )


def test_nobody_is_blamed_for_a_slow_disk_a_slow_start_or_a_short_wait(watch):
    signs(watch, r5=Sign(1, 20, SAVING, 5000.0))
    watch._judge()
    signs(watch, r5=Sign(1, 20, DATA, 9.0))
    watch._judge()
    watch.durations.clear()
    signs(watch)
    watch._judge()
    assert watch.verdict is None


def test_a_slow_step_is_said_with_who_was_slow(watch, capsys):
    watch.step_took(21, 0.3, 0.01, 0.09)
    watch.step_took(22, 3.0, 0.01, 0.09)
    watch.faults = FaultsConfig()  # nothing hangs
    signs(watch, r3=Sign(9, 23, PASSES, 0.0, last=(2.9, 0.09), probe=0.001))
    watch._slow = (22, time.monotonic() - 60)
    watch._judge()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step 22 took 3 s, 30 times the median"
    assert said[1].split() == ["seconds", "a", "step", "data", "computing", "a", "fixed", "computation"]
    assert said[2].split() == ["median", "0.010", "0.090", "1.00", "ms"]
    assert said[3].split() == ["rank", "3", "b", "2.900", "0.090", "1.00", "ms", "<-", "slow"]
    assert len(said) == 3 + module.WORST and not any("slow" in line for line in said[4:])


def test_the_table_of_the_mean_comes_when_all_have_said_theirs(watch, capsys):
    signs(watch, r1=Sign(1, 20, PASSES, 0.0, mean=(0.0, 0.2), probe=0.004))
    watch.faults = FaultsConfig()  # nothing hangs
    watch.show_table()
    watch._judge()
    assert capsys.readouterr().out == ""
    watch._table_due = time.monotonic() - 1
    watch._judge()
    watch._judge()
    said = capsys.readouterr().out.splitlines()
    assert said[2].split() == ["rank", "1", "a", "0.000", "0.200", "4.00", "ms", "<-", "slow"]
    assert len(said) == 2 + module.WORST, "once"


def test_ranks_in_words():
    assert _ranks([3]) == "rank 3" and _ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
