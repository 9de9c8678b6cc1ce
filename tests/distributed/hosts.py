"""Two hosts on one machine: network namespaces joined by a cable, each with a name and an ssh server.

Needs root, and the programs below (Debian: iproute2 openssh-server pdsh).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.distributed.runs import ROOT

NO_HOSTS = "THE TEST OF TWO HOSTS DID NOT RUN"
NEEDED = ("ip", "sshd", "ssh", "ssh-keygen", "pdsh", "unshare")
SBIN = "/usr/sbin:/sbin"


def what_is_missing() -> str | None:
    """Why two hosts cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    path = f"{os.environ['PATH']}:{SBIN}"
    missing = [name for name in NEEDED if not shutil.which(name, path=path)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = f"lomdm-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return f"ip netns add: {made.stderr.strip()}" if made.returncode else None


class Hosts:
    """Hosts a and b: `names` is what the hostfile says, `run` starts a command on one, `cut` the cable."""

    def __init__(self, folder: Path):
        self.folder, tag = folder, os.getpid() % 10_000
        self.names = {which: f"lomdm{tag}{which}" for which in "ab"}
        self.spaces = self.names
        self.cables = {which: f"v{tag}{which}" for which in "ab"}
        self.addresses = {"a": f"10.77.{tag % 250}.1", "b": f"10.77.{tag % 250}.2"}

    def run(self, which: str, *command, **options) -> subprocess.Popen:
        """A command on a host, under its name."""
        shell = f'hostname {self.names[which]} && exec "$@"'
        inside = ["ip", "netns", "exec", self.spaces[which], "unshare", "--uts", "sh", "-c", shell, "sh"]
        path = f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}:{SBIN}"
        environment = os.environ | {"PATH": path} | options.pop("env", {})
        return subprocess.Popen([*inside, *map(str, command)], cwd=ROOT, env=environment, **options)

    def cut(self, which: str) -> None:
        self._do(f"ip -n {self.spaces[which]} link set {self.cables[which]} down")

    def mend(self, which: str) -> None:
        self._do(f"ip -n {self.spaces[which]} link set {self.cables[which]} up")

    def start(self) -> None:
        for which, other in ("ab", "ba"):
            self._do(f"ip netns add {self.spaces[which]}")
            etc = Path("/etc/netns") / self.spaces[which]
            etc.mkdir(parents=True)
            lines = [f"{self.addresses[w]} {self.names[w]}" for w in (which, other)]
            (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        a, b = (f"name {self.cables[which]} netns {self.spaces[which]}" for which in "ab")
        self._do(f"ip link add {a} type veth peer {b}")
        for which in "ab":
            space, cable = self.spaces[which], self.cables[which]
            self._do(f"ip -n {space} addr add {self.addresses[which]}/24 dev {cable}")
            for link in ("lo", cable):
                self._do(f"ip -n {space} link set {link} up")
        self._start_ssh()

    def _start_ssh(self) -> None:
        """Servers with keys that are thrown away, and a client that knows them."""
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("host", "user"):
            self._do(f"ssh-keygen -q -t ed25519 -N '' -f {self.folder / key}")
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder / 'host'}\nAuthorizedKeysFile {self.folder / 'user.pub'}\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nStrictModes no\nUsePAM no\n"
            "PidFile none\nUseDNS no\n"
        )
        (self.folder / "ssh_config").write_text(
            f"IdentityFile {self.folder / 'user'}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
            "LogLevel ERROR\nServerAliveInterval 5\nServerAliveCountMax 3\n"
        )
        bin = self.folder / "bin"
        bin.mkdir()
        (bin / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.folder / "ssh_config"} "$@"\n')
        (bin / "ssh").chmod(0o755)
        log = open(self.folder / "sshd.log", "w")  # noqa: SIM115
        server = ["/usr/sbin/sshd", "-D", "-e", "-f", self.folder / "sshd_config"]
        self.servers = [self.run(which, *server, stdout=log, stderr=log) for which in "ab"]
        for name in self.names.values():
            self._reach(name)

    def _reach(self, name: str) -> None:
        deadline = time.monotonic() + 20
        while (tried := self.run("a", "ssh", name, "true")).wait() != 0:
            assert time.monotonic() < deadline, (tried.args, (self.folder / "sshd.log").read_text())
            time.sleep(0.2)

    def stop(self) -> None:
        for which in "ab":
            pids = subprocess.run(
                ["ip", "netns", "pids", self.spaces[which]], capture_output=True, text=True
            ).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", self.spaces[which]], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / self.spaces[which], ignore_errors=True)
        for server in getattr(self, "servers", []):
            server.wait()

    @staticmethod
    def _do(command: str) -> None:
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"


@contextlib.contextmanager
def two_hosts(folder: Path):
    folder.mkdir()
    hosts = Hosts(folder)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
