"""The paper's claims on real text: trains and evaluates the rows of configs/evidence/sweep.yaml.

    make evidence TEXT=wikitext2.train.txt.gz                  # one seed each, of the first seven three
    make evidence TEXT=... ROWS="mdlm-s0 lomdm-s0"             # these
    python -m benchmarks.evidence speed                        # seconds a step, on a quiet machine
    python -m benchmarks.evidence keep                         # puts it into benchmarks/results/evidence.json
    python -m benchmarks.evidence report                       # its tables and figures

What is there is not made again. docs/evidence.md says what came out.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lomdm_dist import machine
from lomdm_dist.commands.common import check_names
from lomdm_dist.errors import MISTAKE, UserError, first_line
from lomdm_dist.files import write_atomically
from lomdm_dist.model.flops import step_flops_a_sequence
from lomdm_dist.study.sweep import Point, is_done, load_sweep, objects

ROOT = Path(__file__).resolve().parent.parent
SWEEP, DATA = Path("configs/evidence/sweep.yaml"), Path("data/evidence")
KEPT = ROOT / "benchmarks/results/evidence.json"
TIMED = ("ar", "mdlm", "lomdm", "lomdm_uniform")
# of three seeds; the others of the first
SEEDS = (*TIMED, "no_order", "c_1.3_0_uniform", "c_1.3_1.25_uniform")
LOOKED_AT = ("mdlm_long-s0", "lomdm_long-s0")  # whose order and samples are looked at
# whose bound is taken at each c1, too: theory says that it is the same
PACED, PACES = "no_order-s0", (0.2, 0.4, 0.7, 1.0, 1.3)
DRAWS, ROUNDS, STEPS = 4, 3, 30
CURVE = ("step", "valid_nll_per_token", "order_A_hatA", "order_A_confidence", "order_hatA_confidence")
SIGNALS = (
    "step",
    "advantage_std",
    "log_q_ratio_std",
    "exponent_std",
    "velocity",
    "grad_norm",
    "grad_norm_heads",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("do", choices=["run", "speed", "keep", "report"], help="run: what make evidence does")
    parser.add_argument("--text", help="to train on, the first time: .txt, .jsonl, .parquet, hf:NAME, or .gz")
    parser.add_argument("--rows", nargs="*", help="names with their seed, mdlm-s0; by default see above")
    parser.add_argument("--jobs", default=devices(), type=int, help="trainings at a time: one a GPU, or core")
    options = parser.parse_args()
    os.chdir(ROOT)
    try:
        work(options)
    except UserError as error:
        sys.exit(f"evidence: {error}")


def devices() -> int:
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def work(options) -> None:
    if options.do == "run":
        rows = options.rows or default_rows()
        check_names("row", rows, [point.name for point in points()])
        prepare(options.text)
        lomdm("sweep", SWEEP, "--jobs", options.jobs, "--only", *rows)
        done = [point for point in points() if point.name in rows and is_done(point)]
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(evaluate, done))
        compare(collect())
    elif options.do == "speed":
        speed()
    elif options.do == "keep":
        keep(collect())
    else:
        from benchmarks.evidence_report import report

        with reading(KEPT, "take it as it was committed, or keep the rows again"):
            report(read_kept())


def lomdm(*words) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lomdm_dist.cli", *map(str, words)]
    print(" ".join(["$ lomdm", *map(str, words)]) + "\n", end="", flush=True)  # in one piece: two at once
    status = subprocess.run(command, env=environment).returncode
    if status:
        more = "" if status == MISTAKE else "; the same command goes on"
        sys.exit(f"evidence: lomdm {words[0]} ended with status {status}{more}")


def points() -> list[Point]:
    return list(load_sweep(SWEEP, []).points)


def default_rows() -> list[str]:
    return [p.name for p in points() if p.group in SEEDS or p.config.train.seed == 0]


def prepare(text: str | None) -> None:
    """Another text than before is refused: `data/evidence` and `runs/evidence` are of one."""
    if not text and not (DATA / "train").exists():
        sys.exit(
            f"evidence: {DATA} is not there yet: make evidence TEXT=FILE says what to train on "
            "(docs/evidence.md)"
        )
    if text:  # what is there of the same text is reused, of another one refused
        lomdm("prepare", "text", "--input", text, "--out", DATA, "--tokenizer", "bpe", "--vocab-size", 512,
              "--length", 64, "--valid-fraction", 0.03, "--json", DATA.with_suffix(".json"))  # fmt: skip


@contextlib.contextmanager
def reading(path: Path, advice: str):
    """UserError, with the advice, where what is read there is missing or other than this program wrote it."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {first_line(error)}): {advice}"
        ) from error


def last_state(point: Point) -> Path:
    return point.run / f"checkpoints/step-{point.config.train.steps}/state.json"


def is_made(result: Path, point: Point) -> bool:
    """Whether a result is there, and is of the last step: a row may have been trained longer since."""
    state = last_state(point)
    there = result.exists() and state.exists()
    return there and result.stat().st_mtime >= state.stat().st_mtime


def evaluate(point: Point) -> None:
    """The bounds of the whole validation split; of two rows what they write."""
    order, picture = (point.run / name for name in ("order.json", "trajectory.png"))
    where, valid = ("--checkpoint", point.run), ("--data", DATA / "valid")
    for name, overrides in (("ppl", []), *variants(point).items()):
        if not is_made(out := point.run / f"{name}.json", point):
            lomdm("eval", "ppl", *where, *valid, "--draws", DRAWS, "--json", out, *overrides)
    if point.name in LOOKED_AT and not is_made(order, point):
        lomdm("eval", "order", *where, *valid, "--draws", DRAWS, "--json", order)
    if point.name == LOOKED_AT[1] and not is_made(picture, point):
        beside = next(other for other in points() if other.name == LOOKED_AT[0])
        if is_done(beside):
            lomdm("sample", *where, "--num", 1, "--beside", beside.run, "--trajectory", picture)
        else:
            print(f"{picture} wants {beside.name} beside it: then call this again")


def variants(point: Point) -> dict[str, list[str]]:
    """Other bounds of the same weights: without the learned order, and at other c1."""
    objective = point.config.objective
    found = {}
    if objective.name == "lomdm" and objective.c2 > 0:
        found["unordered"] = ["objective.c2=0"]
    if point.name == PACED:
        found |= {f"c1_{c1:g}": [f"objective.c1={c1:g}"] for c1 in PACES}
    return found


def speed() -> None:
    """Seconds a step of the first four rows, in turns: of a machine that does nothing else."""
    chosen = {p.group: p for p in points() if p.group in TIMED}
    seconds = {group: [] for group in chosen}
    for _ in range(ROUNDS):
        for group, point in chosen.items():
            out = DATA.with_name("evidence_speed.json")
            config = SWEEP.with_name("base.yaml")
            lomdm("bench", "throughput", "--config", config, "--steps", STEPS, "--warmup", 5, "--json", out,
                  *point.overrides)  # fmt: skip
            seconds[group].append(json.loads(out.read_text())["rows"][0]["step_seconds"])
    kept = read_kept()
    kept["seconds_a_step"] = {
        "rows": seconds,
        "command": "python -m benchmarks.evidence speed",
        "versions": machine.versions(),
        "machine": machine.machine(),
    }
    write_kept(kept)


def collect() -> dict[str, dict]:
    """Of each row that is done and evaluated here: numbers, and what they were made with."""
    found = {}
    for point in points():
        if is_done(point) and is_made(point.run / "ppl.json", point):
            with reading(
                point.run, "delete the file in question, or move the folder away: run makes it anew"
            ):
                found[point.name] = row_of(point)
    return found


def about(point: Point) -> dict:
    """What a row is of."""
    train = point.config.train
    return {
        "group": point.group,
        "seed": train.seed,
        "objective": point.config.objective.model_dump(mode="json"),
        "steps": train.steps,
        "global_batch": train.global_batch,
    }


def is_of(row: dict, what: dict) -> bool:
    """An objective may have learned keys since: they do not make another row of it."""
    objective = {key: what["objective"].get(key) for key in row["objective"]}
    return row | what | {"objective": objective} == row


def row_of(point: Point) -> dict:
    ppl = read(point.run / "ppl.json")
    metrics = objects((point.run / "metrics.jsonl").read_text())
    logged = [row for row in metrics if "loss" in row]
    state = json.loads(last_state(point).read_text())
    order = point.run / "order.json"
    files = {name: file for name in variants(point) if (file := point.run / f"{name}.json").exists()}
    return {
        **about(point),
        "tokens": logged[-1]["tokens"],
        "flops_a_step": step_flops_a_sequence(point.config) * point.config.train.global_batch,
        **{
            key: ppl.get(key) for key in ("nll_per_token", "standard_error", "nll_per_token_cut", "remainder")
        },
        **{key: ppl.get(key) for key in ("remainder_standard_error", "sequences")},
        "variants": {
            name: {key: read(file)[key] for key in ("nll_per_token", "nll_per_token_cut", "command")}
            for name, file in files.items()
        },
        "curve": [[row.get(key) for key in CURVE] for row in metrics if "valid_nll_per_token" in row],
        "signals": [[row.get(key) for key in SIGNALS] for row in logged],
        "order": read(order) if order.exists() else None,
        "commands": [
            ["lomdm", "train", "--config", str(SWEEP.with_name("base.yaml")), *point.overrides],
            ppl["command"],
        ],
        "trained_with": state["versions"],
        "evaluated_with": ppl["versions"],
        "machine": ppl["machine"],
    }


def read(path: Path) -> dict:
    """A command's result; its command as it was written, without the place of this checkout."""
    with reading(path, "delete it: run makes it anew"):
        result = json.loads(path.read_text())
        return result | {"command": ["lomdm", *result["command"][1:]]}


def compare(found: dict[str, dict]) -> None:
    """What is here beside what is kept."""
    kept = read_kept()["rows"]
    for name, row in found.items():
        there = kept.get(name)
        beside = f"; in {KEPT.name} {there['nll_per_token']:.4f}" if there else ""
        print(f"{name}: {row['nll_per_token']:.4f} +- {row['standard_error'] or 0:.4f} nats a token{beside}")


def read_kept() -> dict:
    if not KEPT.exists():
        return {"rows": {}}
    with reading(KEPT, "take it as it was committed, or move it away"):
        kept = json.loads(KEPT.read_text())
        return kept | {"rows": dict(kept["rows"])}


def write_kept(kept: dict) -> None:
    write_atomically(KEPT, machine.to_json(kept) + "\n")


def keep(found: dict[str, dict]) -> None:
    if not found:
        sys.exit("evidence: no row is done here yet: make evidence")
    kept, data = read_kept(), read(DATA.with_suffix(".json"))
    if kept["rows"] and kept["data"]["splits"] != data["splits"]:
        sys.exit(f"evidence: {KEPT.name} has rows of another text; move it away to keep these")
    rows, sweep = kept["rows"] | found, {point.name: about(point) for point in points()}
    if others := [name for name, row in rows.items() if not (name in sweep and is_of(row, sweep[name]))]:
        sys.exit(
            f"evidence: {' '.join(others)} in {KEPT.name} are no rows of {SWEEP} as it is now: run them "
            "again, or take them out"
        )
    kept["rows"] = {name: rows[name] for name in sweep if name in rows}
    kept["unigram_nats"] = unigram_nats()
    kept["data"] = data
    write_kept(kept)
    print(f"{len(found)} rows kept: {' '.join(found)}")


def unigram_nats() -> float:
    """The entropy of single tokens of the training data: what a model gives that sees no other."""
    import numpy as np

    from lomdm_dist.data.reader import access_of
    from lomdm_dist.data.shards import ShardSet

    config = points()[0].config
    shards = ShardSet(str(DATA / "train"), access_of(config.data))
    counts = np.zeros(config.model.vocab_size)
    for start in range(0, len(shards), 4096):
        tokens = shards.rows(np.arange(start, min(start + 4096, len(shards))))
        counts += np.bincount(tokens.ravel(), minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


if __name__ == "__main__":
    main()
