"""How the processes of a job meet: with one command and config, at one place, in the time that is said."""

import contextlib
import os
import socket
import time

import pytest

from tests.distributed.grids import command_line, ends_of, on_processes
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


def late(held: bool) -> tuple[float, str]:
    """Rank 1 comes to a place where no rank 0 is; rank 0 to one that another program holds."""
    from lomdm_dist.errors import RunFailed
    from lomdm_dist.parallel.grid import join

    first, began = os.environ["RANK"] == "0", time.monotonic()
    port = int(os.environ["MASTER_PORT"])
    try:
        with socket.create_server(("", port)) if first and held else contextlib.nullcontext():
            if first == held:
                join({}, 6.0)
    except RunFailed as error:
        return time.monotonic() - began, str(error)
    return 0.0, ""


def test_who_waits_in_vain_ends_when_it_is_said():
    _, (seconds, said) = on_processes(2, late, False)
    assert "did not find each other" in said and "within 6 s" in said
    assert 6 <= seconds < 14  # torch's own way takes 15 and more


def test_a_port_in_use_is_called_that():
    (_, said), _ = on_processes(2, late, True)
    assert "is in use: end what holds it" in said


def join_alike(values: list[dict]) -> str:
    from lomdm_dist.errors import RunFailed, UserError
    from lomdm_dist.parallel.grid import join

    if int(os.environ["RANK"]) >= len(values):
        return ""
    try:
        join(values[int(os.environ["RANK"])], 3.0)
    except (RunFailed, UserError) as error:
        return str(error)
    time.sleep(1 if os.environ["RANK"] == "0" else 0)  # with it ends the store
    return "joined"


def test_all_are_told_who_differs_or_is_missing():
    assert on_processes(3, join_alike, [{"a": 1, "b": None}] * 3) == ["joined"] * 3
    said = on_processes(3, join_alike, [{"a": 1, "b": None}, {"a": 1, "b": None}, {"a": 1, "b": "x"}])
    assert {text.split(":")[0] for text in said} == {"rank 2 differs from rank 0 in b (x, there None)"}
    said = on_processes(3, join_alike, [{}, {}])
    assert "within 3 s (" in said[0] and "2/3 clients joined" in said[0]


def evaluate_as_rank_1_says(run: str, data: str, others: list[str]) -> None:
    others = others if os.environ["RANK"] == "1" else []
    command_line(["eval", "ppl", "--checkpoint", run, "--data", data, "--limit", "4", *others])


def test_an_evaluation_has_one_command_on_all_ranks(trained_run, tmp_path):
    run, data = map(str, (trained_run.run, trained_run.data / "valid"))
    ends = ends_of(2, tmp_path, evaluate_as_rank_1_says, run, data, ["--draws", "2"])
    assert all(
        status == 2 and "rank 1 differs from rank 0 in --draws (2, there " in text for status, text in ends
    )
