"""Elements of HTML. Each text from a file passes `text`, which escapes and shortens it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from hpctrain.files import finite
from hpctrain.text import escaped

TEXT_LETTERS = 400
"""Largest number of characters of a text."""


def text(words: object, most: int = TEXT_LETTERS) -> str:
    """Return a text for content or attributes, shortened, with escaped markup and control characters."""
    shown = str(words)[: most + 1]
    return html.escape(escaped(shown[:most] + "..." if len(shown) > most else shown))


def cell(words: object, kind: str = "", *, head: bool = False) -> str:
    """Return a cell of a table, which is empty for None."""
    name = "th" if head else "td"
    within = f' class="{kind}"' if kind else ""
    return f"<{name}{within}>{'' if words is None else text(words)}</{name}>"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,), kind: str = ""
) -> str:
    """Return a table that scrolls sideways if it is too wide.

    Args:
        head: Titles of the columns.
        rows: Cells as HTML.
        left: Columns that are aligned to the left.
        kind: "stack" for cells below each other on a phone, "tall" for a table that also scrolls down.
    """
    heads = "".join(
        cell(words, "text" if index in left else "", head=True) for index, words in enumerate(head)
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    parts = f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
    classes = f"wide {kind}".rstrip()
    return f'<div class="{classes}" tabindex="0"><table>{parts}</table></div>'


def section(name: str, title: str, content: str) -> str:
    """Return a section of the page with a heading; "" without content."""
    return f'<section id="{name}"><h2>{text(title)}</h2>{content}</section>' if content else ""


def details(summary: str, content: str) -> str:
    """Return an element that is shown only if it is opened."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>" if content else ""


def note(words: str) -> str:
    """Return a note; "" without words."""
    return f'<p class="note">{text(words, 1000)}</p>' if words else ""


def embedded(value: Any) -> str:
    """Return JSON for a script element, which no text can close. Numbers that are not finite are null."""
    dumped = json.dumps(finite(value), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
