"""Hostfiles: each line is read as DeepSpeed reads it, or refused with its number."""

import pytest
from deepspeed.launcher.runner import _parse_hostfile
from hypothesis import given
from hypothesis import strategies as st

from lomdm_dist.errors import UserError
from lomdm_dist.launch.hostfile import Host, parse, read

GOOD = [
    ("node0 slots=8", ["node0", 8]),
    ("node0\tslots=8", ["node0", 8]),
    ("  node0   slots=8  ", ["node0", 8]),
    ("\tnode0 \t slots=8", ["node0", 8]),
    ("user@node0 slots=2", ["user@node0", 2]),
    ("first.last@node0 slots=2", ["first.last@node0", 2]),
    ("10.0.0.1 slots=4", ["10.0.0.1", 4]),
    ("gpu-01.rack_3.example.org slots=16", ["gpu-01.rack_3.example.org", 16]),
    ("node0 slots=8  # rack 3", ["node0", 8]),
    ("node0 slots=8 #", ["node0", 8]),
    ("node0 slots=08", ["node0", 8]),
    ("\n# all of them\n\n   # and\nnode0 slots=8\n", ["node0", 8]),
    ("node0 slots=8\r\n", ["node0", 8]),
    ("a slots=1\r\n\r\n#\r\nb slots=2\r\n", ["a", 1, "b", 2]),
    ("a slots=1\nu@b slots=2", ["a", 1, "u@b", 2]),
]

BAD = [
    ("node0", 1, "not of the form"),
    ("node0 slots=", 1, "not of the form"),
    ("node0 slots = 8", 1, "not of the form"),
    ("node0 SLOTS=8", 1, "not of the form"),
    ("node0 slots=8x", 1, "not of the form"),
    ("node0 slots=8#x", 1, "not of the form"),
    ("node0 slots=8,4", 1, "not of the form"),
    ("node0 slots=-1", 1, "not of the form"),
    ("node0 slots=8.0", 1, "not of the form"),
    ("node0:8", 1, "not of the form"),
    ("node0 gpus=8 slots=8", 1, "not of the form"),
    ("node0 slots=0", 1, "slots=0"),
    ("node0 slots=8 max_slots=8", 1, "ignores 'max_slots=8'"),
    ("node0 slots=8 rack 3", 1, "ignores 'rack 3'"),
    ("node0 slots=8\n\nnode0 slots=8", 3, "in line 1 already"),
    ("node0 slots=8\nroot@node0 slots=4", 2, "in line 1 already"),
    ("node0 slots=8\nNODE0 slots=4", 2, "in line 1 already"),
    ("-oProxyCommand=x slots=8", 1, "no host name"),
    ("u@-n slots=8", 1, "no host name"),
    ("-u@node0 slots=8", 1, "no user name"),
    ("u@v@node0 slots=8", 1, "no user name"),
    ("$(reboot) slots=8", 1, "no host name"),
    ("node0;reboot slots=8", 1, "no host name"),
    ("node0&& slots=8", 1, "no host name"),
    ("a,b slots=8", 1, "no host name"),
    ("node[0-3] slots=8", 1, "no host name"),
    ("'node0' slots=8", 1, "no host name"),
    ("node0/1 slots=8", 1, "no host name"),
    ("user@ slots=8", 1, "has no host"),
    ("@node0 slots=8", 1, "has no user"),
    ("node0:22 slots=8", 1, "port belongs into ~/.ssh/config"),
    ("fe80::1 slots=8", 1, "IPv6"),
    ("[::1] slots=8", 1, "IPv6"),
    ("\ufeffnode0 slots=8", 1, "byte order mark"),
    ("\ufeff# comment\nnode0 slots=8", 1, "byte order mark"),
    ("nöde0 slots=8", 1, r"'\xf6' at column 2"),
    ("node0\u00a0slots=8", 1, r"'\xa0'"),
    ("node0 slots=\u0668", 1, r"'\u0668'"),
    ("node0\x00 slots=8", 1, r"'\x00'"),
    ("node0\x0bslots=8", 1, r"'\x0b'"),
]


@pytest.mark.parametrize(("text", "expected"), GOOD)
def test_what_is_accepted_deepspeed_reads_alike(tmp_path, text, expected):
    (tmp_path / "hostfile").write_bytes(text.encode())
    hosts = read(tmp_path / "hostfile")
    assert [word for host in hosts for word in (host.address, host.slots)] == expected
    with open(tmp_path / "hostfile") as lines:
        assert dict(_parse_hostfile(lines.readlines())) == {host.address: host.slots for host in hosts}


@pytest.mark.parametrize(("text", "line", "message"), BAD)
def test_what_is_refused_has_its_line(text, line, message):
    with pytest.raises(UserError, match=f"^hostfile hosts: line {line}: ") as refused:
        parse(text, "hosts")
    assert message in str(refused.value) and len(str(refused.value).splitlines()) == 1


words = st.text(alphabet="ab1-.@:#_ =\t\r\n\\[,é", max_size=6)


@given(st.lists(st.tuples(words, words, st.sampled_from(["slots=2", "slots=0", "slots", ""]), words)))
def test_whatever_is_accepted_deepspeed_reads_alike(parts):
    text = "\n".join(f"{a}{b} {slots}{rest}" for a, b, slots, rest in parts)
    try:
        hosts = parse(text, "hosts")
    except UserError:
        return
    theirs = _parse_hostfile(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    assert dict(theirs) == {host.address: host.slots for host in hosts}


def test_all_problems_are_said_at_once():
    with pytest.raises(UserError) as refused:
        parse("node0 slots=0\nok slots=1\nnode1\n", "hosts")
    assert "line 1: slots=0" in str(refused.value) and "; line 3: 'node1' is not" in str(refused.value)


def test_a_host_knows_its_line():
    assert parse("\n# one\nme@node0 slots=8\n", "hosts") == [Host("node0", "me", 8, line=3)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "DeepSpeed would run on this machine alone"),
        ("", "names no host"),
        ("# a\n\n  # b\n", "names no host"),
        ("folder", "Is a directory"),
        (b"\xff\xfen\x00", "use plain ASCII"),
    ],
)
def test_a_file_without_hosts_is_refused(tmp_path, content, message):
    path = tmp_path / "hostfile"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as refused:
        read(path)
    assert str(path) in str(refused.value)
