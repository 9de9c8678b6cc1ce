"""Tables as text."""

from collections.abc import Iterable


def markdown(head: Iterable, rows: Iterable[Iterable]) -> list[str]:
    """The lines of a table in Markdown; a cell that is None is a dash."""
    head = list(head)
    return [_line(head), "|" + "---|" * len(head), *map(_line, rows)]


def _line(cells: Iterable) -> str:
    texts = ("-" if cell is None else str(cell).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(texts)} |"
