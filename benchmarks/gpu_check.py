"""What only a GPU can show: kernels, equal losses, speed beside its floors and the plan, training end to end.

    make wheels && make gpu-check    # benchmarks/results/gpu_check.{json,md}; at most 8 minutes on one H100

`make wheels` fills .wheels/ where there is a network; the machine with the GPU needs torch alone, and
installs the rest from there. Each part runs for itself and says what failed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from lomdm_dist import machine
from lomdm_dist.config import load_config
from lomdm_dist.data.reader import Reader
from lomdm_dist.data.shards import ShardSet, unpack
from lomdm_dist.model import LoMDM
from lomdm_dist.parallel.engine import Alone
from lomdm_dist.study import bench
from lomdm_dist.study.plan import device_here, plan
from lomdm_dist.tables import markdown
from lomdm_dist.train.step import backpropagate, draw_noise

ROOT = Path(__file__).resolve().parent.parent
GPU = torch.device("cuda")
OBJECTIVES = {
    "lomdm": [],
    "lomdm, attention in documents": ["data.attend=document", "model.eos_id=0"],
    "lomdm, gradient into the backbone": ["objective.stop_gradient=false"],
    "mdlm": ["objective={name: mdlm}"],
    "genmd4": ["objective={name: genmd4}"],
    "blocks of 16": ["objective={name: window, order: blocks}"],
    "ar": ["objective={name: ar}"],
    "ar, attention in documents": ["objective={name: ar}", "data.attend=document", "model.eos_id=0"],
}


def equal_losses(data: Path) -> list[dict]:
    """Loss and gradient norm of one batch: float32 on the CPU, on the GPU, and bf16 there."""
    rows, shards = [], ShardSet(data / "small/train")
    for name, overrides in OBJECTIVES.items():
        config = load_config(ROOT / "configs/demo.yaml", ["model.dropout=0", *overrides])
        model = _moved_away(LoMDM(config.model, config.objective, config.data.attend))
        ids = torch.from_numpy(shards.rows(np.arange(16)))
        row = {"objective": name}
        for kind, device, dtype in (
            ("cpu", torch.device("cpu"), torch.float32),
            ("gpu", GPU, torch.float32),
            ("gpu bf16", GPU, torch.bfloat16),
        ):
            model = model.to(device=device, dtype=dtype)
            model.zero_grad()
            x, valid = unpack(ids, None, device)
            noise = draw_noise(config, 3, torch.arange(16), device)
            stats = backpropagate(Alone(model), x, valid, noise, config)
            norm = torch.stack(
                [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
            ).norm()
            loss = (stats["bound"] / stats["tokens"].to(device)).item()
            row[kind] = {"loss": loss, "grad_norm": norm.item()}
        rows.append(row)
        off = {k: abs(row[k]["loss"] / row["cpu"]["loss"] - 1) for k in ("gpu", "gpu bf16")}
        assert off["gpu"] < 1e-4 and off["gpu bf16"] < 2e-2, row
    return rows


def _moved_away(model: LoMDM) -> LoMDM:
    """Gates, heads and output start at zero, where all losses are alike."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return model


def pinned_rows(data: Path) -> dict:
    """The stream for a GPU: pinned, and the same ids."""
    reader = Reader([ShardSet(data / "small/train")])
    for workers in (0, 1, 3):
        stream = reader.stream(0, 64, 64, workers, GPU)
        for k in range(20):
            rows = next(stream)
            assert rows.ids.is_pinned()
            x, _ = unpack(rows.ids, None, GPU)
            assert torch.equal(x.cpu(), reader.read(64 * k, 64).ids.long())
        stream.close()
    return {"steps": 60}


def train(run: Path, *options, device: bool = True) -> list[dict]:
    """`train.py` in a process of its own; returns the lines of metrics.jsonl."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if not device:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(ROOT / "train.py"), *map(str, options), f"train.run={run}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    if done.returncode:
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-1500:])
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def places(data: Path) -> list[str]:
    return [f"data.train={data}/train", f"data.valid={data}/valid"]


def same_curve(data: Path) -> dict:
    """25 steps of the demo, float32, on the CPU and on the GPU; then bf16; ended and resumed on the GPU."""
    options = [
        "--config",
        "configs/demo.yaml",
        *places(data / "small"),
        "train.steps=25",
        "train.log_every=1",
    ]
    options += ["train.valid_every=0", "model.dropout=0", "optim.warmup_steps=5"]
    fp32 = ["train.precision=fp32", "parallel.zero_stage=0"]
    curves = {
        "cpu": train(data / "cpu", *options, *fp32, device=False),
        "gpu": train(data / "gpu", *options, *fp32),
        "gpu bf16": train(data / "bf16", *options, "train.precision=bf16", "parallel.zero_stage=1"),
    }
    losses = {name: [row["loss"] for row in rows] for name, rows in curves.items()}
    off = {name: max(abs(a - b) for a, b in zip(losses[name], losses["cpu"], strict=True)) for name in losses}
    assert off["gpu"] < 2e-3 and off["gpu bf16"] < 0.2, off  # two curves in bf16 part slowly
    more = train(data / "gpu", *options, *fp32, "--resume", "auto", "train.steps=40")
    assert [row["step"] for row in more] == list(range(1, 41))
    return {"largest_difference_of_losses": off, "last_loss": losses["gpu"][-1]}


def engines(data: Path) -> list[dict]:
    """25 steps with dropout by each engine: one curve, that of the CPU; bf16 and offload beside it."""
    options = ["--config", "configs/demo.yaml", *places(data / "small"), "train.steps=25"]
    options += ["train.log_every=1", "train.valid_every=0", "model.dropout=0.1", "optim.warmup_steps=5"]
    fsdp2 = ["parallel.engine=fsdp2", "parallel.zero_stage=3"]
    stages = {stage: [f"parallel.zero_stage={stage}"] for stage in range(4)}
    ways = {"ZeRO 1": stages[1], "ZeRO 3": stages[3], "FSDP2": fsdp2}
    ways |= {"ZeRO 2, offload": [*stages[2], "parallel.offload=true"]}
    ways |= {"FSDP2 bf16": [*fsdp2, "train.precision=bf16"]}
    ways |= {"activations offloaded": ["train.recompute=block", "train.offload_activations=true"]}
    alone = [row["loss"] for row in train(data / "alone", *options, "train.precision=fp32", device=False)]
    rows = []
    for number, (name, overrides) in enumerate(ways.items()):
        losses = [row["loss"] for row in train(data / f"engine-{number}", *options, *overrides)]
        rows.append({"engine": name, "off": max(abs(a - b) for a, b in zip(losses, alone, strict=True))})
        assert rows[-1]["off"] < (0.2 if "bf16" in name else 2e-3), rows
    return rows


def kernels(data: Path) -> dict:
    """The operations against their plain forms; then what keyed dropout costs."""
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "", "tests/ops/test_on_gpu.py"]
    subprocess.run([*tests, "tests/ops/test_dropout.py"], cwd=ROOT, check=True)
    result = data / "dropout.json"
    subprocess.run([sys.executable, "benchmarks/dropout.py", "--json", result], cwd=ROOT, check=True)
    return json.loads(result.read_text())


def step(data: Path) -> dict:
    """`lomdm bench step` at OWT small: every trick; and at 1B: LoMDM, joint, MDLM."""
    few = ["lomdm", "lomdm, joint", "mdlm", "mdlm, all logits"]
    found = {}
    for config, sequences, names in (("owt", 32, None), ("1b", 8, few)):
        loaded = load_config(ROOT / f"configs/{config}.yaml")
        found[config] = bench.bench_step(loaded, sequences, 5, GPU, names)
        print(bench.as_markdown(found[config]), flush=True)
        torch.cuda.empty_cache()
    return found


def planned(data: Path) -> list[dict]:
    """The planner's word against a real run of its plan: seconds a step and memory."""
    mask = ShardSet(data / "large/train").tokenizer
    size = [f"model.mask_id={mask.mask_id}", f"model.eos_id={mask.eos_id}", "train.global_batch=64"]
    steps = ["train.steps=8", "train.log_every=2", "train.valid_every=0", "train.save_every=1000"]
    rows = []
    for config, more in (
        ("owt", ["model.vocab_size=8192"]),
        ("1b", ["model.vocab_size=8192", "model.length=1024"]),
    ):
        overrides = [*size, *more, *places(data / "large")]
        said = plan(load_config(ROOT / f"configs/{config}.yaml", overrides), 1, device_here())
        chosen = [f"{key}={value}" for key, value in said.choice.items()]
        logged = train(
            data / f"plan-{config}", "--config", f"configs/{config}.yaml", *overrides, *chosen, *steps
        )
        last = logged[-1]
        rows.append(
            {
                "config": config,
                "choice": said.choice,
                "planned_seconds": said.seconds.step,
                "seconds": last["seconds"] / 2,
                "planned_gib": said.total_gib,
                "gib": last["memory"],
                "mfu": last["mfu"],
            }
        )
    return rows


def data_keeps_up(data: Path) -> list[dict]:
    """OWT-small (170M, length 1024, bf16) on one GPU: tokens/s, MFU, and the share of time spent on data."""
    rows = []
    steps = ["train.steps=40", "train.log_every=10", "train.valid_every=0", "train.save_every=1000"]
    size = ["train.micro_batch=16", "train.global_batch=64", "model.vocab_size=8192"]
    mask = ShardSet(data / "large/train").tokenizer
    size += [f"model.mask_id={mask.mask_id}", f"model.eos_id={mask.eos_id}"]
    for name, overrides in {
        "lomdm": [],
        "lomdm, auto": ["train.micro_batch=auto", "train.two_samples=auto", "train.recompute=auto"],
        "lomdm, attention in documents": ["data.attend=document"],
        "mdlm": ["objective={name: mdlm}"],
    }.items():
        options = ["--config", "configs/owt.yaml", *places(data / "large"), *steps, *size, *overrides]
        run = data / f"large-{len(rows)}"
        logged = train(run, *options)[1:]  # without the first steps
        speeds = [row["tokens_per_second"] for row in logged]
        rows.append(
            {
                "run": name,
                "tokens_per_second": statistics.median(speeds),
                "range": [min(speeds), max(speeds)],
                "mfu": statistics.median(row["mfu"] for row in logged),
                "data_share": sum(r["data_seconds"] for r in logged) / sum(r["seconds"] for r in logged),
                "memory_gib": logged[-1]["memory"],
            }
        )
    return rows


def prepare(data: Path) -> dict:
    corpus = data / "demo.jsonl"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, "data_tools/demo_corpus.py", corpus], cwd=ROOT, check=True)
    lomdm = [
        sys.executable,
        "-m",
        "lomdm_dist.cli",
        "prepare",
        "text",
        "--input",
        corpus,
        "--tokenizer",
        "bpe",
    ]
    for name, vocabulary, length in (("small", 512, 64), ("large", 8192, 1024)):
        more = ["--vocab-size", str(vocabulary), "--length", str(length), "--out", str(data / name)]
        subprocess.run([*lomdm, *more], cwd=ROOT, env=environment, check=True)
    return {name: len(ShardSet(data / name / "train")) for name in ("small", "large")}


PARTS = (prepare, kernels, equal_losses, step, planned, pinned_rows, same_curve, engines, data_keeps_up)


def as_markdown(result: dict, failed: list[str], seconds: dict[str, float]) -> str:
    """Tables of what compares, the rest as it is in the JSON."""
    about = machine.versions() | {"gpu": torch.cuda.get_device_name()}
    parts = [
        f"# On a GPU\n\n`make gpu-check`; {', '.join(f'{name} {value}' for name, value in about.items())}"
    ]
    parts.append(f"failed: {', '.join(failed) or 'nothing'}; seconds: {json.dumps(seconds)}")
    for name, found in result.items():
        parts.append(f"## {name.replace('_', ' ')}")
        if name == "step" and isinstance(found, dict):
            parts += [f"### {config}\n\n{bench.as_markdown(rows)}" for config, rows in found.items()]
        elif isinstance(found, list):
            parts.append(_table(found))
        else:
            parts.append(f"```\n{json.dumps(found, indent=1)}\n```")
    return "\n\n".join(parts) + "\n"


def _table(rows: list[dict]) -> str:
    cells = ([f"{v:.4g}" if isinstance(v, float) else v for v in row.values()] for row in rows)
    return "\n".join(markdown(rows[0], cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="benchmarks/results/gpu_check.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu-check needs a GPU; everything else is in `make test`")
    result, failed, seconds = {}, [], {}
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            start = time.perf_counter()
            try:
                result[part.__name__] = part(Path(folder))
                print(f"{part.__name__}: {json.dumps(result[part.__name__])}", flush=True)
            except Exception as error:
                failed.append(part.__name__)
                result[part.__name__] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            seconds[part.__name__] = round(time.perf_counter() - start, 1)
            machine.write_result(
                options.json, {"parts": result, "failed": failed, "part_seconds": seconds}, {}
            )
            Path(options.json).with_suffix(".md").write_text(as_markdown(result, failed, seconds))
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
