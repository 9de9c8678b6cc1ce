"""launchers/slurm.sbatch itself, run by bash; stand-ins take the place of SLURM, Python and torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launchers/slurm.sbatch"
JOB = 123_456
STAND_INS = {
    "scontrol": """#!/bin/sh
case $1 in
show) [ "$*" = "show hostnames nodes" ] && seq -f node%g 0 $((SLURM_NNODES - 1)) ;;
*) echo "$*" >>scontrol ;;
esac
""",
    # signals go to the first process of a task only, as proctrack/cgroup has it, SIGKILL to all; SIGTERM
    # kills, and so does the end of a task: at once, or after --wait, whose 120 s are WAIT (2) here
    "srun": """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
options = [words.pop(0) for _ in list(words) if words[0].startswith("--")]
a_node, tasks, worst = int(os.environ["SLURM_NTASKS_PER_NODE"]), {}, 0
def signal_all(number, send=os.kill):
    for pid in tasks:
        send(pid, number)
signal.signal(signal.SIGUSR1, lambda number, _: signal_all(number))
for number in (signal.SIGTERM, signal.SIGALRM):
    signal.signal(number, lambda *_: signal_all(signal.SIGKILL, os.killpg))
for id in range(int(os.environ["SLURM_NTASKS"])):
    place = {"SLURM_PROCID": id, "SLURM_LOCALID": id % a_node, "SLURM_NODEID": id // a_node}
    place = os.environ | {name: str(value) for name, value in place.items()}
    process = subprocess.Popen(words, env=place, start_new_session=True)
    tasks[process.pid] = process
open("tasks", "w").write(" ".join(map(str, tasks)))
while tasks:
    pid, status = os.wait()
    del tasks[pid]
    status = os.waitstatus_to_exitcode(status)
    worst = max(worst, status if status >= 0 else 128 - status)
    if status and "--kill-on-bad-exit=0" not in options:
        signal_all(signal.SIGKILL, os.killpg)
    if "--wait=120" in options:
        signal.alarm(signal.alarm(0) or int(os.environ.get("WAIT", 2)))
os._exit(worst)
""",
    "python": """#!/bin/sh
trap 'echo "$RANK" >>stopped; exit 75' USR1 TERM
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" >>ranks
. ./behave
""",
    # like torchrun, it ends with 1 whatever its workers end with, and dies of SIGUSR1
    "torchrun": """#!/bin/sh
while [ "${1#--}" != "$1" ]; do
    case $1 in
    --nnodes) nodes=$2 ;; --node-rank) node=$2 ;; --nproc-per-node) each=$2 ;;
    --master-addr) addr=$2 ;; --master-port) port=$2 ;; *) exit 9 ;;
    esac
    shift 2
done
trap 'kill -TERM $workers; wait; exit 1' TERM
for local in $(seq 0 $((each - 1))); do
    RANK=$((node * each + local)) LOCAL_RANK=$local WORLD_SIZE=$((nodes * each)) LOCAL_WORLD_SIZE=$each \
        MASTER_ADDR=$addr MASTER_PORT=$port python "$@" &
    workers="$workers $!"
done
for worker in $workers; do wait "$worker" || failed=1; done
exit ${failed:-0}
""",
    "lomdm": """#!/bin/sh
[ "$QUICK" ] && [ "$SLURM_PROCID" ] && shift 3 && exec "$@"
exec {python} -c "from lomdm_dist.cli import main; main()" "$@"
""",
}


@pytest.fixture
def submit(tmp_path):
    """Run the script as SLURM does."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in STAND_INS.items():
        (tools / name).write_text(text.replace("{python}", sys.executable))
        (tools / name).chmod(0o755)

    def start(nodes: int, tasks_a_node: int, behave: str = "exit 0", **environment) -> subprocess.Popen:
        (tmp_path / "behave").write_text(behave + "\n")
        slurm = {
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NODELIST": "nodes",
            "SLURM_NNODES": nodes,
            "SLURM_NTASKS": nodes * tasks_a_node,
            "SLURM_NTASKS_PER_NODE": tasks_a_node,
            "SLURM_GPUS_ON_NODE": 8,
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        kept |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "RESTARTS": "0"}
        given = {name: str(value) for name, value in (slurm | environment).items()}
        words = ["bash", str(SCRIPT), "--config", "c.yaml", "a.b=two words"]
        return subprocess.Popen(words, cwd=tmp_path, env=kept | given, stderr=subprocess.PIPE, text=True)

    return start


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def wait_for(path: Path, count: int):
    for _ in range(2000):
        if len(lines(path)) == count:
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} has {len(lines(path))} lines, not {count}")


@pytest.mark.parametrize("tasks_a_node", [8, 1])
@pytest.mark.parametrize("nodes", [1, 4, 64])
def test_every_rank_starts_once(submit, tmp_path, nodes, tasks_a_node):
    process = submit(nodes, tasks_a_node, QUICK="yes" if nodes == 64 else "", WAIT=120)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    started = sorted((line.split(maxsplit=6) for line in lines(tmp_path / "ranks")), key=lambda w: int(w[0]))
    port = str(10_000 + JOB % 20_000)
    words = "train.py --resume auto --config c.yaml a.b=two words"
    assert started == [
        [str(rank), str(rank % 8), str(nodes * 8), "8", "node0", port, words] for rank in range(nodes * 8)
    ]
    assert lines(tmp_path / "scontrol") == []


def test_a_stop_queues_the_job_again_once(submit, tmp_path):
    """The first rank to end must not have the others killed while they save."""
    process = submit(2, 4, '[ "$RANK" = 0 ] || sleep 0.3; echo "$RANK" >>saved; exit 75')
    process.communicate(timeout=60)
    assert process.returncode == 75 and lines(tmp_path / "scontrol") == [f"requeue {JOB}"]
    assert sorted(map(int, lines(tmp_path / "saved"))) == list(range(8))


@pytest.mark.parametrize("behave", ["exit 1", "exit 2", '[ "$RANK" = 3 ] && exit 1; sleep 60; exit 0'])
def test_other_ends_do_not(submit, tmp_path, behave):
    process = submit(2, 4, behave)
    process.communicate(timeout=30)
    assert process.returncode not in (0, 75) and lines(tmp_path / "scontrol") == []
    if behave == "exit 2":
        assert process.returncode == 2


@pytest.mark.parametrize("tasks_a_node", [8, 1])
@pytest.mark.parametrize("to", ["tasks", "script"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_all_ranks(submit, tmp_path, tasks_a_node, to, number):
    process = submit(2, tasks_a_node, "for i in $(seq 1000); do sleep 0.05; done")
    wait_for(tmp_path / "ranks", 16)
    wait_for(tmp_path / "tasks", 1)
    for pid in [process.pid] if to == "script" else map(int, lines(tmp_path / "tasks")[0].split()):
        os.kill(pid, number)
    process.communicate(timeout=60)
    assert process.returncode == 75 and lines(tmp_path / "scontrol") == [f"requeue {JOB}"]
    assert sorted(map(int, lines(tmp_path / "stopped"))) == list(range(16))
