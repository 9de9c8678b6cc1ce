"""The whole of what a stranger does with an export, in an environment that has never seen this package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lomdm_dist.convert.to_hf import to_hf
from tests.tiny import randomize

# accelerate is what `Trainer` itself asks for, and nothing else here does
PACKAGES = ["torch", "transformers", "safetensors", "tokenizers", "accelerate==1.15.0"]
ROOT = Path(__file__).parents[2]

STRANGER = """
import importlib.util, socket

for absent in ("lomdm_dist", "deepspeed", "megatron", "pydantic_settings", "webdataset", "tests"):
    assert importlib.util.find_spec(absent) is None, absent

def no_network(*_):
    raise AssertionError("something asked for the network")

socket.socket.connect = socket.getaddrinfo = no_network

import numpy as np, torch
from transformers import (AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer,
                          DataCollatorForLanguageModeling, Trainer, TrainingArguments, pipeline)

def tune(model, tokenizer, collator, out):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    texts = [tokenizer(f"The statement {k} is executed.", truncation=True) for k in range(40)]
    arguments = TrainingArguments(out, max_steps=5, per_device_train_batch_size=4, use_cpu=True, report_to=[],
                                  learning_rate=1e-2, gradient_checkpointing=True, logging_steps=1)
    trainer = Trainer(model, arguments, data_collator=collator, train_dataset=texts)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 5 and np.isfinite(losses).all(), losses
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())
    trainer.save_model(out)
    saved = type(model).from_pretrained(out)
    assert all(torch.equal(saved.state_dict()[name], t) for name, t in model.state_dict().items())
    return losses

z = torch.from_numpy(np.load("z.npy"))
model = AutoModelForMaskedLM.from_pretrained("lomdm", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("lomdm", trust_remote_code=True)
with torch.no_grad():
    np.save("logits.npy", model(z).logits.numpy())
fill = pipeline("fill-mask", model="lomdm", trust_remote_code=True)
print(fill("The [MASK] is executed.")[0])
print(tokenizer.decode(model.generate(seed=1)[0]))
filled = model.generate(z[:1], steps=4, top_p=0.9, temperature=0.8, length=z.shape[1])
assert not (filled == model.config.mask_token_id).any()
half = dict(mlm_probability=0.5, mask_replace_prob=1.0, random_replace_prob=0.0)
masks = DataCollatorForLanguageModeling(tokenizer, **half)
print("masked", tune(model, tokenizer, masks, "tuned"))
again = AutoModelForMaskedLM.from_pretrained("tuned", trust_remote_code=True)  # the code was saved with it
assert again.generate(num=1).shape == (1, 16) and again.generation_config.steps == 16
plain = DataCollatorForLanguageModeling(tokenizer)  # a tenth of its masks are random words, a tenth none
tune(AutoModelForMaskedLM.from_pretrained("lomdm", trust_remote_code=True), tokenizer, plain, "plainly")

causal = AutoModelForCausalLM.from_pretrained("ar", trust_remote_code=True)
write = pipeline("text-generation", model="ar", trust_remote_code=True)
print(write("The statement", max_new_tokens=8, max_length=None))
print("causal", tune(causal, tokenizer, DataCollatorForLanguageModeling(tokenizer, mlm=False), "tuned_ar"))
"""


@pytest.mark.slow
def test_a_fresh_environment_loads_samples_fills_and_fine_tunes(trained_run, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {' '.join(PACKAGES)}: {done.stderr.strip().splitlines()[-1]}")
    strangers_work(python, trained_run.run, tmp_path)


def strangers_work(python: Path, run: Path, folder: Path) -> None:
    """Export two models, take them elsewhere, and let an interpreter without this package use them."""
    elsewhere, logits = folder / "elsewhere", None
    (elsewhere / "home").mkdir(parents=True)
    z = torch.randint(300, (4, 16), generator=torch.Generator().manual_seed(0))
    z[:, ::3] = 1
    np.save(elsewhere / "z.npy", z.numpy())
    for name, changes in {"lomdm": [], "ar": ["objective.name=ar"]}.items():
        checkpoint = randomize(run, folder / f"{name}-checkpoint", changes)
        assert checkpoint.config.model.mask_id == 1
        to_hf(checkpoint, folder / f"{name}-export")
        shutil.move(folder / f"{name}-export", elsewhere / name)
        if name == "lomdm":
            model = checkpoint.build_model("ema")
            features, _, condition = model.see(z)
            logits = model.backbone.output(features, condition).detach().numpy()
    environment = {"HOME": str(elsewhere / "home"), "HF_HUB_OFFLINE": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [python, "-I", "-c", STRANGER],
        cwd=elsewhere,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=1200,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    found = np.load(elsewhere / "logits.npy")
    rest = np.isfinite(logits)
    assert np.array_equal(np.isfinite(found), rest) and np.abs(found[rest] - logits[rest]).max() < 1e-5
