"""A sweep runs each point once, whatever happens to it; what it says is what the runs say."""

import csv
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from lomdm_dist import cli
from lomdm_dist.errors import REQUEUE, UserError
from lomdm_dist.files import hold
from lomdm_dist.study import sweep_report, sweep_run
from lomdm_dist.study.sweep import load_sweep, result_of
from lomdm_dist.study.sweep_run import DONE, FAILED, STOPPED, Local, Record
from lomdm_dist.train.checkpoint import Checkpoint
from lomdm_dist.train.inputs import run_lock
from tests.study import stub_training
from tests.tiny import REPOSITORY, tiny_config

STUB = [sys.executable, stub_training.__file__]
SWEEPS = sorted((REPOSITORY / "configs/sweeps").glob("*.yaml"))
STEPS = 30


@pytest.fixture
def base(tmp_path) -> Path:
    """A config that needs no data: none is opened before a training starts."""
    values = {
        "model": {"vocab_size": 300, "mask_id": 1, "length": 16, "width": 32, "blocks": 2, "heads": 2},
        "data": {"train": "data/train", "valid": "data/valid"},
        "train": {"run": "unused", "steps": STEPS, "global_batch": 8, "micro_batch": 8, "valid_every": 10},
    }
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def write_sweep(base: Path, axes: dict, **more) -> Path:
    path = base.with_name("sweep.yaml")
    values = {"base": str(base), "runs": str(base.with_name("runs")), "axes": axes} | more
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


NESTED = {"a": {}}
NESTED["a"]["x"] = NESTED
FOUR = {
    "point": {
        "a": {"optim.learning_rate": 0.1},
        "bad": {"data.train": "missing"},
        "b": {"optim.learning_rate": 0.2},
        "c": {"optim.learning_rate": 0.3},
    }
}
KILLED = """
import sys
from lomdm_dist import cli
from lomdm_dist.study import sweep_run
sweep_run.train_command = lambda sweep, point, _: [*{stub!r}, "--config", str(sweep.base), *point.overrides]
cli.main(["sweep", *sys.argv[1:]])
"""


def call(*words) -> int:
    """Exit status of `lomdm sweep` in this process, its trainings stubs."""
    try:
        cli.main(["sweep", *map(str, words)])
    except SystemExit as ended:
        return ended.code
    return 0


def wait_for(what, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def did(runs: Path, name: str) -> list[str]:
    path = runs / f"{name}.did"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def stubs(monkeypatch):
    command = lambda sweep, point, _: [*STUB, "--config", str(sweep.base), *point.overrides]  # noqa: E731
    monkeypatch.setattr(sweep_run, "train_command", command)
    monkeypatch.setattr(sweep_run, "LOOK_SECONDS", 0.05)


def test_a_killed_sweep_goes_on_and_runs_each_point_once(base, stubs, capsys):
    """SIGKILL in the middle, then SIGTERM, then to the end; one point fails, and is listed."""
    file, runs = write_sweep(base, FOUR), base.with_name("runs")
    command = [sys.executable, "-c", KILLED.format(stub=STUB), str(file), "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    wait_for(lambda: len(did(runs, "b")) > 5)
    killed.kill()
    killed.wait()

    def stop_when_c_runs():
        wait_for(lambda: len(did(runs, "c")) > 5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_c_runs).start()
    assert call(file, "--jobs", "2") == REQUEUE

    assert call(file, "--jobs", "2", "--json", base.with_name("out.json")) == 1
    said = capsys.readouterr()
    assert "1 of 4 points failed: bad (3 are done)" in said.err
    assert "error: no shards in missing" in said.out
    for name in "abc":
        steps = [int(line) for line in did(runs, name) if not line.startswith("from")]
        assert steps == list(range(1, STEPS + 1)), name
    assert len([line for line in did(runs, "b") if line.startswith("from")]) >= 2
    points = json.loads(base.with_name("out.json").read_text())["points"]
    assert {point["name"]: point["status"] for point in points} == dict.fromkeys("abc", DONE) | {
        "bad": FAILED
    }
    assert (runs / "plot.png").stat().st_size > 1000
    rows = list(csv.DictReader((runs / "points.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == [DONE, FAILED, DONE, DONE]
    assert float(rows[2]["loss"]) == pytest.approx(5 / STEPS + 0.2)
    assert json.loads(rows[2]["curve"])[0] == [1280, pytest.approx(0.7)]

    before = {path: path.read_text() for path in runs.glob("*.did")}
    assert call(file) == 1  # nothing is left to do
    assert {path: path.read_text() for path in runs.glob("*.did")} == before
    mended = FOUR["point"] | {"bad": {"data.train": "mended"}}
    assert call(write_sweep(base, {"point": mended})) == 0  # its config has changed: it is tried again


@pytest.mark.slow
def test_real_trainings_of_a_killed_sweep(tiny_data, tmp_path, monkeypatch):
    """The same with `lomdm train`; what is said of a point is what its run holds."""
    base, runs = tmp_path / "base.yaml", tmp_path / "runs"
    config = tiny_config(tiny_data, tmp_path / "unused")
    config["train"] |= {"steps": 400, "save_every": 50, "valid_every": 100, "log_every": 10}
    base.write_text(yaml.safe_dump(config))
    file = write_sweep(base, FOUR)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    killed = subprocess.Popen([sys.executable, "-m", "lomdm_dist.cli", "sweep", str(file), "--jobs", "2"])
    metrics = runs / "b/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, 300)
    killed.kill()
    killed.wait()
    done = {name: (runs / f"{name}.log").read_text() for name in "ab" if is_finished(runs / name)}
    assert call(file, "--jobs", "2") == 1
    for name, said in done.items():
        assert (runs / f"{name}.log").read_text() == said
    points = {point["name"]: point for point in json.loads((runs / "points.json").read_text())["points"]}
    assert {name: point["status"] for name, point in points.items()} == dict.fromkeys("abc", DONE) | {
        "bad": FAILED
    }
    assert "missing" in points["bad"]["error"][-2]
    for name in "abc":
        lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == list(range(10, 401, 10))
        result, checkpoint = points[name]["result"], Checkpoint(runs / name)
        assert result["parameters"] == sum(map(math.prod, checkpoint.shapes().values()))
        assert result["tokens"] == 400 * 8 * 16 == checkpoint.state.tokens
        assert result["curve"][-1] == [result["tokens"], result["loss"]] and len(result["curve"]) == 4
    starts = (runs / "b.log").read_text().count("from step")
    assert starts == 2 or "b" in done


def is_finished(run: Path) -> bool:
    return (run / "latest").exists() and (run / "latest").read_text().strip() == "step-400"


def test_two_sweeps_on_one_folder_are_refused(base, stubs, capsys):
    file = write_sweep(base, FOUR)
    with run_lock(base.with_name("runs")):
        assert call(file) == 2
    assert f"is in use by process {os.getpid()}" in capsys.readouterr().err


def test_a_run_of_another_config_is_refused(base, stubs, capsys):
    file = write_sweep(base, {"optim.learning_rate": [0.1]})
    assert call(file, "train.steps=2") == 0
    assert call(file, "optim.warmup_steps=7") == 2
    assert "optim.warmup_steps was 2500, is 7" in capsys.readouterr().err
    assert call(file, "train.steps=1") == 2
    assert "it has done 2 steps, train.steps is 1" in capsys.readouterr().err
    assert call(file, "train.steps=4", "train.log_every=1") == 0  # more steps, and what decides nothing
    assert did(base.with_name("runs"), "learning_rate_0.1") == ["from 0", "1", "2", "from 2", "3", "4"]


@pytest.mark.parametrize(
    ("damaged", "text", "said"),
    [
        ("points.json", "", "points.json is damaged: remove it"),
        ("points.json", "[]", "points.json is damaged"),
        ("points.json", "[" * 100_000, "points.json is damaged"),
        ("points.json", '{"points": [{"name": "clip_0.5"}]}', "points.json is damaged"),
        ("clip_0.5/metrics.jsonl", "", "metrics.jsonl holds no validation: move"),
        ("clip_0.5/metrics.jsonl", "3\nnull\n[]\n{", "metrics.jsonl holds no validation: move"),
        ("clip_0.5/metrics.jsonl", '{"tokens": 3}\n{"valid_nll_per_token": 3}', "metrics.jsonl is damaged"),
        ("clip_0.5/checkpoints/step-2/state.json", "[]", "state.json is damaged"),
    ],
)
def test_damaged_files_are_named(base, stubs, capsys, damaged, text, said):
    file = write_sweep(base, {"optim.clip": [0.5]})
    assert call(file, "train.steps=2") == 0
    (base.with_name("runs") / damaged).write_text(text)
    assert call(file, "train.steps=2") == 2
    assert said in capsys.readouterr().err


def test_a_training_that_diverged_has_failed(base, stubs, capsys):
    file = write_sweep(base, {"optim.clip": [0.5]})
    assert call(file, "train.steps=2") == 0
    with open(base.with_name("runs") / "clip_0.5/metrics.jsonl", "a") as metrics:
        print(json.dumps({"step": 2, "valid_nll_per_token": None}), file=metrics)
    assert call(file, "train.steps=2") == 1
    assert "it has diverged" in capsys.readouterr().out


def test_a_validation_that_came_back_from_infinity_is_left_out_of_the_curve(base, stubs):
    file = write_sweep(base, {"optim.clip": [0.5]})
    assert call(file, "train.steps=2") == 0
    path = base.with_name("runs") / "clip_0.5/metrics.jsonl"
    last = path.read_text().splitlines()[-1]
    with open(path, "a") as metrics:
        print(json.dumps({"step": 2, "valid_nll_per_token": None}), last, sep="\n", file=metrics)
    (point,) = load_sweep(file, ["train.steps=2"]).points
    curve = result_of(point)["curve"]
    assert len(curve) >= 2 and np.isfinite(np.array(curve, dtype=float)).all()


def test_who_holds_a_run_is_known_by_its_lock(tmp_path):
    assert not sweep_run.in_use(tmp_path)
    with hold(tmp_path / "lock"):
        assert sweep_run.in_use(tmp_path)
    assert not sweep_run.in_use(tmp_path) and not sweep_run.in_use(tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"axis": {}}, "unknown key axis; did you mean axes?"),
        ({"axes": {}}, "axes is missing: it has no points"),
        ({"axes": {"optim.clip": []}}, "axis optim.clip has no values"),
        ({"axes": {"optim.clip": [0.5, 0.5]}}, "axis optim.clip has clip_0.5 twice"),
        ({"axes": {"a": {"x": {}, "y": {}}}}, "x and y are the same training"),
        ({"axes": {"a": {"x/y": {}}}}, "'x/y' is no name for a folder"),
        ({"axes": {"a": {"x": 3}}}, "axis a: x is no section of key: value"),
        ({"axes": {"model.hight": [3]}}, "point hight_3: "),
        ({"axes": {"model.heads": [3]}}, "width 32 is not divisible by heads 3"),
        ({"seeds": [1, 1]}, "hold one twice"),
        ({"x": "size"}, "x is size, but there are optim.clip, parameters, flops"),
        ({"paper": {"label": "l", "ppl": {"clip_2": 30}}}, "paper has clip_2, which is no point"),
        ({"paper": {"label": "l", "ppl": {512: 30}}}, "paper has 512, which is no point"),
        ({"paper": {"label": "l", "ppl": {"clip_1": math.inf}}}, "a perplexity is wanted, got inf"),
        ({"paper": {"label": 3, "ppl": {}}}, "paper: label: text is wanted (in quotes), got 3"),
        ({"set": {"train.valid_every": 0}}, "train.valid_every is 0"),
        ({"set": {"optim.clip": 2}}, "set says what optim.clip is"),
        ({"set": {"optim": {"clip": 2}}}, "set says what optim.clip is"),
        ({"set": {"train.seed": 1}, "seeds": [0, 1]}, "set says what train.seed is"),
        ({"set": {"train.run": "x"}}, "the sweep's own folder says what train.run is"),
        (
            {"set": {"objective.c1": 1}, "axes": {"objective": {"ar": {"objective": {"name": "ar"}}}}},
            "set says what objective.c1 is",
        ),
        ({"axes": {"optim.clip": [0.5], "a": {"x": {"optim.clip": 1}}}}, "axis optim.clip says what"),
        ({"axes": {"a": {"x": {"optim": {"clip": 1}, "optim.clip": 2}}}}, "axis a says what optim.clip is"),
        ({"axes": {"seed": {"x": {"optim.clip": 1}}}}, "an axis cannot be called seed: write seeds:"),
        ({"axes": {"flops": {"x": {"optim.clip": 1}}}}, "an axis cannot be called flops"),
        ({"axes": {512: {"x": {}}, "512": {"y": {"optim.clip": 1}}}}, "axes has 512 twice"),
        ({"runs": None}, "runs: a path is wanted, got None"),
        ({"runs": ["a"]}, "runs: a path is wanted, got ['a']"),
        ({"runs": 3}, "runs: a path is wanted, got 3"),
        ({"runs": ""}, "runs: a path is wanted, got '', which is empty"),
        ({"runs": __file__}, "test_sweep.py is a file"),
        ({"runs": f"{__file__}/below"}, "test_sweep.py is a file"),
        ({"about": 2024}, "about: text is wanted (in quotes), got 2024"),
        ({"x": ["size"]}, "x: text is wanted, got ['size']"),
        ({"y": {"a": 1}}, "y: text is wanted, got {'a': 1}"),
        ({"seeds": []}, "seeds: a list is wanted, got [], which is empty"),
        ({"axes": NESTED}, "an anchor (&name) holds an alias (*name) of itself"),
        ({"axes": {"a": {"x": {"<<": {"optim.clip": 1}}}}}, "merges (<<) are not supported"),
        ({"axes": {"a": {"x": {}, "x.log": {"optim.clip": 0.5}}}}, "x.log would be"),
        ({"axes": {"a": {"points.json": {}}}}, "points.json would be the folder of point points.json, and a"),
        ({"axes": {"a": {"lock": {}}}}, "lock would be the folder"),
        ({"axes": {"a": {"x" * 252: {}}}}, "a name of 252 letters, the most is 251"),
        (
            {
                "axes": {
                    "a": {"x-y": {}, "x": {"optim.clip": 0.5}},
                    "b": {"z": {}, "y-z": {"optim.eps": 1e-7}},
                }
            },
            "x-y-z would be the folder",
        ),
    ],
)
def test_a_mistake_in_a_sweep_is_said_before_anything_starts(base, change, said):
    file = write_sweep(base, **({"axes": {"optim.clip": [0.5, 1.0]}} | change))
    with pytest.raises(UserError) as error:
        load_sweep(file, [])
    assert said in str(error.value)


def test_what_an_axis_sets_cannot_be_overridden(base):
    file = write_sweep(base, {"optim.clip": [0.5, 1.0]}, seeds=[0, 1])
    for override in ("optim.clip=3", "train.seed=3", "train.run=x", "optim={clip: 3}", "optim={warmup: 3}"):
        with pytest.raises(UserError, match="in sweep"):
            load_sweep(file, [override])
    with pytest.raises(UserError, match="the value is not valid YAML"):
        load_sweep(file, ["optim={clip"])


def test_numbers_that_differ_late_have_names_that_differ(base):
    rates = [0.001, 0.00100000001, 1]
    paper = {"label": "l", "ppl": {512: 3}}
    points = load_sweep(write_sweep(base, {"optim.learning_rate": rates}), []).points
    assert [point.name for point in points] == [
        "learning_rate_0.001",
        "learning_rate_0.00100000001",
        "learning_rate_1",
    ]
    axes = {"width": {512: {}, 64: {"model.width": 64}}}
    assert load_sweep(write_sweep(base, axes, paper=paper), []).paper["ppl"] == {"512": 3}


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_every_sweep_of_ours_can_be_loaded(file, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    points = load_sweep(file, []).points
    assert len({point.run for point in points}) == len(points) > 1


def test_the_printed_commands_are_those_of_what_is_not_done(base, stubs, capsys):
    file, hosts = write_sweep(base, FOUR), base.with_name("hosts")
    hosts.write_text("node0 slots=8\n")
    assert call(file, "--only", "a", "train.steps=2") == 0
    capsys.readouterr()
    assert call(file, "--print", "--hostfile", hosts, "--only", "a", "c", "train.steps=2") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"deepspeed --hostfile {hosts} train.py --config {base} optim.learning_rate=0.3 train.steps=2 "
        f"train.run={base.with_name('runs')}/c --resume auto"
    ]
    assert call(file, "--only", "bad", "train.steps=2") == 1
    capsys.readouterr()
    assert call(file, "--print", "--only", "a", "bad", "train.steps=2") == 0
    (printed,) = capsys.readouterr().out.splitlines()
    assert "data.train=missing" in printed, "what has failed is not done"


def test_each_point_has_gpus_of_its_own(base, monkeypatch):
    sweep = load_sweep(write_sweep(base, FOUR), [])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    place = Local(sweep, None, processes=2)
    assert place.jobs == 2
    assert [place.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["4,5", "6,7"]
    with pytest.raises(UserError, match="need 6 GPUs, this machine has 4"):
        Local(sweep, 3, processes=2)


@pytest.mark.parametrize(
    ("values", "places", "scale"),
    [
        ([0.1, 0.0001, "3e-4"], [0.0001, 0.0003, 0.1], "log"),
        ({4: {"optim.clip": 4}, 2: {"optim.clip": 2}}, [2, 4], "linear"),
        ({"a": {"optim.clip": 4}, "b": {"optim.clip": 2}}, [0, 1], "linear"),
    ],
)
def test_the_plot_is_to_scale_and_has_all_seeds(base, monkeypatch, values, places, scale):
    """Losses that differ in the fourth place: their tick labels are whole numbers of their own."""
    drawn = []
    monkeypatch.setattr(sweep_report, "write_figure", lambda figure, path: drawn.append(figure))
    sweep = load_sweep(write_sweep(base, {"optim.learning_rate": values}, seeds=[0, 1]), [])
    curves = [[[10, 3.0002 + seed * 1e-4], [20, 3.0001 + seed * 1e-4]] for seed in (0, 2)]
    results = [{"loss": curve[-1][1], "curve": curve} for curve in curves * len(places)]
    records = [Record(point, DONE, result) for point, result in zip(sweep.points, results, strict=True)]
    sweep_report.draw(sweep, records, base)
    final, seeds = drawn[0].axes
    assert list(final.lines[0].get_xdata()) == places and final.get_xscale() == scale
    assert (final.lines[0].get_linestyle() == "-") == (places != [0, 1])
    assert len(seeds.lines) == 3 * len(places)
    assert list(seeds.lines[0].get_ydata()) == pytest.approx([3.0003, 3.0002], abs=1e-9)  # the mean
    drawn[0].draw_without_rendering()
    for axes in (final, seeds):
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert len(set(labels)) == len(labels) and not axes.yaxis.get_offset_text().get_text()


@pytest.mark.parametrize(
    ("status", "line", "becomes"),
    [
        (0, "", STOPPED),
        (REQUEUE, "", STOPPED),
        (1, "stopped on request after step 4; continue with --resume auto", STOPPED),  # by torchrun's account
        (1, "error: no", FAILED),
    ],
)
def test_a_training_stopped_by_other_hands_has_not_failed(base, status, line, becomes):
    (point,) = load_sweep(write_sweep(base, {"optim.clip": [0.5]}), []).points

    class Training:
        def status(self):
            return status

        def last_lines(self):
            return [line, "torchrun says more"]

    record, running = Record(point), {point.name: Training()}
    assert sweep_run._has_ended(record, running, asked=False) and not running
    assert record.status == becomes


def test_seeds_become_a_mean_and_its_error(base, tmp_path):
    sweep = load_sweep(write_sweep(base, {"optim.clip": [0.5, 1.0]}, seeds=[0, 1, 2]), [])
    losses, records = [3.0, 3.1, 3.5], []
    for point in sweep.points[:3]:
        result = {
            "loss": losses[len(records)],
            "parameters": 10,
            "tokens": 20,
            "flops": 30.0,
            "curve": [[20, 3]],
        }
        records.append(Record(point, DONE, result | {"tokens_per_second": 5.0, "memory_gib": 1.0}))
    records += [Record(point) for point in sweep.points[3:]]
    error = statistics.stdev(losses) / 3**0.5
    table = sweep_report.as_markdown(sweep, records)
    assert (
        f"| clip_0.5 | 10 | 20 | 3.00e+01 | 3.2000 +- {error:.4f} | 3 of 3 | 24.53 | 5 | 1.00 | done |"
        in table
    )
    assert "| clip_1 | - | - | - | - | - | - | - | - | waiting |" in table
