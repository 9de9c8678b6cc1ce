"""How the processes of a job meet: with one command and config, at one place, in the time that is said."""

import os
import socket
import time

import pytest

from tests.distributed.grids import command_line, ends_of, on_processes, train
from tests.distributed.runs import curve


def train_as_rank_1_says(overrides: list[str], others: list[str], environment: dict) -> None:
    """Rank 1 was started by another command, or at another place."""
    if os.environ["RANK"] == "1":
        overrides = [*overrides, *others]
        os.environ |= environment
    command_line(["train", "--config", "configs/demo.yaml", *overrides])


def ends_with(base, run, others, environment=None, seconds=60):
    options = [*base, "train.steps=6", "train.global_batch=8", "train.micro_batch=2", f"train.run={run}"]
    return ends_of(2, run.parent, train_as_rank_1_says, options, others, environment or {}, seconds=seconds)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            ["optim.learning_rate=0.05", "objective.c1=0.9"],
            "objective.c1 (0.9, there 0.7), optim.learning_rate (0.05",
        ),
        (["train.seed=3"], "train.seed (3, there 0)"),
        (["train.global_batch=16"], "train.global_batch (16, there 8)"),
        (["parallel.tensor_parallel=2"], "parallel.tensor_parallel (2, there 1)"),
        (["parallel.zero_stage=2"], "parallel.zero_stage (2, there 1)"),
        (["model.width=48"], "model.width (48, there 32)"),
        (["train.steps=3"], "train.steps (3, there 6)"),
        (["--stop-after", "2"], "--stop-after (2, there None)"),
    ],
)
def test_ranks_with_another_command_or_config_are_refused_on_all(others, said, base, tmp_path):
    """They would train on with other gradients, or wait for each other for ever."""
    ends = ends_with(base, tmp_path / "run", others)
    for status, text in ends:
        assert status == 2 and "error: " in text and f"rank 1 differs from rank 0 in {said}" in text, ends
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_data_may_lie_elsewhere(base, tiny_data, tmp_path):
    (tmp_path / "elsewhere").symlink_to(tiny_data / "train")
    ends = ends_with(base, tmp_path / "run", [f"data.train={tmp_path / 'elsewhere'}"])
    assert [status for status, _ in ends] == [0, 0], ends
    assert max(curve(tmp_path / "run")) == 6


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR=nothing"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT=abc"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({"RANK": "2"}, "WORLD_SIZE=2 and RANK=2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 and RANK=0"),
    ],
)
def test_half_an_environment_is_said(environment, said, base, tmp_path):
    words = ["train", "--config", "configs/demo.yaml", *base, f"train.run={tmp_path / 'run'}"]
    ((status, text),) = ends_of(1, tmp_path, command_line, words, {"WORLD_SIZE": "2"} | environment)
    assert status == 2 and said in text and "Traceback" not in text, text


def late(overrides: list[str], held: bool) -> tuple[float, str]:
    """Rank 1 comes to a place where no rank 0 is, rank 0 to one that another program holds."""
    from lomdm_dist.errors import RunFailed

    first, began = os.environ["RANK"] == "0", time.monotonic()
    try:
        if first and not held:
            return 0.0, ""
        if first:
            port = int(os.environ["MASTER_PORT"])
            with socket.create_server(("", port)):
                train(overrides)
        elif not held:
            train(overrides)
    except RunFailed as error:
        return time.monotonic() - began, str(error)
    return 0.0, ""


def test_who_waits_in_vain_ends_when_it_is_said(base, tmp_path):
    options = [
        *base,
        "faults.join_seconds=4",
        "train.global_batch=8",
        "train.micro_batch=2",
        f"train.run={tmp_path / 'a'}",
    ]
    _, (seconds, said) = on_processes(2, late, options, False)
    assert "did not find each other" in said and "within 4 s" in said
    assert seconds < 20  # torch's own way took three times join_seconds, and more on a slow machine


def test_a_port_in_use_is_called_that(base, tmp_path):
    options = [*base, "train.global_batch=8", "train.micro_batch=2", f"train.run={tmp_path / 'a'}"]
    (_, said), _ = on_processes(2, late, options, True)
    assert "is in use: end what holds it" in said
