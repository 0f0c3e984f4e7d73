"""The table of families: one module describes each family, and no other file of the code names it."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpctrain
from hpctrain.deck.families import FAMILIES

ROOT = Path(hpctrain.__file__).parent
TEXTS = {path: path.read_text() for path in ROOT.rglob("*.py")}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in {"gpt2", "llama"}])
def test_one_file_names_a_family(name: str) -> None:
    """GPT-2 and Llama are also what some decks and messages use. Benchmarks compare families by name."""
    names = [name, *(each.architecture for each in FAMILIES[name].model_types)]
    files = {path for path, text in TEXTS.items() if any(f'"{each}"' in text for each in names)}
    files = {path for path in files if path.parent != ROOT / "bench"}
    assert len(files) == 1 and files.pop().parent == ROOT / "deck" / "families"
