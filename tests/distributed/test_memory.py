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
    from lomdm_dist.parallel.engine import Blueprint
    from lomdm_dist.parallel.grid import process_grid
    from lomdm_dist.train.metrics import memory_gib

    with process_grid(tensor_parallel) as grid:
        blueprint = Blueprint(load_config(ROOT / f"configs/{config}.yaml"), grid)
        assert all(parameter.is_meta for parameter in blueprint.model.parameters())
        return memory_gib(), blueprint.parameters


@pytest.mark.parametrize("tensor_parallel", [1, 4])
@pytest.mark.parametrize(("config", "parameters"), [("1b", 1_141_251_412), ("7b", 7_366_751_572)])
def test_large_models_start_without_memory(config, parameters, tensor_parallel):
    of_ranks = on_processes(4, memory_before_the_first_parameter, config, tensor_parallel)
    assert all(gib < 2 and count == parameters for gib, count in of_ranks)
    print(f"{config}, tensor parallel {tensor_parallel}: {max(gib for gib, _ in of_ranks):.2f} GiB a rank")


def growth_of_a_start(parallel: dict) -> float:
    """Peak bytes a parameter that this process grew by while the engine started and was filled."""
    import resource
    from functools import partial

    from benchmarks.memory import config_of
    from lomdm_dist.parallel.engine import Blueprint, start_engine
    from lomdm_dist.parallel.grid import process_grid
    from lomdm_dist.train.optim import make_optimizer

    config = config_of("deepspeed", 3, "bf16", 4)
    large = config.model.model_copy(update={"width": 1024, "blocks": 6})
    parallel = type(config.parallel)(**parallel)
    config = config.model_copy(update={"model": large, "parallel": parallel})
    with process_grid(parallel.tensor_parallel) as grid:
        blueprint = Blueprint(config, grid)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        engine = start_engine(blueprint, partial(make_optimizer, config=config.optim), config, grid)
        engine.fill(partial(blueprint.draw, seed=0))
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return 1024 * (after - before) / blueprint.parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "share"),
    [
        ({"zero_stage": 3}, 14 / 4),
        ({"engine": "fsdp2"}, 12 / 4),
        ({"zero_stage": 1, "tensor_parallel": 4}, 18 / 4),
    ],
)
def test_no_rank_holds_the_model_while_it_starts(parallel, share):
    """80M parameters: a rank's share in bytes each, and what is at work of one layer; not 4 for all of it."""
    of_ranks = on_processes(4, growth_of_a_start, parallel)
    print(f"{parallel}: {max(of_ranks):.2f} bytes a parameter at most, its share is {share}")
    assert max(of_ranks) < share + 2.5
