"""Tables of text in aligned columns."""

from __future__ import annotations

from collections.abc import Container, Sequence


def table(rows: Sequence[Sequence[str]], left: Container[int] = (0,), gap: str = "  ") -> list[str]:
    """Return the lines of a table whose columns are as wide as their longest cells.

    Args:
        rows: Cells of each row; all rows have the same number of cells.
        left: Numbers of the columns that are aligned to the left. All others are aligned to the right.
        gap: Text between two columns.
    """
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
    """Return the lines of a table that fits into a terminal.

    If the table is wider than the terminal, each row becomes a block: its first cell, and below it one line
    for each other cell that is not empty, with the name of the column.

    Args:
        rows: The heads of the columns, and then the rows.
        left: As in `table`.
        width: Width of the terminal in characters; None if lines may have any length.
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
