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
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from lomdm_dist.cli import main
from lomdm_dist.config import SamplerConfig
from lomdm_dist.convert import to_hf
from lomdm_dist.data.shards import ShardSet
from lomdm_dist.evaluate.perplexity import estimate_bound
from lomdm_dist.sample import sample
from lomdm_dist.sample.look import Look
from lomdm_dist.train.checkpoint import Checkpoint
from tests.tiny import prepare_tiny, randomize

TOLERANCE = 1e-5
DRAWS, SEED = 2, 3
STEPS, SAMPLES = 10, 3
FAMILY = {  # of each form of the mathematics one, as overrides of the config
    "lomdm": [],
    "mdlm": ["objective.name=mdlm"],
    "genmd4": ["objective.name=genmd4"],
    "softmax": ["objective.normalize=softmax", "objective.c1=0.4", "objective.c2=3.0"],
    "linear": ["objective.head=linear", "objective.stop_gradient=false"],
    "polynomial": ["objective.schedule=polynomial"],
    "left_to_right": ["objective.name=window"],
    "permutation": ["objective.name=window", "objective.order=permutation", "objective.permutation_seed=5"],
    "blocks": ["objective.name=window", "objective.order=blocks", "objective.block=5"],
    "ar": ["objective.name=ar"],
}
DIFFUSION = [name for name in FAMILY if name != "ar"]
WITHOUT_EXPONENTS = ["polynomial", "left_to_right", "permutation", "blocks"]

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
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, pipeline

# all folders are called `model`: modules cached by name must not be mixed up
models = {{}}
for name in {list(FAMILY)}:
    kind = AutoModelForCausalLM if name == "ar" else AutoModelForMaskedLM
    models[name] = kind.from_pretrained(Path(name) / "model", trust_remote_code=True)

given = np.load("given.npz")
x, z, padded_x, padded_mask = (torch.from_numpy(given[k]) for k in ("x", "z", "padded_x", "padded_mask"))

def bound(model, x, mask=None):
    parts = []
    for rows in torch.arange(len(x)).split(50):  # any batch gives the same
        part = None if mask is None else mask[rows]
        place = dict(first_index=int(rows[0]), total=len(x))
        parts.append(model.nelbo(x[rows], part, draws={DRAWS}, seed={SEED}, **place))
    return torch.cat(parts)

for name, model in models.items():
    assert not model.training and model.config.tie_word_embeddings is False
    with torch.no_grad():
        seen = model(x if name == "ar" else z)
        found = dict(logits=seen.logits)
        if name in ("lomdm", "mdlm", "genmd4", "softmax", "linear"):
            found |= dict(hat_exponents=seen.exponents, exponents=model.order_exponents(x))
    found["bound"] = bound(model, x)
    found["padded_bound"] = bound(model, padded_x, padded_mask)
    if name == "ar":
        found["samples"] = model.sample({SAMPLES}, seed={SEED})
        found["prompted"] = model.sample(2, 12, seed={SEED}, prompt=x[:2, :5], top_p=0.8, temperature=0.7)
    else:
        found["samples"] = model.sample({SAMPLES}, steps={STEPS}, seed={SEED})
        found["prompted"] = model.generate(z[:2, :12], {STEPS}, 0.8, 0.7, {SEED}, num=2, length=14)
    for what, value in found.items():
        np.save(f"{{name}}_{{what}}.npy", value.numpy())

model, tokenizer = models["lomdm"], AutoTokenizer.from_pretrained("lomdm/model", trust_remote_code=True)
assert set(tokenizer("text")) == {{"input_ids", "attention_mask"}}
for token in ("mask", "pad", "eos"):
    assert getattr(tokenizer, token + "_token_id") == getattr(model.config, token + "_token_id") is not None
batch = tokenizer(["Some [MASK] text", "more"], padding=True, return_tensors="pt")
assert (batch["input_ids"] == model.config.mask_token_id).sum() == 1
assert model(**batch).logits.shape == (*batch["input_ids"].shape, len(tokenizer))
assert len(tokenizer) == model.config.vocab_size == len(model.get_input_embeddings().weight)

one, two = pipeline("fill-mask", model=model, tokenizer=tokenizer)(["Some [MASK] text", "[MASK] [MASK]"])
assert len(one) == 5 and len(two) == 2 and 0 < one[0]["score"] < 1 and "Some" in one[0]["sequence"]
causal = models["ar"].generate(x[:2, :4], max_new_tokens=3, do_sample=False)
assert causal.shape == (2, 7) and torch.equal(causal[:, :4], x[:2, :4])
assert torch.equal(causal[:, 4], models["ar"](x[:2, :4]).logits[:, -1].argmax(dim=1))
assert model.generation_config.steps == 16 and model.generate(num=2).shape == (2, 16)

for name in ("lomdm", "ar"):
    card = Path(f"{{name}}/model/README.md").read_text()
    for code in re.findall(r"```python\\n(.+?)```", card, re.DOTALL):
        exec(code.replace('"model"', f'"{{name}}/model"'))
"""


def export(run: Path, folder: Path, overrides: list[str]) -> SimpleNamespace:
    """Randomise a run's checkpoint and export it by the command line."""
    checkpoint, out = randomize(run, folder / "step-8", overrides), folder / "model"
    json_file = folder / "result.json"
    main(["convert", "to-hf", str(checkpoint.folder), str(out), "--json", str(json_file)])
    result = json.loads(json_file.read_text())
    return SimpleNamespace(checkpoint=checkpoint, out=out, result=result)


def load(folder: Path):
    return AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def exports(trained_run, tmp_path_factory) -> dict[str, SimpleNamespace]:
    folder = tmp_path_factory.mktemp("exports")
    return {name: export(trained_run.run, folder / name, changes) for name, changes in FAMILY.items()}


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


def found_by(folder: Path, name: str, what: str) -> np.ndarray:
    return np.load(folder / f"{name}_{what}.npy")


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILY)
def test_a_process_without_this_package_computes_the_same(name, exports, given, strangers_work):
    model = exports[name].checkpoint.build_model("ema")
    if name == "ar":
        features, condition = model.predict_next(given["x"])
        logits = model.backbone.output(features[:, 1:], condition)
        assert difference(found_by(strangers_work, name, "logits"), logits) < TOLERANCE
        return
    look = Look(model, given["z"])
    features, _, condition = model.see(given["z"])
    logits = model.backbone.output(features, condition)
    assert difference(found_by(strangers_work, name, "logits"), logits) < TOLERANCE
    if name not in WITHOUT_EXPONENTS:
        exponents = model.order(given["x"]).exponent.expand(given["x"].shape)
        assert difference(found_by(strangers_work, name, "hat_exponents"), look.exponents()) < TOLERANCE
        assert difference(found_by(strangers_work, name, "exponents"), exponents) < TOLERANCE
    if name == "lomdm":  # or the comparison would say little
        assert min(look.exponents().std(), exponents.std()) > 0.01
        assert (look.exponents() - exponents).abs().mean() > 0.01


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_bound_is_that_of_eval_ppl(name, packing, exports, shards, strangers_work):
    checkpoint, data = exports[name].checkpoint, shards[packing]
    model = checkpoint.build_model("ema")
    expected = estimate_bound(model, data, checkpoint.config, np.arange(len(data)), DRAWS, SEED)
    found = found_by(strangers_work, name, "bound" if packing == "packed" else "padded_bound")
    assert found.shape == (len(data),) and found.dtype == np.float64
    assert abs(found.sum() / expected["tokens"] - expected["nll_per_token"]) < TOLERANCE


@pytest.mark.parametrize("name", FAMILY)
def test_samples_are_those_of_lomdm_sample(name, exports, given, shards, strangers_work):
    checkpoint, never = exports[name].checkpoint, (shards["packed"].tokenizer.pad_id,)
    model, length = checkpoint.build_model("ema"), checkpoint.config.model.length
    expected = sample(model, SAMPLES, length, STEPS, SEED, never).token_ids
    assert np.array_equal(found_by(strangers_work, name, "samples"), expected.numpy())
    rows, shown = (given["x"], 5) if name == "ar" else (given["z"], 12)
    prompts = torch.full((2, 12 if name == "ar" else 14), model.mask_id)
    prompts[:, :shown] = rows[:2, :shown]
    prompts = prompts.repeat_interleave(2, dim=0)
    settings = SamplerConfig(top_p=0.8, temperature=0.7)
    expected = sample(model, 4, prompts.shape[1], STEPS, SEED, never, settings, prompts).token_ids
    found = found_by(strangers_work, name, "prompted")
    assert np.array_equal(found, expected.numpy())
    stays = prompts != model.mask_id
    assert np.array_equal(found[stays], prompts[stays]) and not (found == model.mask_id).any()


def test_result_and_folder(exports):
    for name, exported in exports.items():
        result, model = exported.result, exported.checkpoint.build_model("ema")
        orders = result["max_exponent_difference"]
        assert (orders is None) == (name == "ar") and result["checked"] == "logits"
        assert max(result["max_logit_difference"], result["max_bound_difference"], orders or 0) < TOLERANCE
        assert result["parameters"] == sum(p.numel() for p in model.parameters())
        saved = safetensors.torch.load_file(exported.out / "model.safetensors")
        assert all(torch.equal(saved.pop(key), tensor) for key, tensor in model.state_dict().items())
        assert not saved
        files = {path.name for path in exported.out.iterdir()}
        assert files >= {"configuration_lomdm.py", "modeling_lomdm.py", "config.yaml", "README.md"}


def test_the_config_holds_the_objective(exports):
    for name, exported in exports.items():
        found = json.loads((exported.out / "config.json").read_text())
        left_out = {"time", "time_eps", "permutation_seed"}
        settings = exported.checkpoint.config.objective.model_dump(exclude=left_out)
        assert found["objective"] == settings.pop("name") and found["tie_word_embeddings"] is False
        if name == "permutation":  # drawn from a seed; written out
            assert sorted(found["permutation"]) == list(range(16)) != found["permutation"]
            settings.pop("permutation")
        assert {key: found[key] for key in settings} == settings


@pytest.mark.parametrize("name", ["lomdm", "softmax", "genmd4"])
def test_padding_changes_nothing(name, exports, given):
    """Neither the logits nor, where they are normalised over the text, the exponents."""
    model, z = load(exports[name].out), given["z"][:4]
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


@pytest.mark.parametrize("name", ["genmd4", "polynomial", "ar"])
def test_attention_in_documents_of_other_objectives(name, exports, given, tmp_path):
    """By the export's check of itself, whose batch has an end of document inside."""
    checkpoint = exports[name].checkpoint
    eos_id = checkpoint.state.data.tokenizer.eos_id
    checkpoint = Checkpoint(checkpoint.folder, ["data.attend=document", f"model.eos_id={eos_id}"])
    result = to_hf.to_hf(checkpoint, tmp_path / "out")
    assert max(result["max_logit_difference"], result["max_bound_difference"]) < TOLERANCE
    kind = AutoModelForCausalLM if name == "ar" else AutoModelForMaskedLM
    folders = tmp_path / "out", exports[name].out
    apart, together = (kind.from_pretrained(folder, trust_remote_code=True) for folder in folders)
    assert not torch.allclose(apart.nelbo(given["x"][:8]), together.nelbo(given["x"][:8]), atol=0.01)


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


@pytest.mark.parametrize(("name", "damage"), [("backbone.output.bias", 1e-6), ("psi.weight", float("nan"))])
def test_an_export_whose_weights_differ_is_not_published(name, damage, exports, tmp_path, monkeypatch):
    def write_damaged(tensors, path, metadata):
        tensors[name].view(-1)[7] += damage
        save_file(tensors, path, metadata)

    save_file = to_hf.save_file
    monkeypatch.setattr(to_hf, "save_file", write_damaged)
    with pytest.raises(RuntimeError, match=f"{name} in .* differs from checkpoint"):
        to_hf.to_hf(exports["lomdm"].checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "changed", "what"),
    [
        ("lomdm", {"num_attention_heads": 1}, "logits"),
        ("lomdm", {"c1": 0.71}, "psi"),
        ("left_to_right", {"window_eps": 0.01}, "psi"),
        ("ar", {"mask_token_id": 5}, "logits"),
    ],
)
def test_an_export_that_computes_something_else_is_not_published(
    name, changed, what, exports, tmp_path, monkeypatch
):
    """The weights are right; the formula is not."""
    settings = to_hf.hf_config(exports[name].checkpoint).to_dict() | changed
    monkeypatch.setattr(to_hf, "hf_config", lambda _: to_hf.LomdmConfig(**settings))
    with pytest.raises(RuntimeError, match=f"differs from checkpoint .*{what}"):
        to_hf.to_hf(exports[name].checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_large_models_in_shards_and_bfloat16(exports, tmp_path):
    """Several files and an index; what is computed is that of the rounded weights, in float32."""
    checkpoint, out = exports["lomdm"].checkpoint, tmp_path / "out"
    result = to_hf.to_hf(checkpoint, out, "ema", "bfloat16", max_shard_gb=5e-5)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) == result["files"] > 2 and sorted(set(index["weight_map"].values())) == files
    assert all((out / file).stat().st_size < 60_000 for file in files)
    assert result["max_logit_difference"] < TOLERANCE < result["rounding"] < 1
    ours, exported = checkpoint.build_model("ema"), load(out)
    assert exported.dtype == torch.bfloat16
    assert not (exported.generate(num=1) == exported.config.mask_token_id).any()
    for name, parameter in exported.state_dict().items():
        assert torch.equal(parameter, ours.get_parameter(name).bfloat16())


def test_parameters_alone_can_be_checked(exports, tmp_path):
    result = to_hf.to_hf(exports["lomdm"].checkpoint, tmp_path / "out", check="parameters")
    assert result["checked"] == "parameters" and "max_logit_difference" not in result


def test_configs_of_older_exports_are_read(exports, given, tmp_path):
    """Before the other objectives were exported, config.json lacked these keys."""
    folder = shutil.copytree(exports["lomdm"].out, tmp_path / "older")
    config, newer = json.loads((folder / "config.json").read_text()), load(exports["lomdm"].out)
    lacking = ["never_token_ids", "schedule", "normalize", "head", "stop_gradient", "subs"]
    for key in [*lacking, "order", "permutation", "block", "window_eps"]:
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    older = load(folder)
    with torch.no_grad():
        assert torch.equal(older(given["z"]).logits, newer(given["z"]).logits)
    assert torch.equal(older.generate(num=2, seed=1), newer.generate(num=2, seed=1))


def test_subs_and_loss_without_masks(exports, given):
    model, z = load(exports["lomdm"].out), given["z"][:4]
    masked = z == model.config.mask_token_id
    with torch.no_grad():
        plain, subs = model(z).logits, model(z, subs=True).logits
        assert model(given["x"][:4], labels=given["x"][:4]).loss == 0  # nothing is masked: no number but 0
    assert torch.allclose(subs.exp().sum(dim=-1), torch.ones(z.shape))
    assert torch.equal(subs[~masked].argmax(dim=-1), z[~masked])
    assert torch.equal(subs[masked], plain[masked].log_softmax(dim=-1))


@pytest.mark.parametrize("name", ["lomdm", "ar"])
def test_gradient_checkpointing_changes_no_gradient(name, exports, given):
    kind = AutoModelForCausalLM if name == "ar" else AutoModelForMaskedLM
    z = given["x" if name == "ar" else "z"][:4]
    gradients = []
    for enabled in (False, True):
        model = kind.from_pretrained(exports[name].out, trust_remote_code=True).train()
        if enabled:
            model.gradient_checkpointing_enable()
        model(z, labels=given["x"][:4]).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and "backbone.blocks.0.qkv.weight" in gradients[0]
    assert all(torch.allclose(gradients[0][n], gradients[1][n], atol=1e-6) for n in gradients[0])


def test_a_causal_model_takes_padding_on_either_side(exports, given):
    model = AutoModelForCausalLM.from_pretrained(exports["ar"].out, trust_remote_code=True)
    x, pad = given["x"][:3, :10], torch.full((3, 4), 2)
    seen, none = torch.ones(3, 10), torch.zeros(3, 4)
    with torch.no_grad():
        alone = model(x, labels=x)
        left = model(torch.cat([pad, x], 1), torch.cat([none, seen], 1)).logits[:, 4:]
        right = model(torch.cat([x, pad], 1), torch.cat([seen, none], 1)).logits[:, :10]
    assert difference(left.numpy(), alone.logits) < TOLERANCE > difference(right.numpy(), alone.logits)
    assert torch.isclose(alone.loss.double(), model.nelbo(x).sum() / x.numel())  # the first token counts


def test_the_card_states_the_bound_and_no_place_of_this_machine(trained_run, exports, tmp_path):
    """From what `lomdm eval ppl` left in the run, if it is of this step and these weights; or measured."""
    data, run = str(trained_run.data / "valid"), tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-8"
    shutil.copytree(exports["lomdm"].checkpoint.folder, checkpoint)
    to_hf.to_hf(Checkpoint(checkpoint), tmp_path / "before")
    command = ["eval", "ppl", "--checkpoint", str(checkpoint), "--data", data]
    main([*command, "--json", str(run / "eval" / "ppl.json")])
    result = json.loads((run / "eval" / "ppl.json").read_text()) | {"command": ["lomdm", *command]}
    (run / "eval" / "ppl.json").write_text(json.dumps(result))  # pytest's own command stood there
    main([*command, "objective.c2=0", "--json", str(run / "eval" / "unordered.json")])  # another model's
    for weights in ("ema", "raw"):
        to_hf.to_hf(Checkpoint(checkpoint), tmp_path / weights, weights)
    main(["convert", "to-hf", str(checkpoint), str(tmp_path / "asked"), "--weights", "raw", "--data", data])
    cards = {n: ModelCard.load(tmp_path / n / "README.md") for n in ("before", "ema", "raw", "asked")}
    stated = f"{result['nll_per_token']:.4f} ± {result['standard_error']:.4f} nats a token"
    told = {name: (stated in card.text, "Not measured" in card.text) for name, card in cards.items()}
    none, other = (False, True), (False, False)
    assert told == {"before": none, "ema": (True, False), "raw": none, "asked": other}
    for text in (
        "Convention: preset bound; bound uncut; time pinned",
        "recipe text, official split",
        "standard error",
    ):
        assert text in cards["ema"].text and text in cards["asked"].text
    assert (cards["ema"].data.pipeline_tag, cards["ema"].data.library_name) == ("fill-mask", "transformers")
    here = str(trained_run.run.parent).encode()
    assert not [path for path in (tmp_path / "ema").iterdir() if here in path.read_bytes()]


def test_a_size_that_is_none_is_refused(exports, tmp_path, capsys):
    given = [str(exports["lomdm"].checkpoint.folder), str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "to-hf", *given, "--max-shard-gb", "0"])
    assert stopped.value.code == 2 and "--max-shard-gb" in capsys.readouterr().err
