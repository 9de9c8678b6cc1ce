"""Training in processes of its own, and what its metrics say."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(processes: int, *arguments, config="configs/demo.yaml", launcher=()) -> list[str]:
    train = ["train.py", "--config", str(config), *map(str, arguments)]
    if processes == 1:
        return [sys.executable, *train]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
        *launcher,
    ]
    return [*torchrun, *train]


def start(processes: int, *arguments, **options) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command(processes, *arguments, **options),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, expect: int = 0) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == expect, output
    return output


def wait_for(path: Path, text: str, process: subprocess.Popen, log: Path | None = None) -> None:
    """Until a file holds a text; `log`: where the process writes, if not to us."""
    deadline = time.time() + 600
    while not path.exists() or text not in path.read_text():
        going = process.poll() is None and time.time() < deadline
        assert going, log.read_text() if log else process.communicate()[0]
        time.sleep(0.02)


def curve(run: Path, key: str = "loss") -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({row["step"] for row in rows}) == len(rows), "a step was logged twice"
    return {row["step"]: row[key] for row in rows}


def assert_same(ours: dict, theirs: dict, steps, tolerance: float):
    assert [ours[s] for s in steps] == pytest.approx([theirs[s] for s in steps], rel=tolerance)
