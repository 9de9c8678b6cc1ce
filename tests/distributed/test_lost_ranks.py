"""A rank that dies, stops, stands still or fails is named by the others, which end; never a hang."""

import os
import pickle
import re
import signal
import threading
import time

import psutil
import pytest

from lomdm_dist.config import FaultsConfig
from lomdm_dist.parallel.watch import Verdict, Watch
from tests.distributed import grids
from tests.distributed.grids import begin, end, ends_of
from tests.distributed.runs import curve

STEP = 8  # in which it happens
RANKS = 3
QUICK = ["faults.lost_seconds=5", "faults.hang_seconds=2", "faults.hang_factor=2"]


def troubled_on_a_full_disk(overrides: list[str], trouble: str, at_rank: int) -> None:
    """What the first rank prints goes nowhere."""
    from lomdm_dist.parallel.grid import rank

    if rank() == 0:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1)
        os.dup2(full, 2)
    troubled(overrides, trouble, at_rank)


def a_shard_that_never_comes() -> None:
    time.sleep(1000)


def troubled(overrides: list[str], trouble: str, at_rank: int) -> None:
    from lomdm_dist.errors import UserError
    from lomdm_dist.parallel.grid import rank
    from lomdm_dist.train import loop

    plain = loop.Run._rows

    def rows(run):
        if rank() == at_rank and run.progress.step == STEP - 1:
            if trouble == "fails":
                raise ValueError("the disk said no\nand more")
            if trouble == "is mistaken":
                raise UserError("data.train is wrong")
            if trouble == "stands still":
                a_shard_that_never_comes()
            os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[trouble])
        return plain(run)

    loop.Run._rows = rows
    grids.train(overrides)


NAME = r"rank {} \(process \d+ on \S+\)"
SAID = {
    "dies": NAME + " has died; all end, in step 8; continue with --resume auto",
    "stops": "no sign of life for 5 s from " + NAME + "; all end, in step 8",
    "stands still": NAME + r": no progress in data of step 8 for [2-9] s, where a step takes \S+ s "
    r"\(ranks 0, 2 in the forward and backward passes of step 8\); where each rank stands is written in ",
    "fails": NAME + " ended: the disk said no; all end",
}
CASES = [
    ("dies", 1),
    ("dies", 0),
    ("stops", 1),
    ("stops", 0),
    ("stands still", 1),
    ("fails", 1),
    ("fails", 0),
]


@pytest.mark.parametrize(("trouble", "rank"), CASES)
def test_the_others_end_and_name_it(trouble, rank, base, tmp_path):
    run = tmp_path / "run"
    options = [*base, "train.steps=1000", "train.global_batch=24", "train.micro_batch=4", *QUICK]
    options += [f"train.run={run}", "model.dropout=0.0"]
    ends = ends_of(RANKS, tmp_path, troubled, options, trouble, rank, seconds=60)
    others = [end for number, end in enumerate(ends) if number != rank]
    assert all(status == 1 for status, _ in others), ends
    said = "".join(text for _, text in others)
    if (trouble, rank) == ("stops", 0):  # and with it the store, which is the first rank's
        of_0 = "no contact with " + NAME + r" for 5 s: it is lost, or the network of \S+ is down; all end"
        assert len(re.findall("error: " + of_0.format(0), said)) == 1, said
    elif (trouble, rank) != ("fails", 0):  # that one says it itself
        assert len(re.findall("error: " + SAID[trouble].format(rank), said)) == 1, said
    assert ends[rank][0] == {"dies": -9, "stops": -9, "stands still": 1, "fails": 1}[trouble]
    assert max(curve(run)) == STEP - 1
    if trouble == "fails":
        assert "ValueError: the disk said no" in ends[rank][1], "with the traceback"
    if trouble == "stands still":
        stacks = [(run / f"stacks/rank-{number}.txt").read_text() for number in range(RANKS)]
        assert "a_shard_that_never_comes" in stacks[1] and "in data of step 8" in stacks[1]
        assert all("a_shard_that_never_comes" not in stacks[number] for number in (0, 2))
        last = pickle.loads((run / "stacks/rank-2.flight").read_bytes())["entries"][-1]
        assert last["profiling_name"].startswith("gloo:") and last["state"] != "completed"


def test_what_a_rank_has_said_before_it_ended_is_not_said_again(tmp_path):
    """The lowest rank that is left on a machine speaks; the next may look when that one has ended, too."""
    watch = Watch.__new__(Watch)
    watch.run, watch._where, watch.neighbours = tmp_path, (8, "data", 0.0), dict.fromkeys(range(3))
    watch.places = [("machine", 10 + number, "host") for number in range(3)]
    died, other = (Verdict(f"{watch.name(number)} has died") for number in (0, 1))
    watch.rank = 2
    assert not watch._was_said(died)
    watch.rank = 1
    watch._say(died)
    assert not watch._was_said(died), "by itself, which a rank that starts again must not take for it"
    watch.rank = 2
    with open(tmp_path / "ended.log", "ab") as file:
        file.write("café".encode()[:-1])  # the disk was full
    assert watch._was_said(died) and not watch._was_said(other)


def test_the_end_comes_although_the_run_s_folder_is_stuck(tmp_path, monkeypatch):
    """A file server that no longer answers, which a pipe is like that nobody reads."""
    monkeypatch.setattr("lomdm_dist.parallel.watch.TO_END", 0.5)
    os.mkfifo(tmp_path / "ended.log")
    os.mkfifo(tmp_path / "stacks")
    watch = Watch.__new__(Watch)
    watch.stacks = tmp_path / "stacks"
    watch.run, watch._where, watch.rank, watch.places = tmp_path, (8, "data", 0.0), 0, [("m", 1, "host")]
    watch.neighbours, watch.faults, watch.verdict = {0: psutil.Process()}, FaultsConfig(), None
    watch._one, watch._found, watch._finishing = threading.Lock(), threading.Event(), False
    watch._tell, watch._quiet = (lambda _: None), (lambda _: [])
    watch._declare(Verdict("rank 1 has died", stacks=True))
    assert watch._found.is_set() and watch.verdict.text == "rank 1 has died"


def test_a_mistake_of_one_is_a_mistake_of_all(base, tmp_path):
    """A launcher must not try again."""
    options = [*base, "train.steps=1000", "train.global_batch=24", "train.micro_batch=4"]
    ends = ends_of(RANKS, tmp_path, troubled, [*options, f"train.run={tmp_path / 'run'}"], "is mistaken", 1)
    assert [status for status, _ in ends] == [2] * RANKS
    assert "ended: data.train is wrong; all end, in step 8\n" in ends[0][1], "and no word of going on"


def test_a_full_disk_under_the_log_holds_up_no_end(base, tmp_path):
    run = tmp_path / "run"
    options = [*base, "train.steps=1000", "train.global_batch=24", "train.micro_batch=4", *QUICK]
    options.append(f"train.run={run}")
    ends = ends_of(RANKS, tmp_path, troubled_on_a_full_disk, options, "stops", 1, seconds=60)
    assert [status for status, _ in ends] == [1, -9, 1]
    assert "no sign of life for 5 s from rank 1" in (run / "ended.log").read_text()


def test_a_job_that_was_suspended_goes_on(base, tmp_path):
    """As by Ctrl-Z, or by SLURM: for longer than a rank may be silent, and than a step may stand still."""
    run = tmp_path / "run"
    options = [*base, "train.steps=1000", "train.global_batch=24", "train.micro_batch=4", *QUICK]
    processes, outputs = begin(RANKS, tmp_path, grids.train, [*options, f"train.run={run}"])
    while not (run / "metrics.jsonl").exists() or len(curve(run)) < STEP:
        assert all(process.is_alive() for process in processes), outputs[0].read_text()
        time.sleep(0.1)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            os.kill(process.pid, number)
        before = len(curve(run))
        time.sleep(6.5)
    assert len(curve(run)) > before, outputs[0].read_text()
    (run / "stop").touch()
    ends = end(processes, outputs, 60)
    assert [status for status, _ in ends] == [0] * RANKS, ends


def train_with_a_slow_end(overrides: list[str]) -> None:
    """The first rank is long busy with old checkpoints, when all else is done."""
    from lomdm_dist.train import saver

    saver.drop_old = lambda *_: time.sleep(6.5) or []
    grids.train(overrides)


def test_the_last_rank_may_be_late(base, tmp_path):
    run = tmp_path / "run"
    options = [*base, "train.steps=8", "train.global_batch=24", "train.micro_batch=4", *QUICK]
    ends = ends_of(RANKS, tmp_path, train_with_a_slow_end, [*options, f"train.run={run}"], seconds=60)
    assert [status for status, _ in ends] == [0] * RANKS and not (run / "ended.log").exists(), ends
