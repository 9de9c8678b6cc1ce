"""What `docker build` sends to the image: the code, and no data, runs, environments or secrets."""

from fnmatch import fnmatch
from pathlib import Path, PurePath

import pytest

PATTERNS = (Path(__file__).parents[1] / ".dockerignore").read_text().split()


def kept_out(path: str) -> bool:
    """As Docker reads patterns: from the root, a folder with all in it, **/ at any depth."""
    return any(
        fnmatch(part.name, pattern[3:])
        if pattern.startswith("**/")
        else len(part.parts) == pattern.count("/") + 1 and fnmatch(str(part), pattern)
        for part in (PurePath(path), *PurePath(path).parents)
        for pattern in PATTERNS
    )


@pytest.mark.parametrize("path", ["data/owt/train/0.tar", "runs/a/latest", ".venv/bin/python", ".git/config"])
def test_what_stays_out_of_the_image(path):
    assert kept_out(path)


@pytest.mark.parametrize("path", ["lomdm_dist/data/reader.py", "train.py", "configs/1b.yaml", "setup.py"])
def test_what_the_image_needs(path):
    assert not kept_out(path) and not any(pattern.startswith("!") for pattern in PATTERNS)
