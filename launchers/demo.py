"""`make demo`: from raw text to a trained, resumed, evaluated, sampled and exported LoMDM.

Runs the commands of the README one after the other, prints each before it runs, and ends with a
table of what was made and where. What is already there is used again; delete data/demo or
runs/demo to make it anew.
"""

import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from lomdm_dist.config import load_config
from lomdm_dist.errors import REQUEUE

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
DATA, RUN, CONFIG = Path("data/demo"), Path("runs/demo"), "configs/demo.yaml"
CORPUS, EXPORT, CURVE = Path("data/demo.jsonl"), RUN / "export-hf", RUN / "curve.png"
PAGE, REPORT = RUN / "trajectory.html", RUN / "report/report.html"
STEPS = load_config(ROOT / CONFIG).train.steps
STOP = STEPS // 2  # the run is stopped here once, and resumed

LOAD_BACK = """
import json, sys
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
folder = sys.argv[1]
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer("Return a new list containing all items", return_tensors="pt").input_ids
hidden = ids.shape[1] // 2
truth, ids[0, hidden] = ids[0, hidden].item(), tokenizer.mask_token_id
output = model(input_ids=ids)
rank = int((output.logits[0, hidden] > output.logits[0, hidden, truth]).sum()) + 1
print(json.dumps({"parameters": model.num_parameters(), "rank": rank, "vocab": len(tokenizer)}))
"""


def run(*command, expect: int = 0) -> None:
    """Show a command and run it from this environment; another exit status than `expect` ends the demo."""
    print(f"\n$ {shlex.join(str(part) for part in command)}", flush=True)
    program = BIN / str(command[0])
    result = subprocess.run([str(program if program.exists() else command[0]), *map(str, command[1:])])
    if result.returncode != expect:
        sys.exit(f"demo: {command[0]} ended with status {result.returncode}, expected {expect}")


def trained_step() -> int:
    latest = RUN / "latest"
    return int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0


def read(name: str) -> dict:
    return json.loads((RUN / f"{name}.json").read_text())


def train(*options, expect: int = 0) -> None:
    processes = min(2, torch.cuda.device_count() or 2)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // processes)))
    with socket.socket() as listener:  # a port of our own: two demos may run on one machine
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    run("deepspeed", "--num_accelerators", processes, "--master_port", port, "train.py", "--config", CONFIG,
        *options, expect=expect)  # fmt: skip


def draw_curve() -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    steps, losses = zip(*((row["step"], row["loss"]) for row in rows if "loss" in row), strict=True)
    smooth = [statistics.mean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
    valid = [(row["step"], row["valid_nll_per_token"]) for row in rows if "valid_nll_per_token" in row]
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(steps, smooth, color="tab:blue", label="training, mean of 100 steps")
    axes.plot(*zip(*valid, strict=True), "o-", color="tab:orange", label="validation", markersize=4)
    axes.axvline(STOP, color="gray", linestyle=":", label="stopped and resumed")
    axes.set(
        xlabel="step",
        ylabel="bound, nats a token",
        title="lomdm_dist demo: LoMDM on Python's own documentation",
    )
    axes.legend()
    figure.savefig(CURVE, dpi=120)


def table(rows: list[tuple[str, str, str, str]]) -> None:
    rows = [("made", "where", "what", ""), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    print()
    for i, row in enumerate(rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if i == 0:
            print("  ".join("-" * width for width in widths))


def made(prepared: dict, loaded: dict) -> list[tuple]:
    """What was made: name, place, a few words on it, and the stage that made it."""
    ppl, samples = read("ppl"), read("samples")
    bound = f"{ppl['nll_per_token']:.3f} +- {ppl['standard_error']:.3f} nats a token, ppl {ppl['ppl']:.1f}"
    hidden = f"a hidden token ranks {loaded['rank']} of {loaded['vocab']}"
    return [
        ("corpus", CORPUS, f"{prepared['documents']:,} documents of Python's own English", "corpus"),
        ("shards", DATA, f"{prepared['sequences']:,} sequences, {prepared['tokens']:,} tokens", "shards"),
        ("run", RUN, f"{trained_step()} steps, stopped at {STOP} and resumed", "run"),
        ("metrics", RUN / "metrics.jsonl", "one object a logged step", "run"),
        ("curve", CURVE, "training and validation bound", "run"),
        ("perplexity", RUN / "ppl.json", f"{bound} (uncut bound)", "run"),
        (
            "samples",
            RUN / "samples.json",
            f"{len(samples['texts'])} texts of {len(samples['token_ids'][0])} tokens",
            "run",
        ),
        ("page", PAGE, "how these texts came about, step by step", "run"),
        ("report", REPORT, "the evaluations on one page, the paper's beside", "run"),
        ("export", EXPORT, f"{loaded['parameters']:,} parameters, loads in transformers; {hidden}", "export"),
    ]


def main() -> None:
    os.chdir(ROOT)
    started, new = time.time(), {}
    os.environ["HF_HUB_OFFLINE"] = "1"

    new["corpus"] = not CORPUS.exists()
    if new["corpus"]:
        run("python", "data_tools/demo_corpus.py", CORPUS)
    run("lomdm", "prepare", "text", "--input", CORPUS, "--out", DATA, "--tokenizer", "bpe",
        "--vocab-size", 512, "--length", 64, "--json", "data/demo.json")  # fmt: skip
    prepared = json.loads(Path("data/demo.json").read_text())
    new["shards"] = not prepared["reused"]

    new["run"] = trained_step() < STEPS
    if trained_step() < STOP:
        print("\n(stopped half-way, and resumed: DeepSpeed's launcher calls that, status 75, an error)")
        train("--resume", "auto", "--stop-after", STOP, expect=REQUEUE)
    if new["run"]:
        train("--resume", "auto")
    if new["run"] or not CURVE.exists():
        draw_curve()
    if new["run"] or not (RUN / "ppl.json").exists():
        run("lomdm", "eval", "ppl", "--checkpoint", RUN, "--data", DATA / "valid", "--json", RUN / "ppl.json")
    if new["run"] or not (RUN / "samples.json").exists() or not PAGE.exists():
        run("lomdm", "sample", "--checkpoint", RUN, "--num", 4, "--json", RUN / "samples.json",
            "--trajectory", PAGE)  # fmt: skip
    if new["run"] or not REPORT.exists():
        run("lomdm", "eval", "report", RUN)
    new["export"] = not EXPORT.exists()
    if new["export"]:
        run("lomdm", "convert", "to-hf", RUN, EXPORT, "--json", RUN / "export.json")
    print("\n$ python: AutoModelForMaskedLM.from_pretrained(export, trust_remote_code=True)", flush=True)
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD_BACK, str(EXPORT)], stdout=subprocess.PIPE, check=True
    )
    loaded = json.loads(loaded.stdout)

    state = {name: "new" if made else "reused" for name, made in new.items()}
    table([(what, str(where), text, state[stage]) for what, where, text, stage in made(prepared, loaded)])
    print(f"\ndemo done in {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
