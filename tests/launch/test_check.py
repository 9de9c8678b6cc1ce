"""`lomdm launch --check`: each fault of a host is named before anything starts. No sshd is needed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lomdm_dist.cli import main
from lomdm_dist.config import load_config
from lomdm_dist.errors import UserError
from lomdm_dist.launch import check
from lomdm_dist.launch.hostfile import parse
from lomdm_dist.launch.report import port_problem

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/demo.yaml"
QUESTION = {"config": "c.yaml", "port": 29500}
# runs the command here, for hosts that are well
SSH = """#!/bin/sh
[ "$1 $2 $3 $4" = "-o BatchMode=yes -o ConnectTimeout=10" ] || exit 9
case $5 in
refuses) echo "warning" >&2; echo "root@refuses: Permission denied (publickey)." >&2; exit 255 ;;
hangs) exec sleep 1000 ;;
greets) echo "Welcome to greets"; exec sh -c "$6" </dev/null ;;
bare) echo "sh: python: not found" >&2; exit 127 ;;
unshared) sed s/.lomdm-check-/.lomdm-other-/ | sh -c "$6" ;;
walled) sed 's/"127.0.0.1"/"::1"/' | sh -c "$6" ;;
*) exec sh -c "$6" ;;
esac
"""


def report(**changes) -> dict:
    well = {
        "name": "n",
        "machine": "",
        "versions": {"torch": "2.13.0", "python": "3.11.7"},
        "package": "p",
        "config": "c",
        "gpus": 8,
        "port_problem": None,
        "address": "10.0.0.1",
        "addresses": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "docker0": ["172.17.0.1"]},
        "own_addresses": ["10.0.0.1"],
        "asked_interfaces": {},
        "folder_problems": [],
        "free_gib": 100.0,
        "clock": 0.0,
    }
    return well | changes


def compare(*reports, slots=8) -> list[str]:
    hosts = parse("\n".join(f"node{n} slots={slots}" for n in range(len(reports))), "hosts")
    return check.compare(hosts, list(reports), QUESTION)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": {"torch": "2.12.0", "python": "3.11.7"}}, "torch is 2.12.0, on node0 2.13.0"),
        ({"versions": {"torch": "2.13.0"}}, "python is None, on node0 3.11.7"),
        ({"package": "q"}, "lomdm_dist has other code than node0's"),
        ({"config": "d"}, "its c.yaml is another than node0's"),
        ({"config": None}, "there is no c.yaml"),
        ({"gpus": 7}, "7 GPUs for slots=8"),
        ({"gpus": 0}, "0 GPUs for slots=8"),
        ({"folder_problems": ["cannot read data/x (No such file or directory)"]}, "cannot read data/x"),
        ({"clock": 61.0}, "its clock is +61 s"),
        ({"clock": -61.0}, "its clock is -61 s"),
        ({"own_addresses": ["127.0.1.1"]}, "its own name, n, means 127.0.1.1"),
        ({"own_addresses": []}, "its own name, n, means nothing"),
        ({"asked_interfaces": {"NCCL_SOCKET_IFNAME": "ib"}}, "NCCL_SOCKET_IFNAME=ib, but"),
        ({"asked_interfaces": {"GLOO_SOCKET_IFNAME": "eth"}}, "GLOO_SOCKET_IFNAME=eth, but"),
        ({"problem": "ImportError: libcudart.so"}, "ImportError: libcudart.so"),
    ],
)
def test_a_fault_of_one_host_is_one_line_with_its_name(changes, message):
    problems = compare(report(), report(), report(**changes))
    assert len(problems) == 1 and problems[0].startswith("node2: ") and message in problems[0]
    assert "\n" not in problems[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"port_problem": "Address already in use"},
            "port 29500 cannot be had there (Address already in use)",
        ),
        ({"address": None}, "`hostname -I` gives no address"),
    ],
)
def test_faults_that_matter_on_the_first_host_only(changes, message):
    (problem,) = compare(report(**changes), report())
    assert problem.startswith("node0: ") and message in problem
    assert compare(report(), report(**changes)) == []


def test_what_is_no_fault():
    assert compare(report()) == compare(report(), report(), report()) == []
    assert compare(report(own_addresses=["127.0.1.1"])) == []  # nobody else looks for it
    assert compare(*[report(gpus=0)] * 2) == []  # a cluster of CPUs
    by_interface = report(own_addresses=["127.0.1.1"], asked_interfaces={"GLOO_SOCKET_IFNAME": "eth0"})
    assert compare(report(), by_interface) == []


def test_where_the_first_host_is_silent_the_next_is_the_measure():
    problems = compare({"problem": "gone"}, report(), report(package="q"))
    assert problems[0] == "node0: gone" and problems[1].startswith("node2: ") and "node1's" in problems[1]


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("NCCL", "eth", True),
        ("NCCL", "ib,eth0", True),
        ("NCCL", "=eth", False),
        ("NCCL", "=eth0", True),
        ("NCCL", "^docker,lo", True),
        ("NCCL", "^eth,docker,lo", False),
        ("NCCL", "^=eth", True),
        ("GLOO", "eth", False),
        ("GLOO", "ib0,eth0", True),
    ],
)
def test_interfaces_are_named_as_nccl_and_gloo_read_them(name, value, found):
    assert check.any_interface(f"{name}_SOCKET_IFNAME", value, report()["addresses"]) is found


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("a slots=8\nb slots=8", [], None),
        ("a slots=3", [], "hostfile: train.global_batch 64 does not divide over 3"),
        (
            "a slots=3\nb slots=1",
            ["parallel.tensor_parallel=2", "model.heads=4"],
            "a: slots=3 is no multiple",
        ),
        ("a slots=3", ["parallel.tensor_parallel=2", "model.heads=4"], "hostfile: 3 processes do not form"),
    ],
)
def test_the_processes_must_form_the_grid(text, overrides, message):
    problems = check.of_the_grid(
        parse(text, "hosts"),
        load_config(CONFIG, ["train.global_batch=64", "train.micro_batch=1", *overrides]),
    )
    assert not problems if message is None else problems[0].startswith(message)


def test_two_names_of_one_machine_are_seen():
    problems = compare(report(machine="a"), report(machine="b"), report(machine="a"))
    assert problems == ["node2: it is the same machine as node0: each GPU would have two ranks"]


def test_a_choice_that_deepspeed_does_not_hand_on_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    (problem,) = check.kept_back()
    assert problem.startswith("GLOO_SOCKET_IFNAME is set in this shell, but DeepSpeed does not hand it on")
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=ib0\n")
    assert check.kept_back() == []


def test_a_port_in_use_is_seen():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert port_problem(port) == "Address already in use"
    assert port_problem(port) is None


def test_a_library_that_fails_to_load_is_a_readable_problem(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12:\\n no such file')")
    done = subprocess.run(
        [sys.executable, "-m", "lomdm_dist.launch.report", "look"],
        input=json.dumps({"config": "c", "run": "r"}),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == {"problem": "ImportError: libcudart.so.12: no such file"}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder with a stand-in for ssh, data folders, and a free port; returns the words of a check."""
    tools, home = tmp_path / "bin", tmp_path / "home"
    for folder in (tools, home, tmp_path / "train", tmp_path / "valid"):
        folder.mkdir()
    for name, text in {"ssh": SSH, "hostname": "#!/bin/sh\necho 127.0.0.1"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=lo\n")  # whatever this machine's name means
    monkeypatch.chdir(tmp_path)
    for name, value in {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": home, "PYTHONPATH": ROOT}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(check, "twin_problems", lambda *_: [])  # they are one machine
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]

    def words(hostfile: str) -> list[str]:
        Path("hosts").write_text(hostfile)
        data = ["data.train=train", "data.valid=valid", "train.run=runs/mine", "train.global_batch=64"]
        options = ["--hostfile", "hosts", "--config", str(CONFIG), "--port", str(port)]
        return ["launch", "--check", *options, "--json", "result.json", *data]

    return words


def checked(words: list[str], capsys) -> tuple[int, list[str], dict]:
    """Exit status, the lines below the table, and the JSON file."""
    status = 0
    try:
        main(words)
    except SystemExit as stopped:
        status = stopped.code
    result = json.loads(Path("result.json").read_text())
    said = capsys.readouterr()
    assert (said.err == "") == (status == 0) and len(said.err.splitlines()) <= 1
    return status, said.out.splitlines()[1 + len(result["hosts"]) :], result


def test_hosts_that_are_well_pass(cluster, capsys):
    status, problems, result = checked(cluster("a slots=2\nme@b slots=2\n"), capsys)
    assert (status, result["problems"]) == (0, [])
    assert problems == [
        "note: no GPU anywhere: training would run on CPUs",
        "nothing found that would keep this job from running",
    ]
    assert [host["host"] for host in result["hosts"]] == ["a", "me@b"]
    assert list(Path(".").glob(".lomdm-check-*")) == [] and not Path("runs").exists()


def test_what_only_the_meeting_shows(cluster, capsys, monkeypatch):
    Path("valid").rmdir()
    Path("torch.py").write_text(
        "class cuda:\n    device_count = staticmethod(lambda: 0)\nclass device: ...\n"
    )  # quick to import
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{ROOT}")
    status, problems, _ = checked(cluster("a slots=2\nunshared slots=1\nwalled slots=1\n"), capsys)
    assert status == 2 and problems[0] == "note: the hosts have unequal slots"
    missing = [p for p in problems if "cannot read valid (No such file or directory)" in p]
    assert len(missing) == 3
    assert any(p.startswith("unshared: does not see what a writes to ") for p in problems)
    assert any(p.startswith("walled: cannot reach port ") and "Connection refused" in p for p in problems)
    assert len(problems) == 7 and problems[1].startswith("note: no GPU anywhere")


def test_hosts_that_do_not_answer(cluster, capsys, monkeypatch):
    monkeypatch.setattr(check, "ANSWER_SECONDS", 2)
    hosts = "".join(f"{name} slots=1\n" for name in ("refuses", "hangs", "greets", "bare"))
    status, problems, _ = checked(cluster(hosts), capsys)
    assert status == 2 and len(problems) == 4
    assert problems[0].startswith("refuses: root@refuses: Permission denied (publickey).: see that `ssh ")
    assert problems[1].startswith("hangs: no answer in 2 s")
    assert problems[2].startswith("greets: printed 'Welcome to greets")
    assert problems[3].startswith("bare: its report ended with status 127: sh: python: not found")


def test_without_ssh_nothing_is_asked(cluster, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit) as stopped:
        main(cluster("a slots=1"))
    assert stopped.value.code == 2 and "no ssh on this machine" in capsys.readouterr().err


def test_deepspeeds_environment_file_is_read_as_deepspeed_does(cluster, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "never forwarded")
    Path(".deepspeed_env").write_text("KEY=a=b\nGLOO_SOCKET_IFNAME=ib0\n")
    assert check.forwarded() == {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "ib0"}
    Path(".deepspeed_env").write_text("A=b\n\nC=d\n")
    with pytest.raises(UserError, match="line 2 is not NAME=VALUE"):
        check.forwarded()
