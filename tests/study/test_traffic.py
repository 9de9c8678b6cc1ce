"""Traffic by formula against what the engines send, counted in dry runs, and that against real processes."""

import pytest

from lomdm_dist.config import Config
from lomdm_dist.study.dry_run import dry_run
from tests.distributed.grids import on_processes
from tests.model.test_model import tiny_config

ENGINES = {
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
    "FSDP2": {"engine": "fsdp2", "zero_stage": 3},
}


def config_of(ranks: int, parallel: dict, objective: str = "lomdm", **train) -> Config:
    """Large enough that a tensor is more than what 512 ranks fill it up with."""
    sizes = {"vocab_size": 509, "length": 32, "width": 256, "blocks": 2, "heads": 8, "dropout": 0.1}
    micro = 2
    batch = ranks // parallel.get("tensor_parallel", 1) * micro
    config = tiny_config(
        model=sizes,
        objective={"name": objective},
        train={"precision": "bf16", "global_batch": batch, "micro_batch": micro} | train,
    )
    return Config.model_validate(config.model_dump() | {"parallel": parallel})


def check(config: Config, world_size: int, rank: int = 0) -> None:
    """To 1%: each group's bytes, and those of every purpose."""
    result = dry_run(config, world_size, rank)
    groups = {}
    for row in result["collectives"]:
        counted, planned = groups.setdefault(row["group"], [0, 0])
        groups[row["group"]] = [counted + row["bytes"], planned + row["planned_bytes"]]
        assert row["planned_bytes"] == pytest.approx(row["bytes"], rel=0.01), row
    for group, (counted, planned) in groups.items():
        print(f"{group}: counted {counted:,.0f} bytes, planned {planned / counted - 1:+.2%}")
        assert planned == pytest.approx(counted, rel=0.01)
    assert groups


@pytest.mark.parametrize(
    ("ranks", "rank", "engine", "tensor_parallel"),
    [(8, 0, "ZeRO 2", 1), (64, 63, "ZeRO 3", 2), (512, 300, "FSDP2", 8)],
)
def test_the_formula_is_what_is_counted(ranks, rank, engine, tensor_parallel):
    parallel = ENGINES[engine] | {"tensor_parallel": tensor_parallel}
    check(config_of(ranks, parallel), ranks, rank)


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 2, 8])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_the_formula_is_what_is_counted_on_every_grid(ranks, engine, tensor_parallel):
    check(config_of(ranks, ENGINES[engine] | {"tensor_parallel": tensor_parallel}), ranks, ranks - 1)


SHARDED = {"engine": "fsdp2", "shard_group": 4}
OTHERS = [
    ({"zero_stage": 0}, {"precision": "fp32"}, "lomdm"),
    ({"zero_stage": 1, "tensor_parallel": 2, "sequence_parallel": False}, {"two_samples": "joint"}, "lomdm"),
    ({"zero_stage": 1, "tensor_parallel": 2}, {"recompute": "block"}, "lomdm"),
    ({"zero_stage": 1, "tensor_parallel": 2}, {"recompute": "attention"}, "mdlm"),
    (SHARDED | {"zero_stage": 2}, {"recompute": "block", "global_batch": 32}, "lomdm"),
    (SHARDED | {"zero_stage": 3, "tensor_parallel": 2}, {"two_samples": "joint"}, "genmd4"),
    ({"zero_stage": 3}, {"two_samples": "joint", "recompute": "block"}, "lomdm"),
    ({"zero_stage": 3}, {}, "mdlm"),
    ({"zero_stage": 3}, {}, "ar"),
    ({"zero_stage": 2, "tensor_parallel": 2}, {}, "window"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "train", "objective"), OTHERS, ids=str)
def test_the_formula_knows_every_way_to_train(parallel, train, objective):
    check(config_of(8, parallel, objective, **train), 8)


def sent_by_gloo(config: Config) -> tuple[list[dict], int, int]:
    """Of a real process: what is counted, how many calls were seen in all, and how many gloo was given."""
    from unittest import mock

    import torch

    from lomdm_dist.parallel.grid import process_grid
    from lomdm_dist.study.counting import Counting
    from lomdm_dist.study.dry_run import count_on

    with (
        process_grid(config.parallel.tensor_parallel) as grid,
        torch.profiler.profile() as profile,
        mock.patch.object(Counting, "_send", autospec=True, side_effect=Counting._send) as seen,
    ):
        result = count_on(config, grid)
    given = sum(event.name.startswith("gloo:") for event in profile.events())
    return result["collectives"], seen.call_count, given


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "tensor_parallel"), [("ZeRO 3", 1), ("FSDP2", 1), ("ZeRO 1", 2)])
def test_the_fake_group_says_what_real_processes_do(engine, tensor_parallel):
    config = config_of(2, ENGINES[engine] | {"tensor_parallel": tensor_parallel})
    imagined = dry_run(config, 2, 0)["collectives"]
    for collectives, seen, given in on_processes(2, sent_by_gloo, config):
        collectives = [row for row in collectives if row["part"] != "order"]
        assert [(row["kind"], row["group"], row["part"], row["calls"]) for row in collectives] == [
            (row["kind"], row["group"], row["part"], row["calls"]) for row in imagined
        ]
        assert [row["bytes"] for row in collectives] == pytest.approx(
            [row["bytes"] for row in imagined], 0.01
        )
        print(f"{engine}: {seen} calls seen, {given} of gloo's")
        assert seen == given > 0
