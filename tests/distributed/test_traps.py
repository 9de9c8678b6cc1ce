"""What goes silently wrong on a grid without a remedy: each is shown with it, and without it."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version

from lomdm_dist.config import load_config
from lomdm_dist.errors import UserError
from tests.distributed.grids import on_processes
from tests.distributed.runs import ROOT, curve
from tests.distributed.test_grids import GRIDS, SHAPE, on_grid, train

# --- tensors that are not contiguous -----------------------------------------------------------------


def gradient_over_the_group(ours: bool) -> float:
    """That of a value which all have, where it comes in as an expanded tensor; in our way or Megatron's."""
    from lomdm_dist.ops.collective import same_on
    from lomdm_dist.parallel.grid import process_grid

    with process_grid(2) as grid:
        from megatron.core.tensor_parallel import mappings

        enter = same_on if ours else mappings.copy_to_tensor_model_parallel_region
        x = torch.zeros(2, 3, requires_grad=True)
        enter(x, grid.tensor_group).sum().backward()
        return x.grad[0, 0].item()


def test_tensors_that_are_not_contiguous_are_summed():
    assert on_processes(2, gradient_over_the_group, True) == [2.0] * 2
    if Version(version("megatron-core")) < Version("0.19"):
        assert on_processes(2, gradient_over_the_group, False) == [1.0] * 2


# --- gradients of replicated parameters under sequence parallelism ------------------------------------


def train_without(remedy: str, overrides: list[str]) -> None:
    if remedy:
        import lomdm_dist.parallel.tensor as tensor

        setattr(tensor, remedy, lambda x, group: x)
    train(overrides)


def norms_of(grid: str, options: list[str], run: Path, without: str = "") -> list[float]:
    processes, place = on_grid(grid)
    on_processes(processes, train_without, without, [*options, *place, f"train.run={run}"])
    return list(curve(run, "grad_norm").values())


def test_replicated_parameters_get_the_gradient_of_all_tokens(base, tmp_path):
    options = [*base, *SHAPE, "train.steps=3", "parallel.sequence_parallel=true"]
    alone = norms_of("1", options, tmp_path / "alone")
    assert norms_of("tp2", options, tmp_path / "with") == pytest.approx(alone, rel=1e-4)
    assert norms_of("tp2", options, tmp_path / "without", "same_on") != pytest.approx(alone, rel=1e-2)


# --- precision ---------------------------------------------------------------------------------------


def test_bf16_without_master_weights_is_refused():
    with pytest.raises(UserError, match=r"bf16 needs the fp32 master weights .* use zero_stage 1"):
        load_config(ROOT / "configs/demo.yaml", ["train.precision=bf16", "parallel.zero_stage=0"])


def reductions_of(overrides: list[str]) -> tuple[set, set]:
    """Dtypes of all that is summed over ranks in a training step and larger than a metric; of the masters."""
    import torch.distributed as dist

    from lomdm_dist.train.inputs import open_inputs
    from lomdm_dist.train.loop import running

    reduced = set()

    def noted(reduce):
        def call(*arguments, **named):
            tensors = [t for t in (*arguments, *named.values()) if isinstance(t, torch.Tensor)]
            reduced.update(t.dtype for t in tensors if t.numel() > 100)
            return reduce(*arguments, **named)

        return call

    config = load_config(ROOT / "configs/demo.yaml", overrides)
    # before the engine starts: DeepSpeed keeps what it found then
    names = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
    for name in (name for name in names if hasattr(dist, name)):
        setattr(dist, name, noted(getattr(dist, name)))
    with running(config, open_inputs(config, None), {}) as run:
        run.train(config.train.steps)
        return reduced, {piece.master.dtype for piece in run.engine.pieces}


@pytest.mark.parametrize(
    "engine",
    [
        ["parallel.zero_stage=1"],
        ["parallel.zero_stage=2"],
        ["parallel.zero_stage=3"],
        ["parallel.engine=fsdp2", "parallel.zero_stage=3"],
    ],
    ids=" ".join,
)
def test_gradients_are_reduced_and_masters_kept_in_float32(engine, base, tmp_path):
    """By default DeepSpeed reduces the gradients of a network in bf16 in bf16."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").touch()
    options = [*base, "train.precision=bf16", "train.steps=1", *engine, f"train.run={tmp_path / 'run'}"]
    for found in on_processes(2, reductions_of, options):
        assert found == ({torch.float32}, {torch.float32})


# --- noise -------------------------------------------------------------------------------------------


def hashes_of_z(overrides: list[str]) -> list[str]:
    """Of every z that this rank trains on."""
    import lomdm_dist.model.bound as bound

    plain, hashes = bound.corrupt, []

    def noted(*arguments):
        z = plain(*arguments)
        hashes.append(hashlib.sha256(np.ascontiguousarray(z.numpy())).hexdigest())
        return z

    bound.corrupt = noted
    train(overrides)
    return hashes


def test_z_is_the_same_in_a_tensor_parallel_group_and_different_across_data_parallel_ranks(base, tmp_path):
    options = [*base, "train.steps=3", "train.micro_batch=8", f"train.run={tmp_path / 'run'}"]
    processes, place = on_grid("tp2 dp2")
    of_rank = on_processes(processes, hashes_of_z, [*options, *place])
    assert of_rank[0] == of_rank[1] and of_rank[2] == of_rank[3]
    assert len(of_rank[0]) == 6, "two samples a step"
    assert not set(of_rank[0]) & set(of_rank[2])
    print(f"{len({tuple(h) for h in of_rank})} classes of z on {GRIDS['tp2 dp2']}")


# --- grids that cannot be ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tensor_parallel=2"], r"model.heads 3 do not divide over .* 3 / 2 = 1.5"),
        (
            ["model.heads=4", "model.length=63", "parallel.tensor_parallel=2"],
            r"model.length 63 does not divide over parallel.tensor_parallel 2.* set that to false",
        ),
        (["parallel.engine=fsdp2", "parallel.zero_stage=1"], r"zero_stage is 1: add parallel.zero_stage=3"),
        (["parallel.zero_stage=0", "parallel.offload=true"], "offload is for zero_stage 1 to 3"),
        (["parallel.shard_group=2"], "shard_group is for engine fsdp2"),
    ],
)
def test_what_cannot_work_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(ROOT / "configs/demo.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "processes", "message"),
    [
        (
            ["model.heads=4", "parallel.tensor_parallel=2"],
            3,
            r"3 processes do not form groups .* 3 / 2 = 1.5",
        ),
        (
            ["parallel.engine=fsdp2", "parallel.zero_stage=3", "parallel.shard_group=4"],
            6,
            r"6 data-parallel ranks do not form groups of parallel.shard_group 4: 6 / 4 = 1.5",
        ),
    ],
)
def test_processes_that_form_no_grid_are_refused(overrides, processes, message):
    config = load_config(ROOT / "configs/demo.yaml", overrides)
    with pytest.raises(UserError, match=message):
        config.data_parallel(processes)
