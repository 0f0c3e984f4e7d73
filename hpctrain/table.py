"""Tables in plain columns."""

from __future__ import annotations

from collections.abc import Container, Sequence


def table(rows: Sequence[Sequence[str]], left: Container[int] = (0,), gap: str = "  ") -> list[str]:
    """Columns as wide as their longest cell; those in `left` to the left, others to the right."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        gap.join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def fitted(rows: Sequence[Sequence[str]], left: Container[int], width: int | None) -> list[str]:
    """The table of a head and rows; where it is wider than `width`, each row as lines of head and cell.

    The first cell of a row then stands above its lines.
    """
    lines = table(rows, left)
    if width is None or all(len(line) <= width for line in lines):
        return lines
    head, *others = rows
    names = max(map(len, head[1:]), default=0)
    stacked: list[str] = []
    for first, *cells in others:
        stacked.append(first)
        stacked += [
            f"  {name.ljust(names)}  {cell}".rstrip()
            for name, cell in zip(head[1:], cells, strict=True)
            if cell
        ]
    return stacked
