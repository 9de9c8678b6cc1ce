"""Every objective on the demo's data, as its config says: what to expect of each.

Trains on two processes and evaluates the whole validation split. Needs `make demo`'s
data/demo. What is already in runs/objectives is used again.

    python benchmarks/objectives.py    # minutes a row; writes benchmarks/results/objectives.md
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from lomdm_dist.machine import cpu

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "objectives"
DRAWS = 4
ROWS = {
    "ar": ["configs/objectives/ar.yaml"],
    "mdlm": ["configs/objectives/mdlm.yaml"],
    "mdlm, time: pinned": ["configs/objectives/mdlm.yaml", "objective.time=pinned"],
    "genmd4": ["configs/objectives/genmd4.yaml"],
    "window, left to right": ["configs/objectives/left_to_right.yaml"],
    "window, permutation": ["configs/objectives/permutation.yaml"],
    "window, blocks of 16": ["configs/objectives/blocks.yaml"],
    "lomdm": ["configs/demo.yaml"],
}


def run(*command) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=environment, check=True)


def measure(name: str, config: list[str]) -> dict:
    folder = RUNS / name.replace(" ", "_").replace(",", "").replace(":", "")
    ppl = folder.with_suffix(".json")
    if not ppl.exists():
        processes = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
        more = [f"train.run={folder}", "train.valid_every=0", "train.log_every=100"]
        run(*processes, "train.py", "--config", *config, *more, "--resume", "auto")
        where = ["--checkpoint", folder, "--data", "data/demo/valid"]
        run("-m", "lomdm_dist.cli", "eval", "ppl", *where, "--draws", DRAWS, "--json", ppl)
    last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    return json.loads(ppl.read_text()) | {"last": last}


def main() -> None:
    RUNS.mkdir(parents=True, exist_ok=True)
    lines = [
        "| objective | bound, nats a token | ppl | exponent_std | velocity |",
        "|---|---|---|---|---|",
    ]
    for name, config in ROWS.items():
        result = measure(name, config)
        last, ppl = result["last"], f"{result['ppl']:.1f}"
        bound = f"{result['nll_per_token']:.3f} +- {result['standard_error']:.3f}"
        spread, velocity = _number(last["exponent_std"]), _number(last["velocity"])
        lines.append(f"| {name} | {bound} | {ppl} | {spread} | {velocity} |")
        print(lines[-1], flush=True)
    steps, tokens, versions = result["last"]["step"], result["last"]["tokens"], result["versions"]
    where = f"{cpu()}, {os.cpu_count()} CPU cores, two processes"
    about = (
        f"`python benchmarks/objectives.py`, {where}, torch {versions['torch']}. {steps} steps, {tokens:,} "
        "tokens, 0.7 to 1.1 million parameters; the whole validation split, "
        f"{DRAWS} draws, `evaluate.time=pinned`, EMA weights; one seed. exponent_std and velocity are "
        "those of the last 100 steps of training."
    )
    table = "\n".join(lines)
    out = ROOT / "benchmarks" / "results" / "objectives.md"
    out.write_text(f"# Objectives\n\n{about}\n\n{table}\n\n{NOTES}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


NOTES = """\
So short a run says what to expect of a first try, not which objective is better. The statistics of single
tokens alone give 5.3 nats: the causal baseline leaves that plateau first, the masked ones have just left it,
and the windows, which see one position or block of a sequence in a step, are still on it.
"""


if __name__ == "__main__":
    main()
