"""No rank holds more than its share: counted bytes against the textbook, and starts on the meta device."""

import pytest

from benchmarks.memory import measure_all, total
from lomdm_dist.config import load_config
from tests.distributed.grids import on_processes
from tests.distributed.runs import ROOT


def rows() -> list[dict]:
    from lomdm_dist.parallel.grid import process_grid

    with process_grid() as grid:
        return measure_all(grid)


def test_bytes_are_those_of_the_textbook():
    for row in on_processes(4, rows)[0]:
        counted, textbook = row["counted"], row["textbook"]
        assert total(counted) == pytest.approx(total(textbook), rel=0.05), row
        for part in textbook:
            assert counted[part] == pytest.approx(textbook[part], rel=0.05), (part, row)


def memory_before_the_first_parameter(config: str, tensor_parallel: int) -> tuple[float, int]:
    """Peak memory in GiB of this process, the imports included, with the whole model built; parameters."""
    from lomdm_dist.machine import peak_memory
    from lomdm_dist.parallel.engine import Blueprint
    from lomdm_dist.parallel.grid import process_grid

    with process_grid(tensor_parallel) as grid:
        blueprint = Blueprint(load_config(ROOT / f"configs/{config}.yaml"), grid)
        assert all(parameter.is_meta for parameter in blueprint.model.parameters())
        return peak_memory() / 2**30, blueprint.parameters


PARAMETERS = {"1b": 1_141_251_412, "7b": 7_366_751_572}
STARTS = [("1b", 4), ("7b", 1), *(pytest.param(*at, marks=pytest.mark.slow) for at in (("1b", 1), ("7b", 4)))]


@pytest.mark.parametrize(("config", "tensor_parallel"), STARTS)
def test_large_models_start_without_memory(config, tensor_parallel):
    of_ranks = on_processes(4, memory_before_the_first_parameter, config, tensor_parallel)
    assert all(gib < 2 and count == PARAMETERS[config] for gib, count in of_ranks)
    print(f"{config}, tensor parallel {tensor_parallel}: {max(gib for gib, _ in of_ranks):.2f} GiB a rank")


def growth_of_a_start(parallel: dict) -> tuple[float, float]:
    """Bytes a parameter that this process grew by at most: until its share of the model stands, and until
    the engine has started and is filled."""
    import resource
    from functools import partial

    import deepspeed

    from benchmarks.memory import config_of
    from lomdm_dist.parallel.engine import Blueprint, start_engine
    from lomdm_dist.parallel.grid import process_grid
    from lomdm_dist.train.optim import make_optimizer

    config = config_of("deepspeed", 3, "bf16", 4)
    large = config.model.model_copy(update={"width": 1024, "blocks": 12})
    parallel = type(config.parallel)(**parallel)
    config = config.model_copy(update={"model": large, "parallel": parallel})

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    peaks = []

    def optimizer(model, config):  # asked for when the model stands
        peaks.append(peak())
        return make_optimizer(model, config)

    assert deepspeed  # its import is not counted
    with process_grid(parallel.tensor_parallel) as grid:
        blueprint = Blueprint(config, grid)
        before = peak()
        engine = start_engine(blueprint, optimizer)
        engine.fill(partial(blueprint.draw, seed=0))
        peaks.append(peak())
        of_model, of_all = ((at - before) / blueprint.parameters for at in peaks)
        return of_model, of_all


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "of_model", "of_all"),
    [
        ({"zero_stage": 3}, 2 / 4, 14 / 4),
        ({"engine": "fsdp2"}, 4 / 4, 12 / 4),
        ({"zero_stage": 1, "tensor_parallel": 4}, 2 / 4, 18 / 4),
    ],
)
def test_no_rank_holds_the_model_while_it_starts(parallel, of_model, of_all):
    """161M parameters: a rank's share in bytes each, where the whole is 2 (4 for FSDP2), and a layer's work.

    DeepSpeed's start has buffers of its own beside the masters and moments.
    """
    of_ranks = on_processes(4, growth_of_a_start, parallel)
    model, whole = (max(growth) for growth in zip(*of_ranks, strict=True))
    print(f"{parallel}: {model:.2f} with the model ({of_model}), {whole:.2f} filled ({of_all})")
    assert model < of_model + 0.75 and whole < of_all + 5
