"""The model of time against published speeds and against sums by hand; scaling curves and their command."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest

from benchmarks import published
from lomdm_dist.cli import main
from lomdm_dist.config import Config, load_config
from lomdm_dist.errors import UserError
from lomdm_dist.machine import GPUS, read_hardware
from lomdm_dist.study import roofline
from lomdm_dist.study.memory import Parameters
from lomdm_dist.study.plan import CHOSEN, candidates
from lomdm_dist.study.scale import STRONG, WEAK, counts, from_bench, rows, scale, without_plan
from lomdm_dist.study.traffic import Collective
from tests.model.test_model import CONFIGS

H100 = GPUS["h100-80gb"]
ONE_STAGE = ("parallel.zero_stage",)  # the config's, which is 1: fewer plans to go through


def config(name: str = "owt", *overrides: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def test_published_speeds_are_predicted():
    """From one row a source; rows held out were not looked at before the constants stood."""
    errors = {row: abs(error) for row, error in published.errors().items() if not row.beyond}
    held = {row: error for row, error in errors.items() if not row.missed}
    gpus = [row.facts["gpus"] for row in held]
    assert len(held) >= 8 and len({row.source for row in held}) >= 3 and min(gpus) == 8 and max(gpus) > 1000
    wrong = {
        f"{row.source} {row.number}": error
        for row, error in held.items()
        if error > (0.10 if row.one_node else 0.15)
    }
    assert not wrong
    assert statistics.median(errors.values()) < 0.06
    unseen = [error for row, error in errors.items() if row.use == "held out"]
    assert len(unseen) >= 20 and statistics.median(unseen) < 0.06
    missed = [(row.source, row.number) for row in errors if row.missed]
    assert missed == [("llm-foundry", 21)] and all(errors[row] > 0.10 for row in errors if row.missed)


def test_no_factor_of_a_source_is_far_from_one():
    """A source's factor stands for its software, not for a model of time that is wrong by its form."""
    factors = [published.factor(row) for row in published.rows() if row.use == "calibration"]
    assert all(0.5 < factor < 1.5 for factor in factors)


def taken(*collective, **parallel) -> dict[str, float]:
    changed = config("1b").parallel.model_copy(update=parallel)
    return roofline._taken(Collective(*collective), changed, H100)


def test_a_collective_takes_the_slowest_part_of_its_way():
    link, network = 450e9 * roofline.LINK, 50e9 * roofline.NETWORK
    inside = taken("all_gather", "data", "weights", 10, 8e9, 8)
    assert inside == pytest.approx(
        {"NVLink": 7e9 / link, "latency": 10 * (roofline.LATENCY + 7 * roofline.HOP)}
    )
    # to 8 adapters a node the links are the slower part; not to one, where a group has one rank a node
    across = taken("all_reduce", "data", "gradients", 1, 16e9, 16)
    assert across == pytest.approx({"NVLink": 30e9 / link, "latency": roofline.LATENCY + 8 * roofline.HOP})
    alone = taken("all_reduce", "data", "gradients", 1, 16e9, 16, tensor_parallel=8)
    assert alone["network"] == pytest.approx(30e9 / network)
    copies = taken("all_reduce", "copies", "gradients", 1, 16e9, 16, shard_group=4)
    assert copies["network"] == pytest.approx(30e9 / (2 * network))
    assert taken("all_reduce", "data", "gradients", 1, 16e9, 1) == {}


def test_seconds_add_up_and_factors_scale_their_own_part():
    big = config("1b", "parallel.zero_stage=3", "parallel.tensor_parallel=2")
    parameters = Parameters(big)
    seconds = roofline.step_seconds(big, parameters, H100, 32)
    assert sum(seconds.by.values()) == pytest.approx(seconds.step) and seconds.by["NVLink"] > 0
    slower = roofline.step_seconds(big, parameters, H100, 32, compute_scale=1.5, data=1e-3)
    assert slower.compute == pytest.approx(1.5 * seconds.compute)
    assert slower.update == seconds.update and slower.data == pytest.approx(512 / 32 * 1e-3)
    twice = dataclasses.replace(H100, peak_flops=2 * H100.peak_flops)
    assert roofline.step_seconds(big, parameters, twice, 32).by["compute"] == seconds.by["compute"] / 2
    transfers = [Collective("all_gather", "data", "weights", 1, 1e12, 32)]
    long = roofline.step_seconds(big, parameters, H100, 32, collectives=transfers)
    whole = sum(roofline._taken(transfers[0], big.parallel, H100).values())
    assert long.communication == pytest.approx(whole - long.compute)  # longer than what could hide it


def test_counts():
    assert counts("1..64") == [1, 2, 4, 8, 16, 32, 64] and counts("24,8") == [8, 24]
    assert counts("24..100") == [24, 32, 64, 100] and counts("3") == [3]
    for wrong in ("", "8..4", "0..8", "8,x", "1..10000000"):
        with pytest.raises(UserError, match="--gpus"):
            counts(wrong)


@pytest.fixture(scope="module")
def points():
    """`owt` has 256 sequences a step; 512 GPUs take tensor parallelism, 24 get none of it."""
    return scale(config(), [8, 24, 64, 512], H100, fixed=ONE_STAGE)


def test_each_number_of_gpus_has_a_plan_or_a_reason(points):
    strong, weak = points[STRONG], points[WEAK]
    assert [bool(point.plan) for point in strong] == [True, False, True, True]
    assert "global_batch 256 does not divide over 24" in strong[1].reason
    assert [point.batch for point in weak] == [256, 768, 2048, 16384] and all(point.plan for point in weak)
    assert strong[3].limit == "the batch" and strong[0].limit == "compute"
    speeds = [point.plan.as_dict()["tokens_per_second"] for point in weak]
    assert speeds == sorted(speeds)


def test_rows_have_days_and_cost(points):
    first, refused, *_ = rows(points[STRONG], tokens=1e12, price=2.0)
    speed = first["tokens_per_second"]
    assert first["days"] == pytest.approx(1e12 / speed / 86400) and first["efficiency"] == 1
    assert first["cost"] == pytest.approx(2.0 * 8 * 24 * first["days"])
    assert refused["reason"] and "days" not in refused


def test_too_little_memory_is_a_limit_and_then_a_reason():
    tight, tiny = (dataclasses.replace(H100, memory_gib=gib) for gib in (6.0, 3.0))
    assert scale(config(), [16], tight, fixed=ONE_STAGE)[STRONG][0].limit == "memory"
    with pytest.raises(UserError, match="no plan for any number of GPUs; for 2: nothing fits 2"):
        scale(config(), [1, 2], tiny, fixed=ONE_STAGE)


def test_what_does_not_fit_is_said_once():
    tight = [{"gpus": n, "reason": f"nothing fits {n} x mine: needs {8 / n:g} GiB"} for n in (1, 2)]
    weak = [*tight, {"gpus": 3, "reason": "8 / 4 sequences"}, {"gpus": 4, "reason": None}]
    assert without_plan({STRONG: [*tight, weak[3]], WEAK: weak}) == [
        "strong and weak, 1 and 2 GPUs: nothing fits 2 x mine: needs 4 GiB",
        "weak, 3 GPUs: 8 / 4 sequences",
    ]


def test_hardware_of_the_user(tmp_path: Path):
    file, row = tmp_path / "mine.yaml", "memory_gib: 90, peak_flops: 1.0e+15, bandwidth: 4.0e+12"
    file.write_text(f"mine: {{{row}, link: 1.0e+11, network: 5.0e+10, a_node: 4}}\n")
    mine = read_hardware(file)["mine"]
    assert (mine.name, mine.memory_gib, mine.a_node) == ("mine", 90.0, 4)
    for wrong in (f"mine: {{{row}}}", "mine: 3", "[", f"mine: {{{row}, link: 0, network: 1}}"):
        file.write_text(wrong)
        with pytest.raises(UserError, match=str(file)):
            read_hardware(file)


def bench(path: Path, **changes) -> Path:
    """A result of `lomdm bench throughput` on 8 H100: 1.25 times the predicted seconds of computation."""
    measured = config("1b")
    predicted = candidates(measured, 8, H100, fixed=CHOSEN)[0]
    seconds = predicted.seconds
    row = {
        "name": "1b on 8",
        "overrides": ["train.micro_batch=4"],
        "ranks": 8,
        "device": "NVIDIA H100 80GB HBM3",
        "step_seconds": seconds.step + 0.25 * seconds.compute,
        "phases": {"data": 0.064},
        "peak_memory_bytes": sum(predicted.memory.values()),
        "tokens_per_second_per_gpu": 1000.0,
        "error": None,
    }
    broken = {"name": "out of memory", "error": "CUDA out of memory"}
    path.write_text(json.dumps({"rows": [broken, row | changes], "config": measured.as_dict()}))
    return path


def test_a_bench_result_gives_its_factors_back(tmp_path: Path):
    found, said = from_bench(bench(tmp_path / "bench.json"))
    assert dataclasses.astuple(found) == pytest.approx((1.25, 1.0, 0.001), rel=1e-6)
    assert "1b on 8 of bench.json, 8 x NVIDIA H100 80GB HBM3: computation takes 1.25" in said
    for wrong in ({"device": "cpu"}, {"error": "no"}, {"step_seconds": None}):
        with pytest.raises(UserError, match="--calibrate"):
            from_bench(bench(tmp_path / "bench.json", **wrong))


def test_command(tmp_path: Path, capsys):
    file, plot, measured = tmp_path / "out.json", tmp_path / "out.png", bench(tmp_path / "bench.json")
    arguments = ["plan", "scale", "--config", str(CONFIGS / "owt.yaml"), "--gpus", "8,24,512", "--price", "2"]
    more = ["--json", str(file), "--plot", str(plot), "--calibrate", str(measured), "train.recompute=none"]
    main([*arguments, *more, "parallel.zero_stage=1", "train.two_samples=split"])
    printed, result = capsys.readouterr().out, json.loads(file.read_text())
    assert "predicted, not measured; calibrated by 1b on 8" in printed and "left out: " in printed
    assert "strong, 24 GPUs: train.global_batch 256 does not divide over 24" in printed
    assert (
        "cost, in units of --price" in printed and "weak scaling (32 sequences a GPU, the config's" in printed
    )
    assert [row["gpus"] for row in result["strong"]] == [8, 24, 512] and result["weak"][1]["days"] > 0
    assert result["strong"][0]["choice"]["train.recompute"] == "none" and plot.stat().st_size > 10_000
    assert {"command", "versions", "machine", "config", "convention"} <= result.keys()
    for wrong in (["--gpus", "x"], ["--price", "-1"], ["--plot", "out.txt"], ["--gpu", "h1"]):
        with pytest.raises(SystemExit) as exit:
            main([*arguments, *wrong])
        assert exit.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
