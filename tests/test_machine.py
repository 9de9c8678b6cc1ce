"""What a result says of where it was made."""

import subprocess

import pytest

from lomdm_dist import machine
from tests.tiny import REPOSITORY


@pytest.fixture
def commit(monkeypatch):
    """The function without its memory."""
    return machine.commit.__wrapped__


def test_a_result_names_the_commit_of_the_checkout(commit):
    head = subprocess.run(["git", "-C", REPOSITORY, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        pytest.skip("no git checkout")
    assert commit().rstrip("+") == head.stdout.strip() == machine.versions()["commit"].rstrip("+")


def test_an_environment_inside_another_project_has_no_commit(commit, tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "venv/lib/lomdm_dist/machine.py"))
    (tmp_path / "venv/lib/lomdm_dist").mkdir(parents=True)
    assert commit() == ""
