"""The README's `deepspeed --hostfile` over two hosts: one result, and a cut cable ends both with a name."""

import os
import re
import time

import pytest

from lomdm_dist.train.checkpoint import Checkpoint
from tests.distributed.grids import on_processes, train
from tests.distributed.hosts import NO_HOSTS, two_hosts, what_is_missing
from tests.distributed.runs import assert_same, curve, wait_for

MISSING = what_is_missing()
CUT_AT, LOST, SECONDS = 10, 10, 60


@pytest.fixture
def hosts(tmp_path):
    if MISSING:
        pytest.skip(f"{NO_HOSTS}: {MISSING}")
    with two_hosts(tmp_path / "hosts") as hosts:
        yield hosts


def deepspeed(hosts, folder, *arguments):
    """The command on the first host; what other hosts need of the environment stands in a file."""
    hostfile, environment = folder / "hostfile", folder / "deepspeed_env"
    hostfile.write_text("".join(f"{name} slots=2\n" for name in hosts.names.values()))
    environment.write_text(f"OMP_NUM_THREADS=1\nPATH={os.environ['PATH']}\n")
    command = ["deepspeed", "--hostfile", hostfile, "train.py", "--config", "configs/demo.yaml", *arguments]
    log = open(folder / "log.txt", "a")  # noqa: SIM115
    return hosts.run("a", *command, env={"DS_ENV_FILE": str(environment)}, stdout=log, stderr=log)


@pytest.mark.parametrize("resumed_on", ["one host", pytest.param("both", marks=pytest.mark.slow)])
def test_one_result_and_a_cut_cable_ends_both_sides(resumed_on, hosts, base, tmp_path):
    run = tmp_path / "run"
    options = [*base, f"train.run={run}", "train.global_batch=8", "train.micro_batch=4", "train.save_every=5"]
    options += ["parallel.tensor_parallel=2", f"faults.lost_seconds={LOST}", "--resume", "auto"]

    training = deepspeed(hosts, tmp_path, *options, "train.steps=100000")
    wait_for(run / "metrics.jsonl", f'"step": {CUT_AT},', training, tmp_path / "log.txt")
    hosts.cut("b")
    cut = time.monotonic()
    assert training.wait(timeout=SECONDS) != 0
    seconds = time.monotonic() - cut
    last, before = max(curve(run)), curve(run)
    said = (run / "ended.log").read_text()
    a, b = hosts.names.values()
    at_a, at_b = (re.search(rf"on {name}\): (.*)", said)[1] for name in (a, b))
    print(f"cut at step {last}, all ended after {seconds:.1f} s\n{a}: {at_a}\n{b}: {at_b}")
    assert re.match(
        rf"no sign of life for {LOST} s from rank 2 \(.* on {b}\), rank 3 \(.* on {b}\); all end", at_a
    )
    assert re.match(
        rf"no contact with rank 0 \(.* on {a}\) for {LOST} s: it is lost, or the network between", at_b
    )

    hosts.mend("b")
    saved = Checkpoint(run).progress.step
    assert saved >= CUT_AT - 5
    if resumed_on == "both":
        assert deepspeed(hosts, tmp_path, *options, f"train.steps={last + 4}").wait(timeout=300) == 0
    else:
        on_processes(2, train, [*options[:-2], f"train.steps={last + 4}"])
    on_processes(
        1,
        train,
        [
            *options[:-2],
            f"train.run={tmp_path / 'alone'}",
            f"train.steps={last + 4}",
            "parallel.tensor_parallel=1",
        ],
    )
    after, alone = curve(run), curve(tmp_path / "alone")
    assert_same(before, alone, before, 1e-5)
    assert_same(after, alone, alone, 1e-5)
