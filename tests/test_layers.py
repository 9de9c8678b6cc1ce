"""Who may import whom (docs/design.md, section 2)."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lomdm_dist"
MAY_IMPORT = {
    "process": {"process"},
    "ops": {"ops"},
    "model": {"model", "process", "ops", "config", "errors"},
    "data": {"data", "config", "errors", "files", "secrets"},
    "parallel": {"parallel", "model", "ops", "config", "errors", "files", "machine", "secrets"},
    "evaluate": {"evaluate", "sample", "process", "model", "data", "config", "errors", "files", "tables"},
    "study": {
        "study",
        "process",
        "model",
        "parallel",
        "ops",
        "train",
        "data",
        "children",
        "config",
        "errors",
        "files",
        "machine",
        "secrets",
        "tables",
    },
    "sample": {"sample", "process", "model", "config", "errors", "files"},
    "launch": {"launch", "data", "config", "errors", "files", "machine"},
    "convert": {
        "convert",
        "evaluate",
        "process",
        "model",
        "parallel",
        "train",
        "data",
        "config",
        "errors",
        "files",
    },
}


def imports_of(path: Path) -> set[str]:
    """Parts of the house that a file imports: the second name of lomdm_dist.NAME."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("lomdm_dist.")}
    return found - {"__version__"}


def test_each_part_imports_only_what_it_may():
    for part, allowed in MAY_IMPORT.items():
        for path in (PACKAGE / part).rglob("*.py"):
            assert imports_of(path) <= allowed, path


def test_only_the_command_train_imports_the_loop():
    for path in PACKAGE.rglob("*.py"):
        if path != PACKAGE / "commands/train.py" and "train.loop" in path.read_text():
            raise AssertionError(f"{path} imports the training loop")
