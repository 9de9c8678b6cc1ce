"""An export is loaded by a process that has no lomdm_dist, and must compute what the checkpoint does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForMaskedLM

from lomdm_dist.cli import main
from lomdm_dist.convert import to_hf
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.evaluate.perplexity import estimate_bound
from lomdm_dist.sample import sample
from lomdm_dist.train.checkpoint import Checkpoint
from tests.tiny import prepare_tiny, randomize

TOLERANCE = 1e-5
DRAWS, SEED = 2, 3
STEPS, SAMPLES = 10, 3

# Run with `python -I`, so without PYTHONPATH and the working folder, and with an empty home.
STRANGER = f"""
import re, sys
from pathlib import Path
for name in ("lomdm_dist", "deepspeed", "megatron"):
    sys.modules[name] = None  # importing it raises, installed or not
try:
    import lomdm_dist
except ImportError:
    pass
else:
    raise AssertionError("lomdm_dist can be imported")

import numpy as np, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

# both folders are called `model`: modules cached by name must not be mixed up
models = {{}}
for name in ("lomdm", "mdlm"):
    models[name] = AutoModelForMaskedLM.from_pretrained(Path(name) / "model", trust_remote_code=True)

given = np.load("given.npz")
x, z, padded_x, padded_mask = (torch.from_numpy(given[k]) for k in ("x", "z", "padded_x", "padded_mask"))

def bound(model, x, mask=None):
    parts = []
    for rows in torch.arange(len(x)).split(50):  # any batch gives the same
        part = None if mask is None else mask[rows]
        parts.append(model.nelbo(x[rows], part, {DRAWS}, {SEED}, first_index=int(rows[0]), total=len(x)))
    return torch.cat(parts)

for name, model in models.items():
    assert not model.training and model.config.objective == name
    with torch.no_grad():
        seen = model(z)
        found = dict(logits=seen.logits, hat_exponents=seen.exponents, exponents=model.order_exponents(x))
    found["bound"] = bound(model, x)
    found["padded_bound"] = bound(model, padded_x, padded_mask)
    found["samples"] = model.sample({SAMPLES}, steps={STEPS}, seed={SEED})
    for what, value in found.items():
        np.save(f"{{name}}_{{what}}.npy", value.numpy())

tokenizer, config = AutoTokenizer.from_pretrained("lomdm/model"), models["lomdm"].config
assert set(tokenizer("text")) == {{"input_ids", "attention_mask"}}
for token in ("mask", "pad", "eos"):
    assert getattr(tokenizer, token + "_token_id") == getattr(config, token + "_token_id") is not None
batch = tokenizer(["Some [MASK] text", "more"], padding=True, return_tensors="pt")
assert (batch["input_ids"] == config.mask_token_id).sum() == 1
assert models["lomdm"](**batch).logits.shape == (*batch["input_ids"].shape, len(tokenizer))

card = Path("lomdm/model/README.md").read_text()
code = re.search(r"```python\\n(.+?)```", card, re.DOTALL)[1].replace('"model"', '"lomdm/model"')
exec(code)
"""


def export(run: Path, folder: Path) -> SimpleNamespace:
    """Randomise a run's checkpoint and export it by the command line."""
    checkpoint, out = randomize(run, folder / "step-8"), folder / "model"
    json_file = folder / "result.json"
    main(["convert", "to-hf", str(checkpoint.folder), str(out), "--json", str(json_file)])
    result = json.loads(json_file.read_text())
    return SimpleNamespace(checkpoint=checkpoint, out=out, result=result)


def load(folder: Path):
    return AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def exports(trained_run, trained_mdlm_run, tmp_path_factory) -> dict[str, SimpleNamespace]:
    folder = tmp_path_factory.mktemp("exports")
    runs = {"lomdm": trained_run.run, "mdlm": trained_mdlm_run.run}
    return {name: export(run, folder / name) for name, run in runs.items()}


@pytest.fixture(scope="module")
def shards(trained_run, tmp_path_factory) -> dict[str, ShardSet]:
    """All validation sequences, packed and padded, by one tokenizer."""
    padded = prepare_tiny(
        tmp_path_factory.mktemp("padded") / "data", "padded", str(trained_run.data / "tokenizer")
    )
    return {"packed": ShardSet(trained_run.data / "valid"), "padded": ShardSet(padded / "valid")}


@pytest.fixture(scope="module")
def given(shards) -> dict[str, torch.Tensor]:
    """Validation rows, clean and masked; padded rows and their attention mask."""
    x, _ = shards["packed"].batch(np.arange(len(shards["packed"])), "cpu")
    padded_x, padded_mask = shards["padded"].batch(np.arange(len(shards["padded"])), "cpu")
    masked = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    z = torch.where(masked, shards["packed"].tokenizer.mask_id, x)
    return {"x": x, "z": z, "padded_x": padded_x, "padded_mask": padded_mask.long()}


@pytest.fixture(scope="module")
def strangers_work(exports, given, tmp_path_factory) -> Path:
    """The folder in which a fresh process saved what it computed with copies of the exports."""
    folder = tmp_path_factory.mktemp("stranger")
    for name, exported in exports.items():
        shutil.copytree(exported.out, folder / name / "model")
    np.savez(folder / "given.npz", **{name: tensor.numpy() for name, tensor in given.items()})
    (folder / "home").mkdir()
    environment = {"HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.environ["PATH"]
    command = [sys.executable, "-I", "-c", STRANGER]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,  # nobody answers a question whether to trust the code
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def difference(found: np.ndarray, expected: torch.Tensor) -> float:
    """Largest absolute difference; -inf equals -inf."""
    expected = expected.numpy()
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return np.abs(np.where(found == expected, 0.0, found) - np.where(found == expected, 0.0, expected)).max()


@pytest.mark.parametrize("name", ["lomdm", "mdlm"])
def test_a_process_without_this_package_computes_the_same(name, exports, given, strangers_work):
    model = exports[name].checkpoint.build_model("ema")
    with torch.no_grad():
        features, reverse, condition = model.see(given["z"])
        hat_exponents = reverse.exponent.expand(given["z"].shape)
        expected = {
            "logits": model.backbone.output(features, condition),
            "hat_exponents": hat_exponents,
            "exponents": model.order(given["x"]).exponent.expand(given["x"].shape),
        }
    for what, tensor in expected.items():
        assert difference(np.load(strangers_work / f"{name}_{what}.npy"), tensor) < TOLERANCE
    if name == "lomdm":  # or the comparison would say little
        assert min(hat_exponents.std(), expected["exponents"].std()) > 0.01
        assert (hat_exponents - expected["exponents"]).abs().mean() > 0.01


@pytest.mark.parametrize("name", ["lomdm", "mdlm"])
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_bound_is_that_of_eval_ppl(name, packing, exports, shards, strangers_work):
    checkpoint, data = exports[name].checkpoint, shards[packing]
    model = checkpoint.build_model("ema")
    expected = estimate_bound(model, data, checkpoint.config, np.arange(len(data)), DRAWS, SEED)
    what = "bound" if packing == "packed" else "padded_bound"
    found = np.load(strangers_work / f"{name}_{what}.npy")
    assert found.shape == (len(data),) and found.dtype == np.float64
    assert abs(found.sum() / expected["tokens"] - expected["nll_per_token"]) < TOLERANCE


@pytest.mark.parametrize("name", ["lomdm", "mdlm"])
def test_samples_are_those_of_lomdm_sample(name, exports, shards, strangers_work):
    config, tokenizer = exports[name].checkpoint.config.model, shards["packed"].tokenizer
    model, never = exports[name].checkpoint.build_model("ema"), (tokenizer.pad_id,)
    expected = sample(model, SAMPLES, config.length, STEPS, SEED, never).token_ids
    assert np.array_equal(np.load(strangers_work / f"{name}_samples.npy"), expected.numpy())


def test_result_and_folder(exports):
    for exported in exports.values():
        assert exported.result["max_logit_difference"] < TOLERANCE
        assert exported.result["max_exponent_difference"] < TOLERANCE
        model = exported.checkpoint.build_model("ema")
        assert exported.result["parameters"] == sum(p.numel() for p in model.parameters())
        saved = safetensors.torch.load_file(exported.out / "model.safetensors")
        assert all(torch.equal(saved.pop(name), tensor) for name, tensor in model.state_dict().items())
        assert not saved and not exported.out.with_name("model.partial").exists()
        files = {path.name for path in exported.out.iterdir()}
        assert files >= {"configuration_lomdm.py", "modeling_lomdm.py", "config.yaml", "README.md"}


def test_padding_changes_nothing(exports, given):
    model, z = load(exports["lomdm"].out), given["z"][:4]
    short, mask = z[:, :10], (torch.arange(16) < 10).long().repeat(4, 1)
    garbage = torch.where(mask == 1, z, 7)
    with torch.no_grad():
        alone, padded = model(short), model(garbage, attention_mask=mask)
        orders = model.order_exponents(short), model.order_exponents(garbage, attention_mask=mask)
    for found, expected in [(padded.logits, alone.logits), (padded.exponents, alone.exponents), orders[::-1]]:
        assert difference(found[:, :10].numpy(), expected) < TOLERANCE


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_attention_in_documents_is_exported(packing, exports, shards, tmp_path_factory):
    """Orders and bound of texts that hold several documents."""
    data, tmp_path = shards[packing], tmp_path_factory.mktemp("documents")
    overrides = ["data.attend=document", f"model.eos_id={data.tokenizer.eos_id}"]
    checkpoint = Checkpoint(exports["lomdm"].checkpoint.folder, overrides)
    to_hf.to_hf(checkpoint, tmp_path / "model", "ema")
    model, exported = checkpoint.build_model("ema"), load(tmp_path / "model")
    x, valid = data.batch(np.arange(len(data)), "cpu")
    with torch.no_grad():
        order = model.order(x, valid).exponent.expand(x.shape)
    mask = None if valid is None else valid.long()
    assert difference(exported.order_exponents(x, mask).detach().numpy(), order) < TOLERANCE
    if packing == "packed":  # padded, each has one
        assert (
            difference(load(exports["lomdm"].out).order_exponents(x).detach().numpy(), order) > 10 * TOLERANCE
        )
    expected = estimate_bound(model, data, checkpoint.config, np.arange(len(data)), DRAWS, SEED)
    found = exported.nelbo(x, mask, DRAWS, SEED).detach()
    assert abs(found.sum().item() / expected["tokens"] - expected["nll_per_token"]) < TOLERANCE


def test_loss_is_the_mean_over_masked_labels(exports, given):
    model, x, z = load(exports["lomdm"].out), given["x"][:4], given["z"][:4]
    labels = x.masked_fill(torch.arange(16) % 3 == 0, -100)
    output = model(z, labels=labels)
    chosen = (z != x) & (labels != -100)
    expected = -output.logits.log_softmax(-1)[chosen].gather(1, x[chosen][:, None]).mean()
    assert torch.isclose(output.loss, expected)
    output.loss.backward()
    assert torch.equal(model(z, labels=labels, return_dict=False)[0], output.loss)


def test_a_folder_with_content_is_refused(exports, capsys):
    exported = exports["lomdm"]
    before = {path: path.stat().st_mtime_ns for path in exported.out.iterdir()}
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "to-hf", str(exported.checkpoint.folder), str(exported.out)])
    assert stopped.value.code == 2 and "nothing is overwritten" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in exported.out.iterdir()}


def test_raw_weights_into_an_empty_folder(exports, tmp_path):
    checkpoint = exports["lomdm"].checkpoint
    to_hf.to_hf(checkpoint, tmp_path, "raw")
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["phi.weight"], checkpoint.build_model("raw").phi.weight)


@pytest.mark.parametrize("name", ["backbone.output.bias", "phi.weight", "psi.weight"])
@pytest.mark.parametrize("damage", [0.1, float("nan")])
def test_an_export_that_differs_is_not_published(name, damage, exports, tmp_path, monkeypatch):
    def write_damaged(model, config, folder):
        wrong = exports["lomdm"].checkpoint.build_model("ema")
        wrong.get_parameter(name).data.view(-1)[7] += damage
        write(wrong, config, folder)

    write = to_hf._write_model
    monkeypatch.setattr(to_hf, "_write_model", write_damaged)
    with pytest.raises(RuntimeError, match="differs from checkpoint"):
        to_hf.to_hf(exports["lomdm"].checkpoint, tmp_path / "out", "ema")
    assert not (tmp_path / "out").exists()
