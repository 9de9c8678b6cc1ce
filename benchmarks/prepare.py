"""`lomdm prepare`: speed against the bare tokenizer, memory, and the same bytes always.

    python benchmarks/prepare.py --input books.jsonl.gz --tokenizer gpt2 [--megabytes 200] [--json FILE]

The texts of --input (JSON lines with `text`) are repeated up to the size, each time with another first line.
Then, in one run: the `tokenizers` library alone (encode_batch_fast on as many threads, only its own time is
counted); prepare with 1 worker, with 2, with 2 again killed twice (SIGKILL of the whole group, after a shard)
and started again. Peak memory is the sum of the proportional set sizes of all processes.
"""

import argparse
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from lomdm_dist import machine

ROOT = Path(__file__).resolve().parent.parent
BARE = """
import json, sys, time
from lomdm_dist.data.tokenizer import load_tokenizer
backend = load_tokenizer(sys.argv[2]).backend_tokenizer
backend.encode_special_tokens = True
tokens = seconds = 0
batch, letters = [], 0
def encode():
    global tokens, seconds, batch, letters
    start = time.perf_counter()
    found = backend.encode_batch_fast(batch, add_special_tokens=False)
    seconds += time.perf_counter() - start
    tokens += sum(map(len, found))
    batch, letters = [], 0
for line in open(sys.argv[1]):
    batch.append(json.loads(line)["text"])
    letters += len(batch[-1])
    if letters > 4e6:
        encode()
encode()
print(json.dumps({"tokens": tokens, "seconds": seconds}))
"""


def repeat(source: Path, out: Path, megabytes: float) -> None:
    """A corpus of a size, in which no document stands twice."""
    with gzip.open(source, "rt") as file:
        texts = [json.loads(line)["text"] for line in file]
    written, copy = 0, 0
    with open(out, "w") as file:
        while written < megabytes * 1e6:
            for text in texts:
                line = json.dumps({"text": f"Copy {copy}.\n{text}"}) + "\n"
                written += len(line)
                file.write(line)
            copy += 1


def environment(threads: int) -> dict:
    return os.environ | {"PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": str(threads), "OMP_NUM_THREADS": "1"}


def bare(corpus: Path, tokenizer: str, threads: int) -> dict:
    command = [sys.executable, "-c", BARE, corpus, tokenizer]
    done = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def prepare(corpus: Path, tokenizer: str, length: int, out: Path, workers: int, kills: int = 0) -> dict:
    """Run it, killed so many times; seconds and peak memory of all its processes."""
    command = [sys.executable, "-m", "lomdm_dist.cli", "prepare", "text", "--input", corpus, "--out", out]
    command += ["--tokenizer", tokenizer, "--length", length, "--workers", workers, "--shard-mib", 16]
    state = out.with_name(f".{out.name}.unfinished") / ".state.npz"
    start, peak = time.perf_counter(), 0
    for round_ in range(kills + 1):
        saved = state.stat().st_mtime_ns if state.exists() else 0
        options = {"env": environment(1), "stdout": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(list(map(str, command)), **options)
        next_look = time.perf_counter()
        while process.poll() is None:
            if time.perf_counter() > next_look:  # looking takes the time of a core, so not too often
                peak, next_look = max(peak, memory(process.pid)), time.perf_counter() + 2
            if round_ < kills and state.exists() and state.stat().st_mtime_ns != saved:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(0.1)
        assert process.returncode == (-signal.SIGKILL if round_ < kills else 0), process.returncode
    return {"workers": workers, "kills": kills, "seconds": time.perf_counter() - start, "peak_mb": peak / 1e6}


def memory(pid: int) -> int:
    total = 0
    try:
        for process in [parent := psutil.Process(pid), *parent.children(recursive=True)]:
            total += process.memory_full_info().pss
    except psutil.Error:
        pass  # it ended meanwhile
    return total


def digest(out: Path) -> str:
    """Of every file, its name and content."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    parts = [f"{p.relative_to(out)} {hashlib.sha256(p.read_bytes()).hexdigest()}" for p in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        corpus = folder / "corpus.jsonl"
        repeat(options.input, corpus, options.megabytes)
        print(
            f"{os.cpu_count()} cores, {corpus.stat().st_size / 1e6:.0f} MB, {Path(options.tokenizer).name}\n"
        )
        floors = {threads: bare(corpus, options.tokenizer, threads) for threads in (1, 2)}
        rows = []
        for workers, kills in ((1, 0), (2, 0), (2, 2)):
            out = folder / f"out{len(rows)}"
            row = prepare(corpus, options.tokenizer, options.length, out, workers, kills)
            rows.append(row | {"digest": digest(out)})
    tokens = floors[1]["tokens"]
    print(
        "| | tokens/s | of the bare encoder | peak memory, MB | digest of all files |\n|---|---|---|---|---|"
    )
    for threads, floor in floors.items():
        print(f"| bare, {threads} threads | {tokens / floor['seconds']:,.0f} | 1.00 | | |")
    for row in rows:
        speed, floor = tokens / row["seconds"], tokens / floors[row["workers"]]["seconds"]
        name = f"{row['workers']} workers" + (f", killed {row['kills']} times" if row["kills"] else "")
        print(
            f"| {name} | {speed:,.0f} | {speed / floor:.2f} | {row['peak_mb']:,.0f} | {row['digest'][:12]} |"
        )
    same = len({row["digest"] for row in rows}) == 1
    machine.write_result(options.json, {"bare": floors, "prepare": rows, "same": same}, {})
    sys.exit(0 if same else "the results differ")


if __name__ == "__main__":
    main()
