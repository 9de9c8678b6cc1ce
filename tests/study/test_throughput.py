"""`lomdm bench throughput` and `bench compare`: what their rows are, not how fast anything is."""

import json
import math
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import yaml

from lomdm_dist.cli import main
from lomdm_dist.commands.bench_throughput import _data_at_hand
from lomdm_dist.config import load_config, make_config
from lomdm_dist.model.flops import step_flops
from lomdm_dist.ops.phase import PHASES, listening, phase
from lomdm_dist.study.throughput import PhaseClock
from lomdm_dist.study.throughput_points import _why, make_points
from tests.distributed.runs import ROOT
from tests.tiny import LENGTH, tiny_config

DEMO = str(ROOT / "configs/demo.yaml")


def test_the_clock_counts_no_second_twice():
    seconds = iter(range(100))
    clock = PhaseClock(torch.device("cpu"), lambda: next(seconds))
    with listening(clock):
        clock.start()  # 0
        with phase("z1"):  # 1
            with phase("loss"), phase("loss"):  # 2, and no change
                pass
            with pytest.raises(ValueError), phase("heads"):  # 3, 4
                raise ValueError
        with phase("z1"):  # 5, 6
            pass
        clock(None)  # 7, 8
    assert clock.seconds == {"other": 3, "z1": 4, "loss": 1, "heads": 1} and clock.seconds.total() == 9


def test_points(capsys):
    grids = ["parallel.zero_stage=2", "parallel.tensor_parallel=2 model.heads=4"]
    weak = make_points(DEMO, ["model.dropout=0.1"], grids, [4, 8, 12], [1, 2], "weak")
    assert [point.name for point in weak[:4]] == [
        "parallel.zero_stage=2, micro-batch 4, 1 rank",
        "parallel.zero_stage=2, micro-batch 4, 2 ranks",
        "parallel.zero_stage=2, micro-batch 8, 1 rank",
        "parallel.zero_stage=2, micro-batch 8, 2 ranks",
    ]
    assert [load_config(DEMO, point.overrides).train.global_batch for point in weak[:2]] == [16, 32]
    problems = [point.problem for point in weak]
    assert problems[:4] == [None] * 4 and "is not a multiple of micro_batch 12" in problems[4]
    assert "do not form groups of parallel.tensor_parallel 2" in problems[6] and problems[7] is None
    strong = make_points(DEMO, [], [], [], [2, 32], "strong")
    assert [load_config(DEMO, point.overrides).train.global_batch for point in strong] == [16, 16]
    assert strong[0].problem is None and "does not divide over 32" in strong[1].problem
    assert (
        "train.recompute is auto"
        in make_points(DEMO, ["train.recompute=auto"], [], [], [1], "weak")[0].problem
    )


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("W0101 x\nrank 1 on h: error: no shards\nE02 torch failed\nChildFailedError: x", "no shards"),
        (
            "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried\nx",
            "OutOfMemoryError: CUDA out of memory. Tried",
        ),
        ("  traceback : Signal 9 (SIGKILL) received by PID 7", "Signal 9 (SIGKILL) received"),
        ("what", "ended with status 1: what"),
    ],
)
def test_the_line_that_tells_why_a_point_failed(stderr, said):
    assert _why(subprocess.CompletedProcess([], 1, "", stderr)) == said


def test_rows_and_their_comparison(tmp_path, capsys):
    """One point is measured, one cannot be; random tokens, for the shards are not there."""
    values = tiny_config_of_nothing(tmp_path)
    config, out, plot = tmp_path / "tiny.yaml", tmp_path / "out.json", tmp_path / "out.png"
    config.write_text(yaml.safe_dump(values))
    bench = ["bench", "throughput", "--config", str(config), "--micro-batch", "4", "3", "--steps", "2"]
    main([*bench, "--warmup", "0", "--json", str(out), "--plot", str(plot)])
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    good, bad = result["rows"]
    assert "global_batch 8 is not a multiple of micro_batch 3" in bad["error"] and good["error"] is None
    assert good["name"] in printed and f"{bad['name']}: not measured" in printed and plot.stat().st_size > 0
    assert set(good["phases"]) == {*PHASES, "other"} - {"z"}
    assert good["phases_sum"] == pytest.approx(math.fsum(good["phases"].values()))
    assert good["data"] == "synthetic" and good["tokens"] == 8 * LENGTH and good["pairs"] == 8 * LENGTH**2
    assert 0 < good["predicted"] < 2 * good["tokens"]
    as_run = load_config(config, good["overrides"])
    counts = {name: good[name] for name in ("tokens", "pairs", "predicted")}
    assert good["flops"] == step_flops(as_run, **counts, micro_batches=2)
    assert good["tflops_per_gpu"] == pytest.approx(good["flops"] / good["step_seconds"] / 1e12)
    said = f"| {1e3 * good['tflops_per_gpu']:,.4g} | {good['share_of_matmul_rate']:.1%} |"
    assert "| GFLOP/s a rank | of matmul | peak, GiB |" in printed and said in printed
    assert good["mfu"] is None and good["share_of_matmul_rate"] > 0 and good["peak_memory_bytes"] > 0

    other = json.loads(out.read_text())
    other["rows"][0] |= {"step_seconds": 2 * good["step_seconds"], "spread": 0.0}
    other["versions"]["torch"], good["spread"] = "another", 0.0
    other["rows"][0]["phases"]["z1"] += 0.5
    (tmp_path / "a.json").write_text(json.dumps(result))
    (tmp_path / "b.json").write_text(json.dumps(other))
    main(
        [
            "bench",
            "compare",
            str(tmp_path / "a.json"),
            str(tmp_path / "b.json"),
            "--json",
            str(tmp_path / "c.json"),
        ]
    )
    compared = json.loads((tmp_path / "c.json").read_text())
    row = compared["rows"][0]
    assert row["ratio"] == 2 and row["beyond_spreads"] and row["memory_ratio"] == 1
    assert row["phases"]["z1"] == pytest.approx(0.5) and "z1 +500.0" in capsys.readouterr().out
    assert compared["differs"] == {"versions.torch": [result["versions"]["torch"], "another"]}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_killed_bench(tmp_path, number):
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny_config_of_nothing(tmp_path)))
    words = ["bench", "throughput", "--config", str(config), "train.micro_batch=4", "--ranks", "2"]
    words = [sys.executable, "-m", "lomdm_dist.cli", *words, "--steps", "100000"]
    bench = psutil.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.time() + 300
    while len(children := bench.children(recursive=True)) < 3 and time.time() < until:
        time.sleep(0.1)
    assert len(children) >= 3  # the launcher and two ranks
    bench.send_signal(number)
    bench.wait()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive


def tiny_config_of_nothing(folder) -> dict:
    """A config of shards that are not there."""
    return {
        "model": {"vocab_size": 300, "mask_id": 1, "length": LENGTH, "width": 32, "blocks": 2, "heads": 2},
        "data": {"train": str(folder / "none"), "valid": str(folder / "none")},
        "train": {
            "run": str(folder / "run"),
            "steps": 8,
            "global_batch": 8,
            "micro_batch": 8,
            "precision": "fp32",
        },
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps 0: give 1 to 100,000"),
        (["--warmup", "-1"], "--warmup -1: give 0 or more"),
        (["--ranks", "0"], "count from 1, not 0"),
        (["--plot", "x.foo"], "--plot x.foo: the name must end in"),
        (["train.stepz=3"], "unknown key"),
    ],
)
def test_mistakes_are_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as status:
        main(["bench", "throughput", "--config", DEMO, *arguments])
    assert status.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        {"name": None},
        {"seconds": None},
        {"seconds": 0.0},
        {"seconds": math.nan},
        {"spread": "0.1"},
        {"peak_activation_bytes": None},
        {"phases": {"z1": None}},
        {"phases": [1]},
    ],
)
def test_a_damaged_result_is_named(tmp_path, capsys, damage):
    row = {"name": "lomdm", "seconds": 1.0, "spread": 0.0, "peak_activation_bytes": 1}
    for name, rows in {"good": [row], "bad": [row | damage]}.items():
        (tmp_path / name).write_text(json.dumps({"rows": rows}))
    with pytest.raises(SystemExit) as status:
        main(["bench", "compare", f"{tmp_path}/good", f"{tmp_path}/bad"])
    assert status.value.code == 2 and f"{tmp_path}/bad is no result of" in capsys.readouterr().err


def test_what_cannot_be_compared(tmp_path, capsys):
    other = {"name": "lomdm", "seconds": 1.0, "spread": 0.0, "peak_activation_bytes": 1}
    files = {"a": {"rows": [other]}, "b": {"rows": [other | {"name": "mdlm"}]}, "c": {"rows": 3}}
    for name, result in files.items():
        (tmp_path / name).write_text(json.dumps(result))
    for pair, said in {"ab": "no row is in both", "ac": "is no result of", "ad": "cannot read"}.items():
        with pytest.raises(SystemExit) as status:
            main(["bench", "compare", *(str(tmp_path / name) for name in pair)])
        assert status.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "data"),
    [({}, "config"), ({"length": 2 * LENGTH}, "synthetic"), ({"vocab_size": 999}, "synthetic")],
)
def test_shards_that_are_not_the_models_are_not_measured(tiny_data, tmp_path, capsys, change, data):
    values = tiny_config(tiny_data, tmp_path / "run")
    config = make_config(values | {"model": values["model"] | change}, [], "tiny")
    assert _data_at_hand(config) == data
    assert ("synthetic tokens are taken: " in capsys.readouterr().out) == (data == "synthetic")


GRIDS = ["parallel.zero_stage=1", "parallel.zero_stage=2", "parallel.zero_stage=3"]
GRIDS += ["parallel.engine=fsdp2 parallel.zero_stage=3", "parallel.tensor_parallel=2"]


@pytest.mark.slow
def test_the_same_steps_on_any_grid(tiny_data, tmp_path):
    """Real shards: every grid of two processes does the same work, and has the same parts."""
    config, out = tmp_path / "tiny.yaml", tmp_path / "out.json"
    config.write_text(yaml.safe_dump(tiny_config(tiny_data, tmp_path / "run")))
    bench = [
        "bench",
        "throughput",
        "--config",
        str(config),
        "--steps",
        "1",
        "--warmup",
        "0",
        "--micro-batch",
        "4",
    ]
    main([*bench, "--ranks", "2", "--scaling", "strong", "--json", str(out), "--grid", *GRIDS])
    rows = json.loads(out.read_text())["rows"]
    assert [row["error"] for row in rows] == [None] * len(GRIDS)
    for row in rows:
        assert row["data"] == "config" and row["ranks"] == 2 and row["tokens"] == 8 * LENGTH
        assert row["predicted"] == pytest.approx(rows[0]["predicted"], abs=2)
        assert row["phases"]["reduction"] > 0 and row["phases"].keys() == rows[0]["phases"].keys()
