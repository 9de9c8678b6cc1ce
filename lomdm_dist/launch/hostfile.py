"""Hostfiles: `[user@]host slots=N`, a host a line.

DeepSpeed reads of a line what it knows and passes over the rest, and without the file it runs on
this machine alone. What is accepted here it reads the same way; whatever it, ssh or pdsh would take
for something else is refused.
"""

import io
import re
from dataclasses import dataclass
from pathlib import Path

from lomdm_dist.errors import UserError

ENTRY = re.compile(r"(?P<address>\S+)\s+slots=(?P<slots>[0-9]+)(?:\s+(?P<rest>.*))?")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*")
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Host:
    name: str
    user: str | None
    slots: int
    line: int

    @property
    def address(self) -> str:
        """What ssh takes, and DeepSpeed's name of the host."""
        return f"{self.user}@{self.name}" if self.user else self.name


def read(path: str | Path) -> list[Host]:
    """Raises UserError where the file cannot be read, or has a line that is not right."""
    try:
        text = Path(path).read_bytes().decode(errors="surrogateescape")
    except FileNotFoundError:
        raise UserError(f"no hostfile {path}: DeepSpeed would run on this machine alone") from None
    except OSError as error:
        raise UserError(f"cannot read hostfile {path}: {error.strerror}") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> list[Host]:
    """The hosts in their order. Raises UserError with all lines of the file that are not right."""
    hosts, problems = {}, []
    for number, line in enumerate(io.StringIO(text, newline=None), 1):  # lines as open() reads them
        try:
            host = _parse_line(line, number)
            if host is None:
                continue
            before = hosts.setdefault(host.name.lower(), host)
            if before is not host:
                raise ValueError(f"{host.name} stands in line {before.line} already; name a host once")
        except ValueError as problem:
            problems.append(f"line {number}: {problem}")
    if not hosts and not problems:
        problems = ["it names no host; write lines such as `node0 slots=8`"]
    if problems:
        raise UserError(f"hostfile {name}: {'; '.join(problems)}")
    return list(hosts.values())


def _parse_line(line: str, number: int) -> Host | None:
    """None for a blank line or a comment. Raises ValueError."""
    strange = re.search(r"[^\t\n -~]", line)
    if strange:
        kind = "a byte order mark" if strange[0] == "\ufeff" else f"the character {strange[0]!a}"
        raise ValueError(f"{kind} at column {strange.start() + 1}; use plain ASCII")
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    entry = ENTRY.fullmatch(line)
    if entry is None:
        raise ValueError(f"{line!r} is not of the form `[user@]host slots=N`")
    rest = entry["rest"] or ""
    if rest and not rest.startswith("#"):
        raise ValueError(f"DeepSpeed ignores {rest!r} after the slots; leave it out, or put a # before it")
    if int(entry["slots"]) == 0:
        raise ValueError("slots=0; leave the line out")
    user, name = _split_address(entry["address"])
    return Host(name, user, int(entry["slots"]), number)


def _split_address(address: str) -> tuple[str | None, str]:
    """User and host. Raises ValueError."""
    user, at, name = address.rpartition("@")
    if at and not USER.fullmatch(user):
        raise ValueError(f"{address!r}: {user!r} is no user name" if user else f"{address!r} has no user")
    if at and not name:
        raise ValueError(f"{address!r} has no host")
    if name.count(":") > 1:
        raise ValueError(f"{name!r}: pdsh takes no IPv6 address; use a name or IPv4")
    if ":" in name:
        raise ValueError(f"{name!r}: the port belongs into ~/.ssh/config (Host, Port)")
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no host name; ssh or pdsh would read more into it")
    return user or None, name
