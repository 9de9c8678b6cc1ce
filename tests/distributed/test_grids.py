"""One result on every grid and engine, and checkpoints that move between all of them."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lomdm_dist.config import load_config
from lomdm_dist.evaluate.order import PAIRS
from tests.distributed import grids
from tests.distributed.grids import on_processes
from tests.distributed.runs import ROOT, curve

TOLERANCE = 1e-4
# name: processes, tensor-parallel ranks
GRIDS = {"1": (1, 1), "dp2": (2, 1), "dp4": (4, 1), "tp2": (2, 2), "tp2 dp2": (4, 2), "tp4": (4, 4)}
ENGINES = {f"ZeRO {stage}": [f"parallel.zero_stage={stage}"] for stage in range(4)}
ENGINES["FSDP2"] = ["parallel.engine=fsdp2", "parallel.zero_stage=3"]
# four heads, so that four ranks can share them; micro-batches are accumulated; the clip bites
SHAPE = ["model.heads=4", "train.micro_batch=4", "optim.clip=0.5"]


def on_grid(grid: str, *more: str) -> tuple[int, list[str]]:
    processes, tensor_parallel = GRIDS[grid]
    return processes, [f"parallel.tensor_parallel={tensor_parallel}", *more]


def train(overrides: list[str], stop_after: int | None = None) -> None:
    """Gates, heads and output start away from zero: where they are zero, errors behind them do not show."""
    import lomdm_dist.parallel.engine as engine
    from lomdm_dist.model.initial import starts

    engine.starts = lambda model: {
        name: (low - 0.3, high + 0.3) if low == high else (low, high)
        for name, (low, high) in starts(model).items()
    }
    grids.train(overrides, stop_after)


def run_on(grid: str, engine: str, options: list[str], run: Path) -> dict[str, list[float]]:
    processes, place = on_grid(grid, *ENGINES[engine])
    on_processes(processes, train, [*options, *place, f"train.run={run}"])
    first = json.loads((run / "metrics.jsonl").read_text().partition("\n")[0])
    keys = [key for key in ("loss", "grad_norm", "grad_norm_heads") if key in first]
    return {key: list(curve(run, key).values()) for key in keys}


def largest_difference(ours: dict, theirs: dict) -> float:
    return max(abs(a - b) / b for key in ours for a, b in zip(ours[key], theirs[key], strict=True))


EVERYWHERE = [(grid, engine) for engine in ENGINES for grid in GRIDS]
# every grid and every engine once; other objectives, bf16 and resumes, below, take other pairs
MANY = [
    ("tp4", "ZeRO 0"),
    ("tp2 dp2", "ZeRO 1"),
    ("dp2", "ZeRO 2"),
    ("dp4", "ZeRO 3"),
    ("1", "FSDP2"),
]
CASES = [
    pytest.param("lomdm", 0.1, MANY, 4, id="lomdm-dropout-many"),
    pytest.param("mdlm", 0.0, [("tp2", "ZeRO 1"), ("dp2", "FSDP2")], 4, id="mdlm-some"),
    pytest.param("genmd4", 0.1, [("tp2", "FSDP2"), ("dp2", "ZeRO 3")], 4, id="genmd4-dropout-some"),
    *(
        pytest.param(objective, dropout, EVERYWHERE, 10, marks=pytest.mark.slow)
        for objective in ("lomdm", "mdlm", "genmd4")
        for dropout in (0.0, 0.1)
    ),
]


@pytest.mark.parametrize(("objective", "dropout", "where", "steps"), CASES)
def test_every_grid_and_engine_has_the_curve_of_one_process(
    objective, dropout, where, steps, base, tmp_path, capsys
):
    options = [*base, *SHAPE, f"objective={{name: {objective}}}", f"model.dropout={dropout}"]
    options += [f"train.steps={steps}"]
    alone = run_on("1", "ZeRO 0", options, tmp_path / "alone")
    assert len(alone["loss"]) == steps
    found = {}
    for number, (grid, engine) in enumerate(where):
        found[grid, engine] = largest_difference(run_on(grid, engine, options, tmp_path / str(number)), alone)
    with capsys.disabled():
        print(f"\n{objective}, dropout {dropout}: largest relative difference of losses and norms")
        grids = [grid for grid in GRIDS if any(grid == g for g, _ in where)]
        print(" " * 8 + "".join(f"{grid:>10}" for grid in grids))
        for engine in ENGINES:
            if any(engine == e for _, e in where):
                row = (found.get((grid, engine)) for grid in grids)
                print(f"{engine:8}" + "".join("         -" if d is None else f"{d:10.1e}" for d in row))
    assert max(found.values()) < TOLERANCE


OTHERS = {
    "gradient into the backbone": ["objective.stop_gradient=false"],
    "linear heads": ["objective.head=linear"],
    "polynomial": ["objective.schedule=polynomial"],
    "ar": ["objective={name: ar}"],
    "blocks": ["objective={name: window, order: blocks, block: 4}"],
    "documents": ["data.attend=document", "model.eos_id=0"],
    # torch's own dropout agrees in a group whose ranks all compute the same: they are seeded alike
    "native dropout": ["model.dropout_rng=native", "parallel.sequence_parallel=false"],
}
QUICK = ("gradient into the backbone", "native dropout")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in OTHERS]
)
def test_what_has_roads_of_its_own_is_split_too(name, base, tmp_path):
    """Gradients that leave the heads for the backbone, heads without a block, causal attention, ..."""
    options = [*base, *SHAPE, "model.dropout=0.1", "train.steps=4", *OTHERS[name]]
    alone = run_on("1", "ZeRO 0", options, tmp_path / "alone")
    assert largest_difference(run_on("tp2", "ZeRO 1", options, tmp_path / "tp2"), alone) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ZeRO 1", "ZeRO 2", "ZeRO 3", "FSDP2"])
def test_offload_changes_nothing(engine, base, tmp_path):
    options = [*base, *SHAPE, "train.steps=4", "train.precision=bf16"]
    with_it = run_on("dp2", engine, [*options, "parallel.offload=true"], tmp_path / "with")
    assert largest_difference(with_it, run_on("dp2", engine, options, tmp_path / "without")) < TOLERANCE


def validation(run: Path) -> list[float]:
    """Of each: the bound, and how A, hatA and the network's confidence correlate."""
    keys = ["valid_nll_per_token", *(f"order_{pair}" for pair in PAIRS)]
    return [row[key] for row in metrics(run) if "valid_nll_per_token" in row for key in keys]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_validation_is_that_of_one_process(base, tmp_path):
    """Ranks of a tensor-parallel group count once; 37 sequences do not divide over the others.

    Training goes on as it would without.
    """
    options = [*base, *SHAPE, "train.steps=2", "train.valid_every=1", "train.valid_sequences=37"]
    found = {}
    for grid, engine in (("1", "ZeRO 0"), ("tp2 dp2", "ZeRO 3"), ("dp4", "FSDP2")):
        processes, place = on_grid(grid, *ENGINES[engine])
        on_processes(processes, train, [*options, *place, f"train.run={tmp_path / grid}"])
        found[grid] = validation(tmp_path / grid)
    assert len(found["1"]) == 8 and all(math.isfinite(value) for value in found["1"])
    assert found["tp2 dp2"] == pytest.approx(found["1"], rel=1e-5, abs=1e-5)
    assert found["dp4"] == pytest.approx(found["1"], rel=1e-5, abs=1e-5)
    without = run_on("1", "ZeRO 0", [*options, "train.valid_every=0"], tmp_path / "without")
    assert without["loss"] == [row["loss"] for row in metrics(tmp_path / "1") if "loss" in row]


def test_sequence_parallelism_changes_nothing(base, tmp_path):
    options = [*base, *SHAPE, "model.dropout=0.1", "train.steps=4"]
    curves = [
        run_on("tp2", "ZeRO 1", [*options, f"parallel.sequence_parallel={on}"], tmp_path / on)
        for on in ("true", "false")
    ]
    assert largest_difference(*curves) < 1e-5


def test_a_copy_in_each_group_of_shards(base, tmp_path):
    """Hybrid sharding: two copies of the model, each sharded over two ranks; and ZeRO 2 of FSDP2."""
    options = [*base, *SHAPE, "model.dropout=0.1", "train.steps=4"]
    alone = run_on("1", "ZeRO 0", options, tmp_path / "alone")
    hybrid = run_on("dp4", "FSDP2", [*options, "parallel.shard_group=2"], tmp_path / "hybrid")
    assert largest_difference(hybrid, alone) < TOLERANCE
    on_processes(
        2,
        train,
        [*options, "parallel.engine=fsdp2", "parallel.zero_stage=2", f"train.run={tmp_path / 'two'}"],
    )
    assert list(curve(tmp_path / "two").values()) == pytest.approx(alone["loss"], rel=TOLERANCE)


BF16 = [
    [("dp2", "ZeRO 1"), ("dp2", "ZeRO 2"), ("dp2", "ZeRO 3"), ("tp2 dp2", "FSDP2")],
    pytest.param(
        [("1", "ZeRO 1"), ("1", "ZeRO 2"), ("1", "ZeRO 3"), ("dp2", "FSDP2")], marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("where", BF16)
def test_bf16_follows_fp32(where, base, tmp_path):
    """Loss and gradient norm of the first steps, to bf16's precision."""
    options = [*base, *SHAPE, "train.steps=4"]
    alone = run_on("1", "ZeRO 0", options, tmp_path / "alone")
    for number, (grid, engine) in enumerate(where):
        bf16 = run_on(grid, engine, [*options, "train.precision=bf16"], tmp_path / str(number))
        assert bf16["loss"] == pytest.approx(alone["loss"], rel=1e-3), (grid, engine)
        assert bf16["grad_norm"] == pytest.approx(alone["grad_norm"], rel=2e-2), (grid, engine)
        assert bf16["loss"] != pytest.approx(alone["loss"], rel=1e-7), f"{grid}, {engine}: this was not bf16"


# --- checkpoints -------------------------------------------------------------------------------------


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {name: torch.full(tuple(tensor.size), torch.nan) for name, tensor in saved.items()}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory, base):
    """A run on tp2 dp2 with ZeRO 1, stopped after 5 of 6 steps; and the same run to its end."""
    folder = tmp_path_factory.mktemp("saved")
    options = [*base, *SHAPE, "model.dropout=0.1", "train.steps=6"]
    processes, place = on_grid("tp2 dp2", *ENGINES["ZeRO 1"])
    for name, stop in (("stopped", 5), ("whole", None)):
        on_processes(processes, train, [*options, *place, f"train.run={folder / name}"], stop)
    return options, folder


def go_on(overrides: list[str], checkpoint: str) -> list[float]:
    """Resume, save at once what was loaded, train on; returns the learning rates that the engine used."""
    from lomdm_dist.train.inputs import open_inputs
    from lomdm_dist.train.loop import running

    config = load_config(ROOT / "configs/demo.yaml", overrides)
    with running(config, open_inputs(config, checkpoint), {}) as run:
        run.save()
        run.saver.wait()
        run.train(config.train.steps)
        return [group["lr"] for group in run.engine.optimizer.param_groups]


RESUMED = [
    ("1", "ZeRO 0"),
    ("dp2", "ZeRO 2"),
    ("tp4", "ZeRO 1"),
    ("dp4", "FSDP2"),
    ("tp2 dp2", "ZeRO 3"),
    *(
        pytest.param(*at, marks=pytest.mark.slow)
        for at in (("dp4", "ZeRO 3"), ("tp2", "ZeRO 1"), ("dp2", "FSDP2"))
    ),
]


@pytest.mark.parametrize(("grid", "engine"), RESUMED)
def test_a_checkpoint_moves_to_any_grid_and_engine(grid, engine, saved, tmp_path):
    options, folder = saved
    run, before = tmp_path / "run", folder / "stopped/checkpoints/step-5"
    processes, place = on_grid(grid, *ENGINES[engine])
    rates = on_processes(
        processes, go_on, [*options, *place, f"train.run={run}", "train.keep_last=9"], str(before)
    )
    assert all(of_rank == pytest.approx([1e-3, 5e-3]) for of_rank in rates), "the config's, past the warm-up"
    ours, theirs = contents(run / "checkpoints/step-5"), contents(before)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    whole = folder / "whole"
    for key in ("loss", "grad_norm", "lr", "lr_heads"):
        assert curve(run, key)[6] == pytest.approx(curve(whole, key)[6], rel=TOLERANCE), key


def test_what_is_saved_is_whole_and_named(saved):
    """Shapes of the whole parameters, q, k and v apart; padding nowhere; the same names for all kinds."""
    _, folder = saved
    state = contents(folder / "stopped/checkpoints/step-5")
    kinds = {name.split("/", 1)[0] for name in state}
    assert kinds == {"raw", "ema", "exp_avg", "exp_avg_sq"}
    names = {kind: {n.split("/", 1)[1] for n in state if n.startswith(f"{kind}/")} for kind in kinds}
    assert all(names[kind] == names["raw"] for kind in kinds)
    assert state["raw/backbone.blocks.0.qkv.weight"].shape == (3, 32, 32)
    assert state["ema/backbone.output.weight"].shape == (300, 32)
    assert not any(tensor.isnan().any() for tensor in state.values())
    assert json.loads((folder / "stopped/checkpoints/step-5/state.json").read_text())["format"] == 2
