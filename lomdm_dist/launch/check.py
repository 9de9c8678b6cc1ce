"""`lomdm launch --check`: what would go wrong on a hostfile's hosts, found before anything starts.

Every host is asked twice by ssh (`report.py`): for its facts, and whether it reaches the first host's
port and sees a file in the run's folder that the first host has written.
"""

import contextlib
import ipaddress
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lomdm_dist.config import Config, load_config
from lomdm_dist.data.store import is_remote
from lomdm_dist.errors import UserError
from lomdm_dist.launch.hostfile import Host, read
from lomdm_dist.launch.report import INTERFACES

ANSWER_SECONDS = 120  # a cold start of torch from a busy shared file system
CLOCK_SECONDS = 10  # torchrun's elastic hosts lose each other from 15 on
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
SSH_FAILED = 255


def check(hostfile: str, config_path: str, overrides: list[str], port: int) -> dict:
    """Reports of all hosts, problems in words, and the config. Raises UserError where none can be asked."""
    hosts = read(hostfile)
    config = load_config(config_path, overrides)
    if not shutil.which("ssh"):
        raise UserError("no ssh on this machine: install OpenSSH's client; DeepSpeed needs it too")
    sources = [source.path for source in config.data.train] + [config.data.valid]
    question = {
        "config": str(config_path),
        "run": str(config.train.run),
        "data": [source for source in sources if not is_remote(source)],
        "port": port,
        "environment": forwarded(),
    }
    reports = ask_all(hosts, "look", question)
    problems = of_the_grid(hosts, config) + compare(hosts, reports, question) + kept_back()
    if not any("problem" in report for report in reports) and not reports[0]["port_problem"]:
        problems += meet(hosts, reports[0], question)
    return {
        "hosts": [
            {"host": host.address, "slots": host.slots} | report
            for host, report in zip(hosts, reports, strict=True)
        ],
        "problems": problems,
        "config": config.as_dict(),
    }


def table(hosts: list[dict]) -> list[str]:
    """One row a host; slots that differ are said below."""
    rows = [("host", "slots", "GPUs", "address", "torch", "free disk", "clock")]
    for host in hosts:
        row = (host["host"], str(host["slots"]))
        if "problem" in host:
            rows.append((*row, "-", "-", "-", "-", "-"))
        else:
            disk, clock = f"{host['free_gib']:,.0f} GiB", f"{host['clock']:+.1f} s"
            rows.append(
                (*row, str(host["gpus"]), host["address"] or "-", host["versions"]["torch"], disk, clock)
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if len({host["slots"] for host in hosts}) > 1:
        lines.append("note: the hosts have unequal slots")
    if not any(host.get("gpus", "unknown") for host in hosts):
        lines.append("note: no GPU anywhere: training would run on CPUs")
    return lines


def of_the_grid(hosts: list[Host], config: Config) -> list[str]:
    """Whether the config can be spread over so many processes, and over these hosts."""
    problems, tensor = [], config.parallel.tensor_parallel
    try:
        config.accumulation(config.data_parallel(sum(host.slots for host in hosts)))
    except UserError as error:
        problems.append(f"hostfile: {error}")
    return problems + [
        f"{host.address}: slots={host.slots} is no multiple of parallel.tensor_parallel {tensor}, whose "
        "groups must not cross hosts: change one of the two"
        for host in hosts
        if host.slots % tensor
    ]


def forwarded() -> dict[str, str]:
    """The choice of interfaces that DeepSpeed hands on to all hosts. Raises UserError."""
    values = {name: os.environ[name] for name in INTERFACES if name.startswith("NCCL") and name in os.environ}
    for path in (Path.home() / ".deepspeed_env", Path(".deepspeed_env")):
        for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], 1):
            name, equals, value = line.partition("=")
            if not equals:
                raise UserError(f"{path} line {number} is not NAME=VALUE: DeepSpeed fails on it")
            if name.strip() in INTERFACES:
                values[name.strip()] = value.strip()
    return values


def kept_back() -> list[str]:
    """Choices of an interface that were made in this shell only."""
    handed_on = forwarded()
    return [
        f"{name} is set in this shell, but DeepSpeed does not hand it on: put it into .deepspeed_env"
        for name in INTERFACES
        if name in os.environ and name not in handed_on
    ]


def command(host: Host, mode: str) -> list[str]:
    """As DeepSpeed does: this Python, in this folder. Questions go to its input, where no `ps` shows them."""
    path = os.environ.get("PYTHONPATH")
    environment = f"env PYTHONPATH={shlex.quote(path)} " if path else ""
    python = f"{environment}{shlex.quote(sys.executable)} -m lomdm_dist.launch.report {mode}"
    return [*SSH, host.address, f"cd {shlex.quote(os.getcwd())} && {python}"]


def ask_all(hosts: list[Host], mode: str, question: dict) -> list[dict]:
    with ThreadPoolExecutor(len(hosts) or 1) as pool:
        return list(pool.map(partial(ask, mode=mode, question=question), hosts))


def ask(host: Host, mode: str, question: dict) -> dict:
    """The answer of a host's report; `problem` in it where there is none."""
    try:
        done = subprocess.run(
            command(host, mode),
            input=json.dumps(question) + "\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"no answer in {ANSWER_SECONDS} s: see whether `ssh {host.address}` works"}
    return understood(host, done.returncode, done.stdout, done.stderr)


def understood(host: Host, status: int, out: str, err: str) -> dict:
    last = (err.strip().splitlines() or ["without a word"])[-1]
    if status == SSH_FAILED:
        return {"problem": f"{last}: see that `ssh -o BatchMode=yes {host.address} true` works"}
    if status:
        return {"problem": f"its report ended with status {status}: {last}: install there what is here"}
    try:
        answer = json.loads(out)
        if not isinstance(answer, dict):
            raise ValueError
    except ValueError:
        return {
            "problem": f"printed {out[:60]!r} instead of a report: if its shell greets, let it do so in "
            "interactive shells only (DeepSpeed reads an address from there)"
        }
    if "time" in answer:
        answer["clock"] = answer.pop("time") - time.time()
    return answer


def compare(hosts: list[Host], reports: list[dict], question: dict) -> list[str]:
    """Problems, one a line: host, what is wrong, what to do. The first host that answers is the measure."""
    answered = [
        (host, report) for host, report in zip(hosts, reports, strict=True) if "problem" not in report
    ]
    problems = []
    for host, report in zip(hosts, reports, strict=True):
        if "problem" in report:
            found = [report["problem"]]
        else:
            found = differences(report, *answered[0], question) + shortcomings(host, report, answered[0][1])
            found += network_problems(report, alone=len(hosts) == 1)
            found += twin_problems(host, report, answered)
        if host is hosts[0] and "problem" not in report:
            found += first_hosts_problems(report, question["port"])
        problems += [f"{host.address}: {problem}" for problem in found]
    return problems


def differences(report: dict, other: Host, measure: dict, question: dict) -> list[str]:
    problems, them = [], other.address
    for name, version in measure["versions"].items():
        if report["versions"].get(name) != version:
            theirs = report["versions"].get(name)
            problems.append(f"{name} is {theirs}, on {them} {version}: install the same (constraints.txt)")
    if report["package"] != measure["package"]:
        problems.append(f"its lomdm_dist has other code than {them}'s: bring both to one commit")
    if report["config"] is None:
        problems.append(
            f"there is no {question['config']} in {os.getcwd()}: copy it there, or share the folder"
        )
    elif report["config"] != measure["config"]:
        problems.append(f"its {question['config']} is another than {them}'s: copy it there")
    return problems


def shortcomings(host: Host, report: dict, measure: dict) -> list[str]:
    problems = [f"{problem}: create or mount it, or mend its rights" for problem in report["folder_problems"]]
    if measure["gpus"] and report["gpus"] < host.slots:
        problems.append(
            f"it has {report['gpus']} GPUs for slots={host.slots}: mend the hostfile or the driver"
        )
    if abs(report["clock"]) > CLOCK_SECONDS:
        problems.append(f"its clock is {report['clock']:+.0f} s from this machine's: set both by NTP")
    return problems


def twin_problems(host: Host, report: dict, answered: list[tuple[Host, dict]]) -> list[str]:
    """A host that another line has named already, by another name."""
    twins = [
        other.address
        for other, theirs in answered
        if other.line < host.line and report["machine"] and theirs["machine"] == report["machine"]
    ]
    return [f"it is the same machine as {twins[0]}: each GPU would have two ranks"] if twins else []


def network_problems(report: dict, alone: bool) -> list[str]:
    """What makes NCCL and gloo hang at their start."""
    problems, asked = [], report["asked_interfaces"]
    for name, value in asked.items():
        if not any_interface(name, value, report["addresses"]):
            have = ", ".join(report["addresses"])
            problems.append(f"{name}={value}, but its interfaces are {have}: correct or unset it")
    own = report["own_addresses"]
    local = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in own)
    if local and not alone and "GLOO_SOCKET_IFNAME" not in asked:
        problems.append(
            f"its own name, {report['name']}, means {', '.join(own) or 'nothing'} there, where no other "
            "host gets: correct its /etc/hosts, or set GLOO_SOCKET_IFNAME in .deepspeed_env"
        )
    return problems


def any_interface(name: str, value: str, interfaces) -> bool:
    """Whether a list such as `eth0,ib` (prefixes), `=eth0` (exact) or `^docker` (all others) names one."""
    others, exact = value.startswith("^"), value.lstrip("^").startswith("=") or name.startswith("GLOO")
    words = value.lstrip("^=").split(",")
    named = {i for i in interfaces if any(i == w if exact else i.startswith(w) for w in words)}
    return bool(set(interfaces) - named if others else named)


def first_hosts_problems(report: dict, port: int) -> list[str]:
    problems = []
    if report["port_problem"]:
        problems.append(
            f"port {port} cannot be had there ({report['port_problem']}): end what holds it, or choose "
            "another: --port here, --master_port for deepspeed"
        )
    if not report["address"]:
        problems.append("`hostname -I` gives no address there: give deepspeed --master_addr")
    return problems


def meet(hosts: list[Host], first: dict, question: dict) -> list[str]:
    """Whether all hosts reach the first one's port, and share the run's folder with it."""
    if len(hosts) == 1 or not first["address"]:
        return []
    question = question | {"address": first["address"]}
    with listening(hosts[0], question) as answer:
        if "problem" in answer:
            return [f"{hosts[0].address}: {answer['problem']}"]
        reports = ask_all(hosts[1:], "reach", question | answer)
    problems = []
    for host, report in zip(hosts[1:], reports, strict=True):
        place = f"port {question['port']} of {first['address']} ({hosts[0].address})"
        if found := report.get("problem"):
            problems.append(f"{host.address}: {found}")
        elif found := report["port_problem"]:
            problems.append(f"{host.address}: cannot reach {place}: {found}: open it in the firewall")
        if report.get("sees_file") is False:
            folder = Path(answer["file"]).parent
            problems.append(
                f"{host.address}: does not see what {hosts[0].address} writes to {folder}: train.run must "
                "lie on a file system that all hosts share"
            )
    return problems


@contextlib.contextmanager
def listening(host: Host, question: dict):
    """The first host holds its port until the block ends; its answer."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command(host, "listen"), text=True, errors="replace", **pipes) as process:
        patience = threading.Timer(ANSWER_SECONDS, process.kill)
        patience.start()
        with contextlib.suppress(BrokenPipeError):  # ssh has failed, and says why
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        patience.cancel()
        try:
            yield understood(host, 0, line, "") if line else understood(host, *_failed(process))
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # ends the report


def _failed(process: subprocess.Popen) -> tuple[int, str, str]:
    return process.wait(), "", process.stderr.read()
