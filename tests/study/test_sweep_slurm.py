"""Points as SLURM jobs: real trainings of two ranks, under a SLURM that is a few lines of shell."""

import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from lomdm_dist.cli import main
from lomdm_dist.errors import UserError
from lomdm_dist.study import sweep_run, sweep_slurm
from lomdm_dist.study.sweep import load_sweep
from lomdm_dist.study.sweep_run import DONE, RUNNING, look_up, run_sweep
from lomdm_dist.study.sweep_slurm import Slurm
from tests.study.test_sweep import wait_for
from tests.tiny import REPOSITORY, tiny_config

# a job is a loop that runs the batch script until nobody has asked for it to be queued again
FAKES = {
    "sbatch": """
        id=$(($(ls "$FAKE" | grep -c script) + 100))
        cp "${@: -1}" "$FAKE/$id.script"; echo RUNNING > "$FAKE/$id"
        export SLURM_JOB_ID=$id SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=localhost SLURM_NTASKS=2
        (while bash "$FAKE/$id.script"; [ -e "$FAKE/$id.again" ]; do rm "$FAKE/$id.again"; done
        echo COMPLETED > "$FAKE/$id") > "$FAKE/$id.out" 2>&1 < /dev/null &
        echo "Submitted batch job $id" """,
    "srun": """
        while [[ $1 != *python* ]]; do shift; done; rm -f "$FAKE/pids"
        for rank in 0 1; do
            SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 "$@" & echo $! >> "$FAKE/pids"
        done
        wait""",
    "sacct": """
        echo "JobID|State|NodeList"
        for id in "$@"; do if [ -e "$FAKE/$id" ]; then echo "$id|$(cat "$FAKE/$id")|localhost"; fi; done""",
    "scontrol": """
        [ "$1" = requeue ] || { echo localhost; exit; }
        touch "$FAKE/$2.again" "$FAKE/requeued" """,
}


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """Its folder: of each job the script, and a file that holds its state."""
    fake, commands = tmp_path / "slurm", tmp_path / "bin"
    fake.mkdir()
    commands.mkdir()
    for name, text in FAKES.items():
        (commands / name).write_text("#!/bin/bash\n" + text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(sweep_run, "LOOK_SECONDS", 0.2)
    return fake


def make_sweep(data: Path, folder: Path):
    config = tiny_config(data, folder / "unused")
    config["train"] |= {"steps": 400, "global_batch": 8, "micro_batch": 4, "valid_every": 200}
    (folder / "base.yaml").write_text(yaml.safe_dump(config))
    values = {"base": str(folder / "base.yaml"), "runs": str(folder / "runs")}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(values | {"axes": {"objective.name": ["lomdm"]}}))
    return load_sweep(folder / "sweep.yaml", [])


@pytest.mark.slow
def test_a_preempted_job_is_queued_again_and_a_new_sweep_follows_it(slurm, tiny_data, tmp_path):
    sweep = make_sweep(tiny_data, tmp_path)
    demands, metrics = ["timeout_min=60", "partition=h100"], sweep.points[0].run / "metrics.jsonl"

    def stop_when_it_trains():
        if metrics.exists() and metrics.read_text().count("\n") > 5:
            raise KeyboardInterrupt  # this process goes away, the job stays

    records = look_up(sweep)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, records, records, Slurm(sweep, None, 2, demands), stop_when_it_trains)
    for pid in (slurm / "pids").read_text().split():
        os.kill(int(pid), signal.SIGUSR2)
    wait_for((slurm / "requeued").exists, 300)

    records = look_up(sweep)
    assert records[0].job == "100"
    statuses = []
    run_sweep(
        sweep, records, records, Slurm(sweep, None, 2, demands), lambda: statuses.append(records[0].status)
    )
    assert statuses[0] == RUNNING and records[0].status == DONE and records[0].job is None
    assert records[0].result["tokens"] == 400 * 8 * 16
    said = sweep.points[0].log.read_text()
    assert said.count("stopped on request after step") == 1 and "cpu x 2" in said
    assert [path.name for path in slurm.glob("*.script")] == ["100.script"]
    script = (slurm / "100.script").read_text()
    assert "#SBATCH --partition=h100" in script and "#SBATCH --ntasks-per-node=2" in script


def test_demands_that_slurm_does_not_know_are_refused(slurm, base_sweep):
    for demands, said in (
        (["partition"], "not of the form KEY=VALUE"),
        (["partition=h100"], "timeout_min=1440"),
        (["timeout_min=5", "partitoin=h100"], "partitoin"),
    ):
        with pytest.raises(UserError, match=said):
            Slurm(base_sweep, None, 1, demands)


def test_the_ranks_of_a_job_are_counted_before_it_waits_in_the_queue(slurm, base_sweep, tmp_path, capsys):
    """global_batch 8 in micro-batches of 4 divides over two ranks at most, whoever says how many."""
    for demands, ranks in ((["tasks_per_node=3"], 3), (["nodes=2", "tasks_per_node=2"], 4)):
        with pytest.raises(SystemExit) as status:
            main(["sweep", str(tmp_path / "sweep.yaml"), "--slurm", "timeout_min=5", *demands])
        assert status.value.code == 2
        assert f"over {ranks} data-parallel ranks" in capsys.readouterr().err


def test_without_slurm_nothing_runs_here_instead(base_sweep, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    with pytest.raises(UserError, match="srun"):
        Slurm(base_sweep, None, 1, ["timeout_min=5"])


@pytest.fixture
def base_sweep(tiny_data, tmp_path):
    return make_sweep(tiny_data, tmp_path)


def test_a_job_is_one_rank_a_task(monkeypatch):
    class Place:
        num_tasks, num_nodes, global_rank, local_rank, job_id, hostnames = 16, 2, 9, 1, "30007", ["n0", "n1"]

    ranks = sweep_slurm._ranks(Place)
    assert ranks["RANK"] == "9" and ranks["LOCAL_RANK"] == "1" and ranks["LOCAL_WORLD_SIZE"] == "8"
    assert (ranks["WORLD_SIZE"], ranks["MASTER_ADDR"], ranks["MASTER_PORT"]) == ("16", "n0", "20007")
