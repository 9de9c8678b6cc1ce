"""What one host says to `lomdm launch --check`, which runs this there by ssh.

    python -m lomdm_dist.launch.report look|listen|reach

One line of JSON in, the question; one out, the answer, `problem` in it where there is none.
"""

import contextlib
import hashlib
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import lomdm_dist
from lomdm_dist.files import sha256

INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def look(question: dict) -> dict:
    """The facts that hosts are compared by; paths are as the question names them."""
    import psutil
    import torch

    from lomdm_dist.machine import machine_in_sight, versions

    config, run = Path(question["config"]), existing(Path(question["run"]))
    interfaces = {
        name: [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        for name, entries in psutil.net_if_addrs().items()
    }
    environment = os.environ | question["environment"]
    return {
        "name": platform.node(),
        "machine": machine_in_sight(),
        "versions": versions(),
        "package": package_hash(),
        "config": sha256(config) if config.is_file() else None,
        "gpus": torch.cuda.device_count(),
        "port_problem": port_problem(question["port"]),
        "address": launchers_address(),
        "addresses": interfaces,
        "own_addresses": own_addresses(),
        "asked_interfaces": {name: environment[name] for name in INTERFACES if environment.get(name)},
        "folder_problems": [p for p in (unwritable(run), *map(unreadable, question["data"])) if p],
        "free_gib": shutil.disk_usage(run).free / 2**30,
        "time": time.time(),
    }


def package_hash() -> str:
    """A hash of the names and contents of the package's own files."""
    root = Path(lomdm_dist.__file__).parent
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    lines = [f"{name} {sha256(root / name)}" for name in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def launchers_address() -> str | None:
    """The address that DeepSpeed gives all processes to meet at, if this is the first host."""
    try:
        words = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    except OSError:
        return None
    return words[0] if words else None


def own_addresses() -> list[str]:
    """What the host's own name means here: what gloo listens at, and tells the others."""
    try:
        return sorted({entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)})
    except OSError:
        return []


def port_problem(port: int) -> str | None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return os.strerror(error.errno)


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    return path if path.exists() else existing(path.parent)


def unwritable(folder: Path) -> str | None:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot write to {folder} ({error.strerror})"


def unreadable(folder: str) -> str | None:
    try:
        os.listdir(folder)
    except OSError as error:
        return f"cannot read {folder} ({error.strerror})"


@contextlib.contextmanager
def listening(question: dict):
    """Hold the port, and a file in the run's folder; the answer says where, for `reach`."""
    token = secrets.token_hex(8)
    file = existing(Path(question["run"])) / f".lomdm-check-{token}"
    family = socket.AF_INET6 if ":" in question["address"] else socket.AF_INET
    with socket.create_server(("", question["port"]), family=family, backlog=1024) as server:
        threading.Thread(target=_greet, args=(server, token.encode()), daemon=True).start()
        file.touch()
        try:
            yield {"token": token, "file": str(file)}
        finally:
            file.unlink(missing_ok=True)


def _greet(server: socket.socket, token: bytes) -> None:
    while True:
        with server.accept()[0] as caller:
            caller.sendall(token)


def reach(question: dict) -> dict:
    """Whether what the first host holds can be seen from here."""
    try:
        with socket.create_connection((question["address"], question["port"]), timeout=10) as connection:
            heard = connection.recv(64).decode(errors="replace")
        problem = None if heard == question["token"] else "something else answers there"
    except OSError as error:
        problem = str(error)
    return {"port_problem": problem, "sees_file": os.path.exists(question["file"])}


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # libraries that greet on stdout
    mode = sys.argv[1]
    with contextlib.ExitStack() as held:
        try:
            question = json.loads(sys.stdin.readline())
            if mode == "listen":
                answer = held.enter_context(listening(question))
            else:
                answer = look(question) if mode == "look" else reach(question)
        except Exception as error:
            answer = {"problem": " ".join(f"{type(error).__name__}: {error}".split())}
        print(json.dumps(answer), file=out, flush=True)
        if mode == "listen":
            sys.stdin.read()  # until the caller has seen enough, or is gone
    os._exit(0)  # at once: when the answer ends is taken for when its clock was read


if __name__ == "__main__":
    main()
