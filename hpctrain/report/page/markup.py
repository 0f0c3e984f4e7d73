"""Pieces of HTML. Every text goes through `text`: what a file holds stays letters, of a bounded number."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from hpctrain.files import finite
from hpctrain.text import escaped

TEXT_LETTERS = 400
"""Of a text at most."""


def text(words: object, most: int = TEXT_LETTERS) -> str:
    """A text of anybody's, shortened, its control characters told, for between tags or in an attribute."""
    shown = str(words)[: most + 1]
    return html.escape(escaped(shown[:most] + "..." if len(shown) > most else shown))


def cell(words: object, kind: str = "", *, head: bool = False) -> str:
    """A cell of a table; None is an empty one."""
    name = "th" if head else "td"
    within = f' class="{kind}"' if kind else ""
    return f"<{name}{within}>{'' if words is None else text(words)}</{name}>"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,), kind: str = ""
) -> str:
    """A table that scrolls within itself where it is too wide; `rows` are of cells that are HTML already.

    Of the kinds "stack" has its cells below each other on a phone, and "tall" scrolls down, too.
    """
    heads = "".join(
        cell(words, "text" if index in left else "", head=True) for index, words in enumerate(head)
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    parts = f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
    classes = f"wide {kind}".rstrip()
    return f'<div class="{classes}" tabindex="0"><table>{parts}</table></div>'


def section(name: str, title: str, content: str) -> str:
    """A part of the page with its heading, which links lead to; nothing without content."""
    return f'<section id="{name}"><h2>{text(title)}</h2>{content}</section>' if content else ""


def details(summary: str, content: str) -> str:
    """What is shown only when asked for."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>" if content else ""


def note(words: str) -> str:
    """A sentence beside what it is about; nothing without words."""
    return f'<p class="note">{text(words, 1000)}</p>' if words else ""


def embedded(value: Any) -> str:
    """JSON for within a script element, which no text in it can end; null for what is not finite."""
    dumped = json.dumps(finite(value), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
