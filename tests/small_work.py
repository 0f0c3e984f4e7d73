"""Folder with a text and the deck of a small model, for tests that start runs through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TABLES: dict[str, dict[str, Any]] = {
    "run": {"title": "small", "steps": 2},
    "model": {"family": "gpt2", "layers": 2, "hidden": 16, "heads": 2},
    "data": {"tokens": "tokens.h5"},
    "batch": {"global_size": 4, "micro_size": 1, "sequence": 16},
    "machine": {"peak_flops": 1e10},
}


def small_deck(**tables: dict[str, Any]) -> str:
    """Return the text of a deck: TABLES with further or other keys; a key that is None is left out."""
    lines = []
    for name in dict.fromkeys((*TABLES, *tables)):
        lines.append(f"[{name}]")
        keys = TABLES.get(name, {}) | tables.get(name, {})
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items() if value is not None]
    return "\n".join(lines) + "\n"


def write_small_work(folder: Path, **tables: dict[str, Any]) -> None:
    """Write `text.txt`, from which the deck's tokens can be made, and `deck.toml` into a folder."""
    (folder / "text.txt").write_text("hello world, " * 300)
    (folder / "deck.toml").write_text(small_deck(**tables))
