from pathlib import Path

import pytest

from lomdm_dist.config import load_config
from lomdm_dist.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs"
DEMO = CONFIGS / "demo.yaml"


def test_saved_config_loads_as_the_same(tmp_path):
    config = load_config(DEMO, ["optim.learning_rate=1e-4", "train.steps=7"])
    assert (config.optim.learning_rate, config.train.steps) == (1e-4, 7)
    config.save(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lerning_rate=1", "unknown key optim.lerning_rate; did you mean optim.learning_rate?"),
        ("optmi.clip=1", "unknown key optmi; did you mean optim?"),
        ("objective.c2=0.7", "c1 > c2 >= 0 keeps every exponent positive; c1 = 0.7, c2 = 0.7"),
        (
            "objective={name: mdlm, c1: 0.7, c2: 0.65}",
            "mdlm means c1 = 1 and c2 = 0, not c1 = 0.7, c2 = 0.65",
        ),
        ("objective={name: window, c1: 1, c2: 0}", "objective.c1 and objective.c2 are no keys of window"),
        ("objective={name: ar, time: uniform}", "objective.time is no key of ar"),
        ("objective.name=lomdn", "name is one of lomdm, mdlm, genmd4, window, ar, got 'lomdn'"),
        (
            "objective=window",
            "objective is a section whose name is one of lomdm, mdlm, genmd4, window, ar, got 'w",
        ),
        ("objective=null", "objective is a section whose name is one of"),
        ("objective.nme=window", "unknown key objective.nme; did you mean objective.name?"),
        ("objective.time=pinned", "objective.time: pinned is for fixed orders"),
        ("objective.stop_gradient=1", "objective.stop_gradient: true or false is wanted, got 1"),
        ("objective={c1: 0.3, c2: 0.3}", "c1 > c2 >= 0 keeps every exponent positive; c1 = 0.3, c2 = 0.3"),
        ("objective={c1: 1e-3, c2: 0}", "objective.c1: input should be greater than or equal to 0.01"),
        (
            "objective={normalize: softmax, c2: 1e300}",
            "objective.c2: input should be less than or equal to 1000",
        ),
        ("objective={name: window, block: 8}", "block is for order blocks, but order is left_to_right"),
        (
            "objective={name: window, order: blocks, permutation_seed: 3}",
            "permutation_seed is for order permu",
        ),
        ("objective.time_eps=0.999", "objective.time_eps: input should be less than or equal to 0.5"),
        ("sampler.temperature=1e-308", "sampler.temperature: input should be greater than or equal to"),
        (
            "objective={name: window, permutation: [0]}",
            "permutation is for order permutation, but order is left",
        ),
        (
            "objective={name: window, order: permutation, permutation: [0, 0]}",
            "permutation does not hold each of 0 .. 1 once",
        ),
        (
            "objective={name: window, order: permutation, permutation: [1, 0]}",
            "objective.permutation has 2 positions, model.length is 64",
        ),
        ("objective={name: window, order: blocks, block: 65}", "block 65 is larger than model.length 64"),
        ("objective={name: window, window_eps: 0}", "objective.window_eps: input should be greater than"),
        ("evaluate.time_eps=1", "evaluate.time_eps: input should be less than"),
        ("model.heads=5", "width 96 is not divisible by heads 5"),
        ("model.heads=96", "width / heads = 1 is odd"),
        ("model.mask_id=512", "mask_id 512 is outside vocab_size 512"),
        ("model.width=1000000000", "model.width: input should be less than or equal to 1048576"),
        ("data.train=[3]", "data.train.0: {key: value, ...} is wanted, got 3"),
        ("train.micro_batch=0", "train.micro_batch: a number of 1 or more is wanted, or auto, got 0"),
        ("train.micro_batch=some", "a number of 1 or more is wanted, or auto, got 'some'"),
        ("train.micro_batch=3", "global_batch 16 is not a multiple of micro_batch 3"),
        ("train.steps=many", "train.steps: input should be a valid integer"),
        ("train.precision=bf15", "train.precision: input should be 'bf16' or 'fp32', got 'bf15'"),
        ("train.steps=true", "train.steps: input should be a valid integer, got True"),
        ("optim.learning_rate=true", "optim.learning_rate: a number is wanted, not true or false"),
        ("train.steps=1:30", "train.steps: input should be a valid integer, got '1:30'"),
        ("train.steps=!!int foo", "the value is not valid YAML"),
        ("train.seed=100000000000000000000000000", "train.seed: input should be less than"),
        ("optim.learning_rate=1e38", "optim.learning_rate: input should be less than"),
        ("optim.clip=.nan", "optim.clip: input should be"),
        ("parallel.zero_stage=4", "parallel.zero_stage: input should be less than or equal to 3, got 4"),
        ("train=3", "train: {key: value, ...} is wanted, got 3"),
        ("model.width.x=1", "width is a value, not a section"),
        ("steps", "'steps' is not of the form section.key=value"),
        ("train.steps=[", "the value is not valid YAML"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(override, message):
    with pytest.raises(UserError) as error:
        load_config(DEMO, [override])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_list_of_paths_is_a_mixture_of_equal_weights():
    assert load_config(DEMO, ["data.train=[a, b]"]) == load_config(
        DEMO, ["data.train=[{path: a}, {path: b}]"]
    )


@pytest.mark.parametrize("text", ["runs/a #1", "123", "2024-01-02", "{x}", "yes", "naïve é"])
def test_paths_and_names_are_taken_as_they_stand(text):
    config = load_config(DEMO, [f"train.run={text}", f"wandb.name={text}"])
    assert (str(config.train.run), config.wandb.name) == (text, text)


def test_a_section_without_a_name_is_lomdm_and_old_mdlm_configs_load():
    assert load_config(DEMO, ["objective={c1: 0.8}"]).objective.name == "lomdm"
    said = ["objective={name: mdlm, c1: 1, c2: 0}"]
    assert load_config(DEMO, said) == load_config(DEMO, ["objective={name: mdlm}"])


def test_another_objective_leaves_the_keys_of_the_old_one_behind():
    """But for its times; and what the command line says itself must fit."""
    lm1b = CONFIGS / "lm1b.yaml"
    for name in ("mdlm", "genmd4", "window"):
        objective = load_config(lm1b, [f"objective.name={name}"]).objective
        assert (objective.name, objective.time) == (name, "uniform")
    assert load_config(lm1b, ["objective.name=ar"]).objective.name == "ar"
    blocks = ["objective.order=blocks", "objective.name=window", "objective.block=8"]
    assert load_config(DEMO, blocks).objective.block == 8
    assert load_config(DEMO, ["objective.name=lomdm"]) == load_config(DEMO)
    with pytest.raises(UserError, match=r"objective\.c1 is no key of window"):
        load_config(DEMO, ["objective.name=window", "objective.c1=1"])


@pytest.mark.parametrize(
    "path",
    sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("objectives/*.yaml")]),  # sweeps are no configs
    ids=lambda path: path.stem,
)
def test_every_objective_is_saved_with_its_own_keys_and_loads_again(tmp_path, path):
    config = load_config(path)
    config.save(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_bf16_without_master_weights_is_refused():
    with pytest.raises(UserError, match="fp32 master weights"):
        load_config(DEMO, ["train.precision=bf16", "parallel.zero_stage=0"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "is not valid YAML"),
        ("just text", "holds no sections"),
        ("train: {steps: 1, steps: 2}", "'steps' stands twice"),
        ("model: {width: !!python/object/apply:os.system ['true']}", "is not valid YAML"),
        ("data: {train: a, valid: b}", "model is missing; train is missing"),
    ],
)
def test_unreadable_files_say_so(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(path)
    with pytest.raises(UserError, match=r"no config file .*; did you mean .*bad\.yaml\?"):
        load_config(tmp_path / "bat.yaml")


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 1)])
def test_accumulation_fills_the_global_batch(ranks, micro_batches):
    assert load_config(DEMO).accumulation(ranks) == micro_batches


def test_a_batch_that_does_not_divide_is_refused_with_the_arithmetic():
    with pytest.raises(UserError, match=r"16 does not divide over 3 .*micro_batch 8 = 24: 16 / 24 = 0.667"):
        load_config(DEMO).accumulation(3)


def test_all_that_cannot_be_is_said_at_once():
    """Of one section, and between sections."""
    for overrides, said in (
        (["model.heads=5", "model.mask_id=9999"], ("not divisible by heads 5", "mask_id 9999 is outside")),
        (["parallel.tensor_parallel=5", "kernels.loss=plain"], ("heads 3 do not", "loss plain has no")),
    ):
        with pytest.raises(UserError) as error:
            load_config(DEMO, overrides)
        assert all(part in str(error.value) for part in said), error.value
