"""A dry run: what it holds against the plan, its command, and the mistakes that it refuses."""

import json

import pytest

from lomdm_dist.cli import main
from lomdm_dist.config import load_config
from lomdm_dist.study.dry_run import dry_run
from lomdm_dist.study.memory import LEFT_OUT
from tests.distributed.runs import ROOT
from tests.study.test_traffic import ENGINES, config_of

SMALL = ["model.width=64", "model.heads=8", "model.blocks=2", "model.length=32", "train.micro_batch=1"]


def command(*more: str) -> None:
    main(["train", "--config", str(ROOT / "configs/demo.yaml"), *SMALL, "--dry-run", *more])


def test_the_command(tmp_path, capsys):
    out = tmp_path / "dry.json"
    run = f"train.run={tmp_path / 'run'}"
    given = ["train.global_batch=8", "parallel.tensor_parallel=2", "model.vocab_size=511", run]
    command(*given, "--world-size", "16", "--rank", "15", "--json", str(out))
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert "dry run of rank 15 of 16 (data-parallel 7, tensor-parallel 1)" in printed
    assert all(left_out in printed for left_out in LEFT_OUT)
    assert result["shapes"]["backbone.embedding.weight"]["tensor_rank"] == [256, 64]  # padded
    memory, planned = result["memory_bytes"], result["planned_memory_bytes"]
    assert sum(size for part, size in memory.items() if part != "total") == memory["total"]
    assert memory["parameters"] == pytest.approx(planned["parameters"], rel=0.01)
    assert memory["total"] <= planned["total"]
    assert not (tmp_path / "run").exists()


def test_the_last_of_many_ranks_has_no_parameter(capsys):
    command("train.global_batch=1024", "--world-size", "1024", "--rank", "1023")
    assert ", 0 masters here" in capsys.readouterr().out


def test_no_step_is_left_out_as_no_number():
    """At this size the logits are left out and the sums of their powers are not: 0 / 0 reached gradients."""
    result = dry_run(load_config(ROOT / "configs/demo.yaml"), 2, 0)
    (weights,) = (row for row in result["collectives"] if row["part"] == "weights")
    assert weights["bytes"] == pytest.approx(weights["planned_bytes"], rel=1e-3)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--world-size", "8", "--rank", "8"], "--rank 8: of --world-size 8 there are ranks 0 to 7"),
        (["--world-size", "0"], "--world-size 0: give 1 or more"),
        (["--world-size", "7", "train.global_batch=16"], "does not divide over 7 data-parallel ranks"),
        (["--world-size", "8", "parallel.tensor_parallel=3"], "heads 8 do not divide"),
        (["--world-size", "9", "parallel.tensor_parallel=2"], "9 processes do not form groups"),
        (["--world-size", "8", "train.recompute=auto"], "train.recompute is auto"),
        (["--resume", "auto"], "leave out --resume"),
        (["parallel.offload=true"], "does not know parallel.offload=true"),
        (["kernels.loss=plain"], "does not know kernels.loss=plain"),
    ],
)
def test_mistakes_are_one_line(more, said, capsys):
    with pytest.raises(SystemExit) as status:
        command(*more)
    assert status.value.code == 2 and said in capsys.readouterr().err


def test_a_launched_process_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        command("--world-size", "8")
    assert "a launcher started this one (WORLD_SIZE=2)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("train", [{}, {"two_samples": "joint"}, {"recompute": "block"}], ids=str)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_no_plan_is_exceeded(engine, train, tensor_parallel):
    """Counted is at most what is planned. The plan lets every position be masked: half of them usually is."""
    config = config_of(8, ENGINES[engine] | {"tensor_parallel": tensor_parallel}, **train)
    larger = {"width": 512, "blocks": 6, "length": 256, "vocab_size": 4001, "dropout": 0.0}
    config = config.model_copy(update={"model": config.model.model_copy(update=larger)})
    result = dry_run(config, 8, 0)
    counted, planned = (result[key]["total"] for key in ("memory_bytes", "planned_memory_bytes"))
    print(f"{engine} {train}: counted / planned {counted / planned:.3f}")
    assert 0.6 * planned <= counted <= planned
