"""Split and joint on every engine: the same gradient of each parameter, and no reduction more."""

from collections import Counter

import pytest
import torch

from tests.distributed.grids import on_processes
from tests.distributed.test_grids import ENGINES, SHAPE, contents, on_grid, train

WHERE = [
    ("1", "ZeRO 0"),
    ("dp2", "ZeRO 1"),
    ("dp2", "ZeRO 2"),
    ("dp2", "ZeRO 3"),
    ("dp2", "FSDP2"),
    ("tp2", "ZeRO 1"),
]
# three micro-batches a rank; no clipping, so that the first moment is (1 - beta1) times the gradient
ACCUMULATED = [
    "train.global_batch=12",
    "optim.clip=999",
    "optim.beta1=0.9",
    "model.dropout=0.1",
    "train.steps=1",
]


def gradients(grid: str, engine: str, form: str, options: list[str], run) -> dict[str, torch.Tensor]:
    """Of each whole parameter, from what one step leaves in AdamW."""
    processes, place = on_grid(grid, *ENGINES[engine], f"train.two_samples={form}")
    micro_batch = 2 if grid.startswith("dp2") else 4
    more = [*place, f"train.micro_batch={micro_batch}", f"train.run={run}"]
    on_processes(processes, train, [*options, *more])
    state = contents(run / "checkpoints/step-1")
    return {n.removeprefix("exp_avg/"): 10 * t for n, t in state.items() if n.startswith("exp_avg/")}


@pytest.mark.parametrize(
    ("objective", "forms"),
    [
        ("lomdm", ["split"]),  # against joint on one process
        pytest.param("lomdm", ["joint"], marks=pytest.mark.slow),
        pytest.param("genmd4", ["split", "joint"], marks=pytest.mark.slow),
    ],
)
def test_split_and_joint_have_the_same_gradients(objective, forms, base, tmp_path):
    options = [*base, *SHAPE, *ACCUMULATED, f"objective={{name: {objective}}}"]
    alone = gradients("1", "ZeRO 0", "joint", options, tmp_path / "alone")
    largest = max(float(gradient.norm()) for gradient in alone.values())
    for number, (grid, engine) in enumerate(WHERE):
        for form in forms:
            found = gradients(grid, engine, form, options, tmp_path / f"{number}{form}")
            assert found.keys() == alone.keys()
            for name, gradient in alone.items():
                scale = max(float(gradient.norm()), 1e-3 * largest)
                assert (found[name] - gradient).norm() < 1e-4 * scale, (grid, engine, form, name)


def reductions(overrides: list[str]) -> Counter:
    """Calls of collectives in the second step of two, by kind."""
    from torch.utils._python_dispatch import TorchDispatchMode

    import lomdm_dist.train.loop as loop

    counted, real = Counter(), loop.Run.step

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            if function.namespace == "c10d":
                counted[function.__name__.split(".")[0]] += 1
            return function(*arguments, **(keywords or {}))

    def step(self, number):
        counted.clear()
        with Count():
            return real(self, number)

    loop.Run.step = step
    train(overrides)
    return counted


@pytest.mark.parametrize("engine", [pytest.param("ZeRO 0", marks=pytest.mark.slow), "ZeRO 1", "FSDP2"])
def test_split_reduces_no_more_than_joint(engine, base, tmp_path):
    """Gradients are reduced once a step by ZeRO 0 and 1, once a micro-batch by FSDP2."""
    options = [*base, *SHAPE, *ACCUMULATED, *ENGINES[engine], "train.steps=2", "train.micro_batch=2"]
    counts = {}
    for form in ("split", "joint"):
        more = [f"train.two_samples={form}", f"train.run={tmp_path / form}"]
        counts[form], _ = on_processes(2, reductions, [*options, *more])
    print(engine, counts)
    for kind in ("allreduce_", "_reduce_scatter_base_"):
        assert counts["split"][kind] == counts["joint"][kind]
    assert counts["joint"]["_reduce_scatter_base_" if engine == "FSDP2" else "allreduce_"] > 0
