"""The laptop part of docs/scaling.md runs as it is written."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.tiny import REPOSITORY


def commands() -> list[list[str]]:
    text = (REPOSITORY / "docs/scaling.md").read_text()
    laptop = text.partition("## On a laptop")[2].partition("## ")[0]
    return [shlex.split(line)[1:] for line in re.findall(r"^    lomdm .+$", laptop, re.MULTILINE)]


@pytest.mark.slow
def test_the_laptop_study(tmp_path):
    """Fifteen minutes of two cores, on the data that `make demo` prepares."""
    for name in ("configs", "data"):
        if (REPOSITORY / name).exists():
            (tmp_path / name).symlink_to(REPOSITORY / name)
    if not (tmp_path / "data/demo/train").exists():
        pytest.skip("make demo prepares the data")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    steps = commands()
    assert [step[:2] for step in steps] == [
        ["sweep", "configs/sweeps/laptop.yaml"],
        ["fit", "runs/laptop/points.json"],
        ["bench", "throughput"],
        ["plan", "scale"],
    ]
    for step in steps:
        subprocess.run(
            [sys.executable, "-m", "lomdm_dist.cli", *step], cwd=tmp_path, env=environment, check=True
        )
    out = tmp_path / "runs/laptop"
    for picture in ("plot.png", "laws.png", "plan.png"):
        assert (out / picture).stat().st_size > 10_000
    points = {p["name"]: p["result"]["loss"] for p in json.loads((out / "points.json").read_text())["points"]}
    for width in (32, 48, 64, 96, 128):
        assert points[f"lomdm-{width}"] < points[f"mdlm-{width}"] < 5.0
    speeds = json.loads((out / "speed.json").read_text())["rows"]
    assert [row["error"] for row in speeds] == [None, None]
