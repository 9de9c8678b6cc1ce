"""Fixtures that several test folders share."""

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests reach no network
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lomdm-tests-")  # and leave the user's cache alone

from tests.distributed.hosts import NO_HOSTS
from tests.sample.browser import NO_BROWSER
from tests.tiny import prepare_tiny, tiny_config, train_tiny


def pytest_terminal_summary(terminalreporter):
    """What did not run for want of hosts or of a browser must not be one s among many.

    Here and not beside those tests: pytest-xdist's first process reads no other conftest.
    """
    reasons = {str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])}
    for reason in sorted(reasons):
        if NO_HOSTS in reason or NO_BROWSER in reason:
            terminalreporter.write_line(reason, red=True, bold=True)


class TrainedRun(NamedTuple):
    """A run's folder with one checkpoint, of 8 steps, and the folder of its token shards."""

    run: Path
    data: Path


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """Packed token shards: 16 tokens a sequence, BPE of 300 ids."""
    return prepare_tiny(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture(scope="session")
def trained_run(tiny_data) -> TrainedRun:
    """A tiny LoMDM whose every part has moved away from its start."""
    return TrainedRun(train_tiny(tiny_config(tiny_data, tiny_data.with_name("lomdm"))), tiny_data)


@pytest.fixture(scope="session")
def trained_mdlm_run(tiny_data) -> TrainedRun:
    return TrainedRun(train_tiny(tiny_config(tiny_data, tiny_data.with_name("mdlm"), "mdlm")), tiny_data)


@pytest.fixture(autouse=True)
def started_plainly(monkeypatch):
    """A command that joins alone leaves a launcher's variables behind; the next test is as a process anew."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
