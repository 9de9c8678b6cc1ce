"""train.profile: what is recorded, of which steps and ranks, and that training does not notice."""

import errno
import gzip
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lomdm_dist.config import make_config
from lomdm_dist.errors import UserError
from lomdm_dist.study.trace import read_trace, where_time_went
from lomdm_dist.train import profile
from tests.distributed.grids import on_processes, train
from tests.distributed.runs import curve
from tests.tiny import tiny_config

TOOLS = {"flops_profiler": True, "comms_logger": True}
PHASES = {"data", "features", "z1", "z2", "heads", "loss", "reduction", "optimiser"}


def trained(data: Path, folder: Path, settings: dict, *overrides: str) -> Path:
    """The folder of a run of 4 steps of 2 processes, with `settings` for its profile."""
    values = tiny_config(data, folder / "run")
    values["train"] |= {"steps": 4, "micro_batch": 4, "global_batch": 16, "profile": settings}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    on_processes(2, train, list(overrides), None, config)
    return folder / "run"


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory):
    settings = {"steps": [2, 3], "ranks": [1], "memory": True, **TOOLS}
    return trained(tiny_data, tmp_path_factory.mktemp("profiled"), settings)


@pytest.fixture(scope="module")
def found(run):
    return where_time_went(read_trace(run / "profile/trace-steps-2-3-rank-1.json.gz"))


def test_training_goes_the_same_way_without_a_profile(run, tiny_data, tmp_path):
    plain = trained(tiny_data, tmp_path, {})
    for key in ("loss", "rloo", "grad_norm", "exponent_std"):
        assert curve(plain, key) == curve(run, key)


def test_only_the_chosen_steps_of_the_chosen_rank_are_recorded(run, found):
    assert {path.name for path in (run / "profile").iterdir()} == {
        "communication-steps-2-3-rank-1.txt",
        "flops-steps-2-3-rank-1.txt",
        "trace-steps-2-3-rank-1.json.gz",
    }
    seconds, step = found["seconds"], found["step_seconds"]
    assert (found["steps"], found["rank"]) == ([2, 3], 1)
    assert seconds.keys() - {"other"} == PHASES
    assert sum(sum(kinds.values()) for kinds in seconds.values()) == pytest.approx(step, rel=1e-6)
    for phase in ("features", "z1", "z2", "heads"):
        assert min(seconds[phase][kind] for kind in ("matrix products", "attention", "pointwise")) > 0
    assert seconds["reduction"]["communication"] > 0
    assert seconds["optimiser"]["communication"] > 0  # ZeRO 1 gathers the new weights
    assert sum(seconds.get("other", {}).values()) < 0.1 * step
    assert found["peak_bytes"]["z1"] > found["peak_bytes"]["data"] > 0


def test_deepspeeds_tools_say_what_these_steps_did(run, found):
    text = (run / "profile/flops-steps-2-3-rank-1.txt").read_text()
    counted = float(re.search(r"depth 2:.*?'ModuleList': '([\d.]+) MMACs'", text, re.DOTALL)[1])
    sequences, length, width, passes, blocks = 8, 16, 32, 3, 2  # passes: features, z1, z2
    products = sequences * length * passes * blocks * (12 * width**2 + 2 * width * length)
    assert 1e6 * counted == pytest.approx(products, rel=0.02)  # besides these the condition's, of each pass

    text = (run / "profile/communication-steps-2-3-rank-1.txt").read_text()
    assert re.search(r"^all_reduce$.*^all_gather_into_tensor$", text, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^ +[\d.]+ K?B +(\d+) +([\d.]+)", text, re.MULTILINE)
    assert {int(calls) % 2 for calls, _ in rows} == {0}  # as often in each step
    assert sum(float(milliseconds) for _, milliseconds in rows) < 2 * 1e3 * found["step_seconds"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid",
    [
        "parallel={zero_stage: 0}",
        "parallel={zero_stage: 2}",
        "parallel={zero_stage: 3}",
        "parallel={engine: fsdp2}",
        "parallel={tensor_parallel: 2}",
    ],
)
def test_every_grid_is_recorded(tiny_data, tmp_path, grid):
    tools = {} if "fsdp2" in grid else TOOLS
    run = trained(tiny_data, tmp_path, {"steps": [2, 3], "ranks": [0, 1], **tools}, grid)
    for rank in (0, 1):
        found = where_time_went(read_trace(run / f"profile/trace-steps-2-3-rank-{rank}.json.gz"))
        assert found["seconds"].keys() - {"other"} == PHASES
        assert found["communication"]["in_flight"] > 0
        assert all(
            (run / f"profile/{name}-steps-2-3-rank-{rank}.txt").exists() == bool(tools)
            for name in ("flops", "communication")
        )


class Engine:
    module = None


def recorder(tmp_path, **settings) -> profile.Profile:
    """Of steps that are no training."""
    values = tiny_config_without_data(tmp_path)
    values["train"]["profile"] = {"steps": [2, 3], **settings}
    grid = SimpleNamespace(device=torch.device("cpu"))
    return profile.Profile(make_config(values, [], "test"), Engine, grid, SimpleNamespace(at=print), 1)


def tiny_config_without_data(run: Path) -> dict:
    return {
        "model": {"vocab_size": 9, "mask_id": 1, "length": 4, "width": 4, "blocks": 1, "heads": 1},
        "data": {"train": "a", "valid": "b"},
        "train": {"run": str(run), "steps": 8, "global_batch": 1, "micro_batch": 1},
    }


def take_steps(recorder: profile.Profile, *numbers: int) -> None:
    for number in numbers:
        with recorder.step(number):
            torch.ones(4, 4) @ torch.ones(4, 4)


def steps_of(folder: Path) -> list[int]:
    (path,) = folder.glob("profile/trace-*")
    return where_time_went(read_trace(path))["steps"]


def test_a_run_that_stops_or_goes_back_writes_what_it_has(tmp_path):
    take_steps(recorder(tmp_path / "whole"), 1, 2, 3, 4)
    assert steps_of(tmp_path / "whole") == [2, 3]
    stopped = recorder(tmp_path / "stopped")
    take_steps(stopped, 1, 2)
    stopped.close()
    assert steps_of(tmp_path / "stopped") == [2]
    assert stopped.seconds_aside() > 0 == stopped.seconds_aside()
    take_steps(recorder(tmp_path / "back"), 1, 2, 1, 2, 3)
    assert steps_of(tmp_path / "back") == [2]
    take_steps(recorder(tmp_path / "resumed"), 4, 5)
    assert not (tmp_path / "resumed").exists()
    failed = recorder(tmp_path / "failed")
    with pytest.raises(ZeroDivisionError), failed.step(2):
        raise ZeroDivisionError
    take_steps(failed, 3)
    assert not list((tmp_path / "failed/profile").iterdir())


def test_a_folder_or_disk_that_takes_nothing_is_said_and_ends_nothing(tmp_path, monkeypatch, capfd):
    (tmp_path / "profile").write_text("a file")
    take_steps(recorder(tmp_path), 1, 2, 3, 4)
    said = capfd.readouterr().out
    assert said.count("\n") == 1 and "nothing is recorded: [Errno 17] File exists" in said

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(profile, "write_atomically", full)
    take_steps(recorder(tmp_path / "full"), 2, 3)
    said = capfd.readouterr().out
    assert "cannot write" in said and "No space left on device; training goes on" in said
    assert "where the time went" in said  # it is known all the same

    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda _, path: Path(path).write_text('{"traceEv')
    )
    take_steps(recorder(tmp_path / "cut"), 2, 3)
    assert "cannot write its trace" in capfd.readouterr().out
    assert not list((tmp_path / "cut/profile").iterdir())

    stop = torch.profiler.profile.stop

    def failing(profiler):
        stop(profiler)
        raise RuntimeError("no trace")

    monkeypatch.setattr(torch.profiler.profile, "stop", failing)
    take_steps(recorder(tmp_path / "failed"), 2, 3)
    assert "not all is written: no trace; training goes on" in capfd.readouterr().out


def test_a_gpu_gives_its_allocators_history_too(tmp_path, monkeypatch, capfd):
    """What is called, and when: there is no GPU here."""
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all": calls.append(enabled))
    monkeypatch.setattr(memory, "_snapshot", lambda: {"segments": []})
    of_gpu = recorder(tmp_path, memory=True)
    of_gpu.device = torch.device("cuda")
    take_steps(of_gpu, 1, 2, 3, 4)
    assert calls == ["all", "wait", "wait", "wait", None]
    (path,) = tmp_path.glob("profile/memory-steps-2-3-rank-0.pickle")
    assert pickle.loads(path.read_bytes()) == {"segments": []}
    assert "no kernel of the GPU is in the trace" in capfd.readouterr().out


def test_secrets_are_not_in_the_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "aten::matmul")
    take_steps(recorder(tmp_path), 2, 3)
    (path,) = tmp_path.glob("profile/trace-*")
    text = gzip.decompress(path.read_bytes()).decode()
    assert "aten::mm" in text and "aten::matmul" not in text and '"***"' in text


REFUSED = {
    "train.profile.steps=[5,9]": "steps [5, 9] end after the training, which has 8 steps",
    "train.profile.steps=[5,4]": "steps [5, 4] end before they begin",
    "train.profile.steps=[0,4]": "train.profile.steps.0: input should be greater than 0",
    "train.profile.steps=[5]": "train.profile.steps: list should have at least 2 items",
    "train.profile.steps=20": "train.profile.steps: input should be a valid list",
    "train.profile.memory=true": "add train.profile.steps=[FIRST,LAST]",
    "train.profile.step=[1,2]": "unknown key train.profile.step; did you mean train.profile.steps?",
    "train.profile={steps: [1, 2], memory: 1}": "train.profile.memory: true or false is wanted, got 1",
    "train.profile={steps: [1, 2], ranks: []}": "train.profile.ranks: list should have at least 1 item",
}


@pytest.mark.parametrize(("override", "message"), REFUSED.items())
def test_what_cannot_work_is_refused(tmp_path, override, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make_config(tiny_config_without_data(tmp_path), [override], "test")


def test_what_the_processes_or_the_engine_do_not_have_is_refused(tmp_path):
    values = tiny_config_without_data(tmp_path)
    config = make_config(values, ["train.profile={steps: [1, 2], ranks: [0, 2]}"], "test")
    profile.check_ranks(config, 3)
    with pytest.raises(UserError, match="2 processes have the ranks 0 to 1"):
        profile.check_ranks(config, 2)
    for tool in ("flops_profiler", "comms_logger"):
        overrides = ["parallel.engine=fsdp2", f"train.profile={{steps: [1, 2], {tool}: true}}"]
        with pytest.raises(UserError, match=r"are DeepSpeed's, and parallel\.engine is fsdp2"):
            make_config(tiny_config_without_data(tmp_path), overrides, "test")
