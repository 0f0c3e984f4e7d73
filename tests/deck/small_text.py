"""The text of a small deck, and what is said of texts like it."""

from __future__ import annotations

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError

SMALL = """\
[run]
steps = 20

[model]
family = "gpt2"
layers = 2
hidden = 64
heads = 8

[data]
tokens = "tokens.h5"

[layout]
tensor = 1

[batch]
global_size = 8
sequence = 64
"""


def problems(text: str, *overrides: str, ranks: int | None = None) -> list[str]:
    """What `parse_deck` says."""
    with pytest.raises(HpctrainError) as caught:
        parse_deck(text, overrides, ranks=ranks)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def changed(line: str, new: str) -> str:
    """The small deck with one line replaced."""
    assert SMALL.count(line + "\n") == 1
    return SMALL.replace(line + "\n", new + "\n")
