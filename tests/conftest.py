"""Fixtures that several test folders share."""

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests reach no network
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lomdm-tests-")  # and leave the user's cache alone

from tests.tiny import prepare_tiny, tiny_config, train_tiny


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
