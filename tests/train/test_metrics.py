"""metrics.jsonl holds each step once, whatever could not be written when."""

import json

import pytest

from lomdm_dist.config import load_config
from lomdm_dist.train.metrics import Reporter


class FullDisk:
    """A file that takes some bytes, then none until it is emptied."""

    def __init__(self, file):
        self.file, self.room = file, 0

    def write(self, content: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = self.file.write(content[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.fixture
def reporter(tmp_path):
    config = load_config("configs/demo.yaml", [f"train.run={tmp_path / 'run'}"])
    return Reporter(config, 0, active=True)


def steps(reporter) -> list[int]:
    return [json.loads(line)["step"] for line in reporter.path.read_text().splitlines()]


def test_lines_wait_and_are_forgotten_with_their_steps(reporter, capsys):
    reporter.report({"step": 1})
    reporter._file = disk = FullDisk(reporter._file)
    for step in (2, 3, 4):
        reporter.report({"step": step})
    assert steps(reporter) == [1] and capsys.readouterr().out.count("lines wait in memory") == 1
    reporter.go_back(2)
    disk.room = 5  # a line is cut, and goes on where it was
    reporter.report({"step": 3})
    disk.room = 10_000
    reporter.report({"step": 4})
    assert steps(reporter) == [1, 2, 3, 4]
    reporter.go_back(1)
    reporter.report({"step": 2})
    assert steps(reporter) == [1, 2]
    disk.room = 0
    reporter.report({"step": 3})
    reporter.close()
    assert "its last lines are lost" in capsys.readouterr().out
