"""Bytes that autograd keeps: the formula against the count of saved-tensor hooks."""

import pytest
import torch

from lomdm_dist.config import Config, load_config
from lomdm_dist.model import LoMDM
from lomdm_dist.model.backbone import Block
from lomdm_dist.parallel.engine import Alone
from lomdm_dist.study.activations import SavedBytes, activation_bytes, block_bytes
from lomdm_dist.train.step import backpropagate, draw_noise
from tests.distributed.grids import on_processes
from tests.model.test_model import CONFIGS, tiny_config


def config_of(objective: dict, model: dict | None = None, **train) -> Config:
    sizes = {"vocab_size": 301, "length": 64, "width": 64, "blocks": 4, "heads": 4}
    return tiny_config(
        model=sizes | (model or {}),
        objective=objective,
        train={"precision": "fp32", "global_batch": 8, "micro_batch": 8} | train,
    )


def counted(config: Config, model: LoMDM | None = None) -> int:
    """Peak bytes of one micro-batch, in a network of the config's precision."""
    model = (LoMDM(config.model, config.objective) if model is None else model).train()
    model.to(torch.bfloat16 if config.train.precision == "bf16" else torch.float32)
    for block in model.modules():
        if isinstance(block, Block):
            block.recompute = config.train.recompute
    micro = config.train.micro_batch
    x = torch.randint(0, config.model.vocab_size - 1, (micro, config.model.length))
    noise = draw_noise(config, 0, torch.arange(micro), torch.device("cpu"))
    with SavedBytes(model) as saved:
        backpropagate(Alone(model), x, None, noise, config)
    return saved.peak


def predicted(config: Config) -> int:
    """By the formula, without what is computed again: saved-tensor hooks do not see that."""
    parts = activation_bytes(config)
    return sum(parts.values()) - parts["again"]


LOMDM = {"name": "lomdm"}


@pytest.mark.parametrize(
    "config",
    [
        config_of(LOMDM),
        config_of(LOMDM, two_samples="joint"),
        config_of(LOMDM, {"dropout": 0.1}),
        config_of(LOMDM, {"dropout": 0.1}, precision="bf16", two_samples="joint"),
        config_of(LOMDM, recompute="attention"),
        config_of(LOMDM, recompute="block", precision="bf16"),
        config_of(LOMDM | {"head": "linear"}),
        config_of(LOMDM | {"stop_gradient": False}),
        config_of(LOMDM | {"schedule": "polynomial"}, two_samples="joint"),
        config_of({"name": "mdlm"}, {"width": 128, "heads": 2}),
        config_of({"name": "genmd4"}, two_samples="joint", recompute="attention"),
        config_of({"name": "window", "order": "blocks"}, precision="bf16"),
        config_of({"name": "ar"}, recompute="attention"),
    ],
    ids=lambda config: " ".join(
        map(
            str,
            [
                *config.objective.model_dump(exclude_defaults=True).values(),
                config.train.two_samples,
                config.train.recompute,
                config.train.precision,
                f"width {config.model.width} dropout {config.model.dropout}",
            ],
        )
    ),
)
def test_the_formula_is_what_hooks_count(config):
    print(f"{predicted(config) / counted(config) - 1:+.2%}")
    assert predicted(config) == pytest.approx(counted(config), rel=0.02)


def owt(form: str, **model) -> Config:
    """The network of configs/owt.yaml in float32, micro-batches of 4."""
    config = load_config(
        CONFIGS / "owt.yaml", ["train.precision=fp32", "train.micro_batch=4", f"train.two_samples={form}"]
    )
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


def test_split_keeps_about_half_of_joint():
    small = {"width": 64, "heads": 4, "length": 128, "vocab_size": 601, "mask_id": 600}
    assert counted(owt("split", **small)) <= 0.55 * counted(owt("joint", **small))
    assert predicted(owt("split")) <= 0.55 * predicted(owt("joint"))


@pytest.mark.slow
def test_split_keeps_about_half_of_joint_at_the_size_of_owt():
    split, joint = counted(owt("split")), counted(owt("joint"))
    print(f"split {split / 2**30:.3f} GiB, joint {joint / 2**30:.3f} GiB: {split / joint:.3f}")
    assert split <= 0.55 * joint
    assert [predicted(owt("split")), predicted(owt("joint"))] == pytest.approx([split, joint], rel=0.02)


def test_tensor_parallel_ranks_share_out_what_lies_between_the_layers_with_sequence_parallel_only():
    def of_block(ranks: int, sequence_parallel: bool) -> float:
        parallel = {"tensor_parallel": ranks, "sequence_parallel": sequence_parallel}
        config = config_of(LOMDM)
        return block_bytes(
            config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)}), "none"
        )

    whole = of_block(1, True)
    assert of_block(4, True) == whole / 4
    channels = 4 * 64
    assert of_block(4, False) == pytest.approx(6 * channels + 12 * channels / 4, rel=0.02)


def counted_and_predicted_on_a_rank(sequence_parallel: bool) -> tuple[int, int]:
    from lomdm_dist.parallel.engine import Blueprint
    from lomdm_dist.parallel.grid import process_grid

    config = config_of(LOMDM, {"width": 128})
    parallel = {"tensor_parallel": 2, "sequence_parallel": sequence_parallel}
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    with process_grid(2) as grid:
        model = Blueprint(config, grid).model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        return counted(config, model), predicted(config)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_formula_is_what_hooks_count_on_a_tensor_parallel_rank(sequence_parallel):
    for by_hooks, by_formula in on_processes(2, counted_and_predicted_on_a_rank, sequence_parallel):
        print(f"{by_formula / by_hooks - 1:+.2%}")
        assert by_formula == pytest.approx(by_hooks, rel=0.05)
