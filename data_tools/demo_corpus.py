"""The demo's corpus: the English that every Python installation carries, as one jsonl file.

Documents are the topics of the language reference (`pydoc_data.topics`) and the docstrings of the
standard library's modules, classes and functions, read from source without importing it.

    python data_tools/demo_corpus.py OUT.jsonl
"""

import ast
import inspect
import json
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data", "turtledemo"}
SHORTEST = 80  # characters; one-line docstrings say little


def docstrings(folder: Path):
    """Docstrings of every module below a folder, in the order of the paths."""
    for path in sorted(folder.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(folder).parts):
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield inspect.cleandoc(ast.get_docstring(node) or "")


def main(out: Path) -> None:
    texts = [*topics.values(), *docstrings(Path(sysconfig.get_path("stdlib")))]
    texts = list(dict.fromkeys(text for text in texts if len(text) >= SHORTEST))
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    partial.rename(out)
    words = sum(len(text.split()) for text in texts)
    print(f"{out}: {len(texts):,} documents, {words:,} words, {sum(map(len, texts)) / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
