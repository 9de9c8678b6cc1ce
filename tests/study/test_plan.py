"""The planner: what it chooses fits, adds up, and agrees with what is counted and published."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.memory import TEXTBOOK, config_of
from lomdm_dist.cli import main
from lomdm_dist.config import Config, load_config
from lomdm_dist.errors import UserError
from lomdm_dist.machine import GPUS, Device, known_gpu
from lomdm_dist.study.memory import Parameters, memory
from lomdm_dist.study.plan import CHOSEN, GIB, Plan, calibrate, device_here, plan, usable_gib
from tests.distributed.grids import on_processes
from tests.model.test_model import CONFIGS

H100 = GPUS["h100-80gb"]
SIZES, COUNTS = ("owt", "1b", "7b", "13b"), (1, 8, 64, 512)


def config(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def check(chosen: Plan, gpus: int) -> None:
    result = chosen.as_dict()
    parts = dict(result["memory_gib"])
    total, usable = parts.pop("total"), parts.pop("usable")
    assert sum(parts.values()) == pytest.approx(total) and total <= usable < chosen.device.memory_gib
    train, parallel = chosen.config.train, chosen.config.parallel
    ranks = gpus // parallel.tensor_parallel
    assert ranks * train.micro_batch * result["accumulation"] == train.global_batch
    assert len(result["reasons"]) == len(CHOSEN) + 1
    tokens = train.global_batch * chosen.config.model.length
    assert result["tokens_per_second"] == pytest.approx(tokens / result["step_seconds"])
    assert result["tokens_per_second_per_gpu"] == pytest.approx(result["tokens_per_second"] / gpus)
    assert 0 < result["mfu"] < 0.7


@pytest.mark.parametrize("name", SIZES)
def test_each_size_has_a_plan_or_a_refusal_and_more_gpus_are_no_slower(name):
    speeds = []
    for gpus in COUNTS:
        try:
            chosen = plan(config(name), gpus, H100)
        except UserError as error:
            assert gpus == 1 and name in ("7b", "13b"), error
            assert "nothing fits 1 x h100-80gb" in str(error) and "optimiser" in str(error)
            continue
        check(chosen, gpus)
        speeds.append(chosen.as_dict()["tokens_per_second"])
    assert len(speeds) >= 3 and speeds == sorted(speeds)


@pytest.mark.parametrize(("name", "gpus"), [("owt", 1), ("1b", 8), ("7b", 64)])
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_less_memory_never_gets_a_larger_micro_batch(name, gpus, engine):
    """All else equal: with less memory another stage or recomputation may leave room for more."""
    fixed = ("parallel.zero_stage", "parallel.tensor_parallel", "train.recompute", "train.two_samples")
    overrides = [f"parallel.engine={engine}", "parallel.zero_stage=3"]
    overrides += ["train.recompute=block", "train.two_samples=joint"]
    sizes = []
    for gib in (200.0, 141.0, 79.1, 60.0, 39.4):
        device = dataclasses.replace(H100, memory_gib=gib)
        chosen = plan(config(name, *overrides), gpus, device, fixed=fixed)
        assert chosen.total_gib <= usable_gib(chosen.device)
        sizes.append(chosen.config.train.micro_batch)
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("key", TEXTBOOK, ids=str)
def test_states_are_the_bytes_a_parameter_that_are_counted(key):
    """benchmarks/memory.py counts the same on real ranks, and its test holds it to the textbook."""
    engine, stage, precision = key
    small = config_of(engine, stage, precision, ranks=4)
    parameters = Parameters(small)
    parts = memory(small, parameters, H100, data_parallel=4)
    states = [parts[name] / parameters.of_rank(1) for name in ("parameters", "gradients", "optimiser")]
    assert states == pytest.approx(TEXTBOOK[key](4), rel=1e-6)


def parameters_of_a_split_model(sequence_parallel: bool) -> tuple[int, int]:
    """Of this tensor-parallel rank: real ones, and the planner's."""
    from lomdm_dist.parallel.engine import Blueprint
    from lomdm_dist.parallel.grid import process_grid

    split = config("demo", "parallel.tensor_parallel=2", "model.heads=4")
    with process_grid(2) as grid:
        model = Blueprint(split, grid).model
        return sum(p.numel() for p in model.parameters()), Parameters(split).of_rank(2)


def test_a_tensor_parallel_rank_has_as_many_parameters_as_the_planner_says():
    for counted, planned in on_processes(2, parameters_of_a_split_model, True):
        assert counted == planned


def test_fsdp2_holds_whole_gradients_between_two_split_samples():
    big = config("7b", "parallel.engine=fsdp2", "parallel.zero_stage=3", "train.two_samples=split")
    joint = big.model_copy(update={"train": big.train.model_copy(update={"two_samples": "joint"})})
    parameters = Parameters(big)
    waiting = (
        memory(big, parameters, H100, 64)["gradients"] - memory(joint, parameters, H100, 64)["gradients"]
    )
    assert waiting == 4 * parameters.of_rank(1)


def test_what_the_user_says_is_kept():
    chosen = plan(config("1b", "train.micro_batch=2"), 8, H100, fixed=("train.micro_batch",))
    assert chosen.config.train.micro_batch == 2 and "micro_batch 2: as you say" in chosen.reasons
    chosen = plan(config("objectives/mdlm", "train.two_samples=auto", "train.global_batch=64"), 8, H100)
    assert chosen.config.train.two_samples == "split"  # the one way of one sample
    with pytest.raises(UserError, match=r"256 does not divide over 64 data-parallel ranks x .* 64 = 4096"):
        plan(config("owt", "train.micro_batch=64"), 64, H100, fixed=("train.micro_batch",))


def test_a_batch_that_does_not_divide_takes_tensor_parallel_or_is_refused():
    chosen = plan(config("owt"), 512, H100)
    assert chosen.config.parallel.tensor_parallel > 1
    assert "1 leaves 512 ranks, and global_batch 256 does not divide" in " ".join(chosen.reasons)
    with pytest.raises(UserError, match=r"1024 / 24 = 42.7; train.global_batch=1032 does"):
        plan(config("7b"), 24, H100)


@pytest.mark.parametrize("override", ["kernels.loss=plain", "parallel.offload=true"])
def test_what_is_not_modelled_is_refused(override):
    with pytest.raises(UserError, match=override.partition("=")[0]):
        plan(config("1b", override), 8, H100)


def test_a_probe_scales_compute_and_activations():
    first = plan(config("1b"), 8, H100)
    parts, seconds = first.memory, first.seconds
    more = sum(parts.values()) + parts["activations"] // 10
    measured = calibrate(first, seconds.step + 0.5 * seconds.compute, more)
    assert (measured.compute, measured.activations) == pytest.approx((1.5, 1.1), rel=1e-6)
    again = plan(config("1b"), 8, H100, measured)
    assert again.seconds.step > first.seconds.step
    repeated = calibrate(again, again.seconds.step, sum(again.memory.values()))
    assert (repeated.compute, repeated.activations) == pytest.approx((1.5, 1.1), rel=1e-3)


def test_without_a_known_speed_memory_decides():
    chosen = plan(config("demo"), 1, Device("cpu", 16.0))
    assert chosen.config.train.micro_batch <= 64 and chosen.config.train.recompute == "none"
    assert chosen.as_dict()["step_seconds"] is None and chosen.total_gib < 16
    assert chosen.lines()
    assert device_here(processes=2).memory_gib > 0


def test_gpus_are_known_by_their_drivers_names():
    assert known_gpu("NVIDIA H100 80GB HBM3") is H100
    assert known_gpu("NVIDIA GeForce RTX 4090") is None


def test_command(tmp_path: Path, capsys):
    file = tmp_path / "plan.json"
    main(["plan", "--config", str(CONFIGS / "1b.yaml"), "--gpus", "8", "--json", str(file)])
    printed, result = capsys.readouterr().out, json.loads(file.read_text())
    fields = {"step_seconds", "tokens_per_second", "tokens_per_second_per_gpu", "mfu", "memory_gib", "choice"}
    assert fields | {"reasons", "command", "versions", "machine", "config"} <= result.keys()
    assert result["config"]["train"]["micro_batch"] == result["choice"]["train.micro_batch"]
    assert f"train.micro_batch={result['choice']['train.micro_batch']}" in printed
    for arguments in (["--gpus", "1"], ["--gpus", "0"], ["--gpus", "8", "--gpu", "h1000"]):
        with pytest.raises(SystemExit) as exit:
            main(["plan", "--config", str(CONFIGS / "7b.yaml"), *arguments])
        assert exit.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (["train.micro_batch=auto", "train.recompute=auto"], {}),
        (["parallel={tensor_parallel: 2, zero_stage: 2}"], {"parallel.tensor_parallel": 2}),
        (["train.micro_batch=8"], {"train.micro_batch": 8}),
    ],
)
def test_what_the_command_is_told(said, kept, tmp_path, capsys):
    """`auto` is for the planner to choose, a whole section is as good as its keys."""
    main(
        ["plan", "--config", str(CONFIGS / "1b.yaml"), "--gpus", "8", *said, "--json", str(tmp_path / "out")]
    )
    choice = json.loads((tmp_path / "out").read_text())["choice"]
    assert choice == choice | kept and "auto" not in choice.values()


def test_other_overrides_belong_to_the_line_to_paste(capsys):
    more = ["parallel.engine=fsdp2", "parallel.zero_stage=3", "train.global_batch=1024"]
    main(["plan", "--config", str(CONFIGS / "1b.yaml"), "--gpus", "8", *more])
    line = capsys.readouterr().out.splitlines()[1]
    assert all(override in line.split() for override in more)


def test_a_shard_group_that_does_not_divide_is_said_so():
    with pytest.raises(UserError, match="do not form groups"):
        plan(config("1b", "parallel={engine: fsdp2, zero_stage: 3, shard_group: 3}"), 8, H100)


def test_memory_is_in_bytes():
    chosen = plan(config("1b"), 8, H100)
    assert chosen.total_gib * GIB == sum(chosen.memory.values())
