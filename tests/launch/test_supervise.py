"""`lomdm launch COMMAND`: what is started again, what is not, and what a stop becomes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lomdm_dist.cli import main

SUPERVISE = """
import sys
from lomdm_dist.errors import UserError
from lomdm_dist.launch import supervise as s
s.MINUTE, s.DAY, pause = map(float, sys.argv[1:4])
try:
    sys.exit(s.supervise(sys.argv[5:], int(sys.argv[4]), pause))
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""
NEXT_STATUS = 'echo >>starts; eval "$(sed -n "$(wc -l <starts)p" statuses)"'  # a line of `statuses` a start


@pytest.fixture
def launch(tmp_path):
    """Start what `lomdm launch` is in a folder of its own."""

    def start(*command, restarts=10, minute=60, day=1e6, pause=0.01):
        words = [sys.executable, "-c", SUPERVISE, minute, day, pause, restarts, *command]
        return subprocess.Popen(
            [str(word) for word in words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # a shell that starts the tests in the background has it ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    return start


def starts(folder) -> int:
    return len((folder / "starts").read_text().splitlines())


def wait_for(path):
    for _ in range(1000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"no {path}")


@pytest.mark.parametrize(
    ("statuses", "options", "status", "count"),
    [
        (["exit 0"], {}, 0, 1),
        (["exit 2"], {}, 2, 1),
        (["exit 75"], {}, 75, 1),
        (["exit 1", "exit 3", "exit 0"], {}, 0, 3),
        (["kill -KILL $$", "exit 75"], {}, 75, 2),
        (["kill -KILL $$"] * 2, {"restarts": 1}, 137, 2),
        (["exit 1"] * 9, {}, 1, 3),  # three quick failures
        (["exit 1"] * 9, {"minute": 0, "restarts": 5}, 1, 6),  # slow ones
        (["exit 1"] * 5 + ["exit 0"], {"minute": 0, "restarts": 1, "day": 0}, 0, 6),  # one a day
        (["exit 1"], {"restarts": 0}, 1, 1),
    ],
)
def test_a_command_is_started_again_after_a_fault_only(launch, tmp_path, statuses, options, status, count):
    (tmp_path / "statuses").write_text("\n".join(statuses) + "\n")
    process = launch("sh", "-c", NEXT_STATUS, **options)
    said = process.communicate(timeout=60)[1].splitlines()
    assert (process.returncode, starts(tmp_path), len(said)) == (status, count, count)
    assert ["; restart " in line for line in said] == [True] * (count - 1) + [False]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize(("own", "status"), [(75, 75), (1, 75), (0, 0)])
def test_a_stop_reaches_the_command_once_as_sigterm_and_is_the_end(launch, tmp_path, number, own, status):
    """It is sent to the whole process group, as a terminal does for Ctrl-C."""
    traps = f"trap 'echo >>terms; exit {own}' TERM; trap 'exit 9' INT USR1"
    script = f"{traps}; echo >>starts; for i in $(seq 2000); do sleep 0.02; done"
    process = launch("sh", "-c", script)
    wait_for(tmp_path / "starts")
    os.killpg(process.pid, number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == status and "stopped on request" in said and starts(tmp_path) == 1
    assert (tmp_path / "terms").read_text() == "\n"


def test_a_second_signal_is_as_the_first(launch, tmp_path):
    trap = "n=0; trap 'n=$((n+1)); echo >terms$n' TERM"
    script = f"{trap}; echo >>starts; for i in $(seq 2000); do [ $n = 2 ] && exit 75; sleep 0.02; done"
    process = launch("sh", "-c", script)
    for seen in ("starts", "terms1"):
        wait_for(tmp_path / seen)
        process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 75 and starts(tmp_path) == 1


def test_srun_gets_sigusr1_because_it_answers_sigterm_by_killing(launch, tmp_path):
    (tmp_path / "srun").write_text(
        "#!/bin/sh\ntrap 'exit 75' USR1\necho >>starts\nfor i in $(seq 2000); do sleep 0.02; done\n"
    )
    (tmp_path / "srun").chmod(0o755)
    process = launch(tmp_path / "srun")
    wait_for(tmp_path / "starts")
    process.terminate()
    assert "ended with status 75" in process.communicate(timeout=60)[1] and process.returncode == 75


def test_a_stop_before_a_restart(launch, tmp_path):
    process = launch("sh", "-c", "echo >>starts; exit 1", pause=600)
    assert "restart 1 of 10 in 24 hours, in 600 s" in process.stderr.readline()
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    assert process.returncode == 75 and starts(tmp_path) == 1


@pytest.mark.parametrize(("own", "status"), [("exit 1", 0), ("kill -KILL $$", 0), ("exit 75", 75)])
def test_workers_that_outlive_their_launcher_are_waited_for(launch, tmp_path, own, status):
    """Else a restart meets them, and the end of a batch job kills them while they save."""
    save = "setsid sh -c 'sleep 0.5; echo >saved' &"
    script = f"if [ -f starts ]; then test -f saved; exit; fi; echo >starts; {save} {own}"
    process = launch("sh", "-c", script, restarts=1)
    process.communicate(timeout=60)
    assert process.returncode == status and (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["./nowhere"], "cannot start ./nowhere: No such file"),
        (["/etc/passwd"], "cannot start /etc/passwd: Permission denied"),
        (["torchrun", "a/train.py", "--config", "c"], "add --resume auto"),
        (["/bin/lomdm", "train", "--config", "c"], "add --resume auto"),
        (["sh", "-c", "deepspeed train.py --config c"], "add --resume auto"),
    ],
)
def test_what_cannot_be_supervised_is_a_mistake(launch, command, message):
    process = launch(*command)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and message in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a command"),
        (["--restarts", "-1", "true"], "--restarts -1"),
        (["--hostfile", "hosts", "deepspeed"], "--hostfile"),
        (["--check", "--config", "c"], "needs both --hostfile"),
        (["--check", "--hostfile", "h", "--config", "c", "a.b=1", "--port", "1"], "--port stands after"),
    ],
)
def test_mistakes_at_the_command_line(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        main(["launch", *words])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_command_line_hands_on_command_and_status(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(9 * (sys.argv[1:] == ['--resume', 'auto', '--json']))")
    words = ["launch", "--restarts", "0", sys.executable, str(script), "--resume", "auto", "--json"]
    run = f"from lomdm_dist.cli import main; main({words})"
    assert subprocess.run([sys.executable, "-c", run], stderr=subprocess.DEVNULL).returncode == 9
