"""Tests of deck/toml.py: messages about text that is not TOML."""

from __future__ import annotations

import pytest

from tests.deck.small_text import problems


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nsteps = ten\n", "deck.toml:2: not TOML: invalid value (text needs quotes): steps = ten"),
        (
            "[run]\nsteps = 1\n[batch\n",
            'deck.toml:3: not TOML: expected "]" at the end of a table declaration: [batch',
        ),
        ("[run]\nsteps\n", 'deck.toml:2: not TOML: expected "=" after a key in a key/value pair: steps'),
        (
            "[run]\nsteps = 1\ntitle = 'x'\nsteps = 2\n",
            "deck.toml:4: run.steps is given twice, first on line 2",
        ),
        (
            '[run]\ntitle = "a\nsteps = 1\n',
            "deck.toml:2: not TOML: illegal character '\\n' (a quote is not closed): title = \"a",
        ),
        ("run.seed = 1\n[run]\n", "deck.toml:2: run is given twice: [run]"),
        ("[run]\nsteps = 1\n\n[run]\n", "deck.toml:4: run is given twice, first on line 1"),
    ],
)
def test_text_that_is_not_toml(text: str, message: str) -> None:
    found = problems(text)
    assert [sentence.replace("'", '"') for sentence in found] == [message.replace("'", '"')]


def test_an_unfinished_list_names_the_last_line() -> None:
    (message,) = problems("[run]\nsteps = [1,\n2\n")
    assert message.startswith("deck.toml:3: not TOML: ")
