"""Exports come back as training checkpoints, and runs start from weights, on every grid and engine."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from lomdm_dist.cli import main
from lomdm_dist.config import load_config
from lomdm_dist.convert.checkpoint import read_tensor, seal
from lomdm_dist.data.tokenizer import describe, load_tokenizer
from lomdm_dist.errors import UserError
from lomdm_dist.train.checkpoint import Checkpoint
from lomdm_dist.train.inputs import open_inputs
from tests.distributed import grids
from tests.distributed.grids import on_processes
from tests.tiny import randomize, tiny_config

GRIDS = {  # name: processes, overrides
    "one": (1, []),
    "tp2": (2, ["parallel.tensor_parallel=2"]),
    "dp2 ZeRO 3": (2, ["parallel.zero_stage=3"]),
    "dp2 FSDP2": (2, ["parallel.engine=fsdp2"]),
}
SPEED = ["train.micro_batch=4", "optim.warmup_steps=0", "model.dropout=0.0"]


@pytest.fixture(scope="module")
def trip(trained_run, tmp_path_factory) -> Path:
    """A checkpoint `start` with random weights, other raw than ema; its `export`; and that `back` again."""
    folder = tmp_path_factory.mktemp("trip")
    randomize(trained_run.run, folder / "start")
    main(["convert", "to-hf", str(folder / "start"), str(folder / "export")])
    main(["convert", "from-hf", str(folder / "export"), str(folder / "back"), "--json", str(folder / "json")])
    return folder


def same(a: Checkpoint, b: Checkpoint, kind_of_b: str = "ema") -> bool:
    assert a.shapes() == b.shapes()
    return all(
        torch.equal(read_tensor(a, f"ema/{name}"), read_tensor(b, f"{kind_of_b}/{name}"))
        for name in a.shapes()
    )


def refused(*arguments, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "from-hf", *map(str, arguments)])
    assert stopped.value.code == 2
    assert not Path(arguments[1]).exists()
    return capsys.readouterr().err


def test_an_export_comes_back_bit_for_bit(trip):
    start, back = Checkpoint(trip / "start"), Checkpoint(trip / "back")
    assert same(start, back) and same(start, back, "raw")
    for section in ("model", "objective", "optim"):  # an export does not say where data and run were
        assert getattr(back.config, section) == getattr(start.config, section)
    assert back.state.data.tokenizer == start.state.data.tokenizer
    assert back.state.data.packing == "packed" and not back.has_moments and back.state.step == 0
    result = json.loads((trip / "json").read_text())
    assert result["layout"] == "lomdm" and result["max_parameter_difference"] == 0


def test_a_tokenizer_without_padding_comes_back_without(trip, tmp_path):
    """As GPT-2's. An export names a padding token, for a batch needs some; with it, data would be refused."""
    shutil.copytree(trip / "start", tmp_path / "start")
    tokenizer = load_tokenizer(tmp_path / "start/tokenizer")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "start/tokenizer")
    state = Checkpoint(trip / "start").state
    data = state.data.model_copy(update={"tokenizer": describe(tokenizer)})
    seal(tmp_path / "start", state.model_copy(update={"data": data}))
    main(["convert", "to-hf", str(tmp_path / "start"), str(tmp_path / "export")])
    main(["convert", "from-hf", str(tmp_path / "export"), str(tmp_path / "back")])
    assert Checkpoint(tmp_path / "back").state.data.tokenizer == data.tokenizer
    assert data.tokenizer.pad_id is None


def test_its_weights_are_exported_as_they_came(trip, tmp_path):
    main(["convert", "to-hf", str(trip / "back"), str(tmp_path / "again"), "--weights", "raw"])
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (trip / "export" / name).read_bytes()


@pytest.mark.parametrize(
    "grid", ["one", *(pytest.param(name, marks=pytest.mark.slow) for name in GRIDS if name != "one")]
)
def test_round_trip_trains_on_alike(grid, trained_run, tmp_path):
    """Trained on a grid, exported, imported: the same parameters, and the same step on the same grid."""
    processes, place = GRIDS[grid]
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_config(trained_run.data, tmp_path / "first")))

    def train(run: str, steps: int, *more: str) -> None:
        overrides = [*SPEED, *place, f"train.run={tmp_path / run}", f"train.steps={steps}", *more]
        on_processes(processes, grids.train, overrides, None, path)

    train("first", 3)
    main(["convert", "to-hf", str(tmp_path / "first"), str(tmp_path / "export")])
    main(["convert", "from-hf", str(tmp_path / "export"), str(tmp_path / "back")])
    assert same(Checkpoint(tmp_path / "first"), Checkpoint(tmp_path / "back"))
    losses = []
    for run, start in (("direct", "first"), ("round", "back")):
        train(run, 1, f"train.start_from={tmp_path / start}")
        losses.append(json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[0])["loss"])
    assert abs(losses[0] - losses[1]) < 1e-5
    direct, round_trip = Checkpoint(tmp_path / "direct"), Checkpoint(tmp_path / "round")
    assert same(direct, round_trip)
    assert not same(direct, Checkpoint(tmp_path / "first"))  # it has learned
    assert direct.config.train.start_from == tmp_path / "first"


def config_of(trained_run, tmp_path, *overrides: str, objective="lomdm"):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_config(trained_run.data, tmp_path / "run", objective)))
    return load_config(path, overrides)


def test_a_start_sets_weights_and_average_and_nothing_else(trip, trained_run, tmp_path):
    """Rates near zero: what is saved is what the run began with. Heads that the start has not are new."""
    mdlm = tmp_path / "mdlm"
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_config(trained_run.data, mdlm, "mdlm")))
    still = ["optim.learning_rate=1e-30", "optim.heads_learning_rate=1e-30", "train.steps=1"]
    on_processes(1, grids.train, [*still, f"train.start_from={trip / 'back'}"], None, path)
    start, begun = Checkpoint(trip / "start"), Checkpoint(mdlm)
    assert begun.state.ema_updates == 1 and begun.progress.step == 1
    for name in begun.shapes():  # lomdm -> mdlm: the heads are left out
        for kind in ("raw", "ema"):
            assert torch.equal(read_tensor(begun, f"{kind}/{name}"), read_tensor(start, f"ema/{name}"))
    on_processes(
        1,
        grids.train,
        [*still, "objective.name=lomdm", f"train.run={tmp_path / 'lomdm'}", f"train.start_from={mdlm}"],
        None,
        path,
    )
    grown = Checkpoint(tmp_path / "lomdm")
    assert grown.build_model().phi.weight.abs().max() < 1e-20  # zero, but for one step
    name = "backbone.blocks.1.qkv.weight"
    assert torch.equal(read_tensor(grown, f"raw/{name}"), read_tensor(start, f"ema/{name}"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.blocks=3"], "backbone.blocks.2.norm1.weight is missing there, [32] here"),
        (["model.width=64"], "backbone.embedding.weight is [300, 32] there, [300, 64] here"),
        (["model.heads=4"], "model.heads is 2 there, 4 here"),
        (["objective.head=linear"], "phi.block.norm1.weight is [32] there, missing here"),
        (["objective.schedule=polynomial"], "phi.weight is [1, 32] there, [3, 32] here"),
    ],
)
def test_a_start_of_another_model_is_refused(overrides, said, trip, trained_run, tmp_path):
    config = config_of(trained_run, tmp_path, f"train.start_from={trip / 'back'}", *overrides)
    with pytest.raises(UserError, match="of another model") as error:
        open_inputs(config, None)
    assert said in str(error.value)


def test_a_resume_does_not_start_again(trip, trained_run, tmp_path):
    config = config_of(trained_run, tmp_path, "train.start_from=nowhere")
    with pytest.raises(UserError, match="no checkpoint in nowhere"):
        open_inputs(config, None)
    inputs = open_inputs(config, str(trained_run.run))
    assert inputs.start is None and inputs.resumed is not None


def test_an_export_in_several_files(trip, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(trip / "export", tmp_path / "export")
    tensors, where = load_file(tmp_path / "export/model.safetensors"), {}
    for k, name in enumerate(sorted(tensors)):
        where[name] = f"model-{k % 2}.safetensors"
    for file in sorted(set(where.values())):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, tmp_path / "export" / file)
    (tmp_path / "export/model.safetensors").unlink()
    index = tmp_path / "export/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    main(["convert", "from-hf", str(tmp_path / "export"), str(tmp_path / "back")])
    assert same(Checkpoint(trip / "start"), Checkpoint(tmp_path / "back"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t | {"extra": torch.zeros(1)}, "extra is not of the model"),
        (lambda t: {n: v for n, v in t.items() if n != "psi.bias"}, "psi.bias is missing"),
        (lambda t: t | {"phi.weight": torch.zeros(2, 32)}, "phi.weight has the shape [2, 32], not [1, 32]"),
        (
            lambda t: t | {"phi.weight": torch.full((1, 32), torch.nan)},
            "phi.weight holds a number that is not",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change, said, trip, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    shutil.copytree(trip / "export", tmp_path / "export")
    file = tmp_path / "export/model.safetensors"
    save_file(change(load_file(file)), file)
    assert said in refused(tmp_path / "export", tmp_path / "out", capsys=capsys)


def test_what_an_export_lacks_is_said(trip, tmp_path, capsys):
    shutil.copytree(trip / "export", tmp_path / "export")
    (tmp_path / "export/config.yaml").unlink()
    assert "has no config.yaml" in refused(tmp_path / "export", tmp_path / "out", capsys=capsys)
    (tmp_path / "export/tokenizer.json").unlink()
    assert "has no tokenizer" in refused(tmp_path / "export", tmp_path / "out", capsys=capsys)
    (tmp_path / "export/model.safetensors").write_bytes(b"nothing")
    assert "cannot read" in refused(tmp_path / "export", tmp_path / "out", capsys=capsys)
    (tmp_path / "export/model.safetensors").unlink()
    assert "no weights in" in refused(tmp_path / "export", tmp_path / "out", capsys=capsys)
    assert "there is no" in refused(tmp_path / "nowhere", tmp_path / "out", capsys=capsys)
