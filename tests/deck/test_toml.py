"""Tests of deck/toml.py: the line of each key of a TOML text, and messages about text that is not TOML."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hpctrain.deck.toml import first_repeated, key_lines
from tests.deck.small_text import problems

BRACES = "a table in braces must end on the line where it begins; [section.table] can have several"


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
        ("[run]\ntrace = True # x\n", "deck.toml:2: not TOML: invalid value (write true): trace = True # x"),
        ("[run]\na = [ FALSE]\n", "deck.toml:2: not TOML: invalid value (write false): a = [ FALSE]"),
        (
            "[run]\nepochs = .5\n",
            "deck.toml:2: not TOML: invalid value (write a digit before the point): epochs = .5",
        ),
        (
            "[optimizer]\nmuon = {momentum = 0.9, # x\nnesterov = true}\n",
            f"deck.toml:2: not TOML: invalid initial character for a key part ({BRACES}): "
            "muon = {momentum = 0.9, # x",
        ),
        (
            "[optimizer]\nmuon = {\nnesterov = true}\n",
            f"deck.toml:2: not TOML: invalid initial character for a key part ({BRACES}): muon = {{",
        ),
        (
            "[optimizer]\nmuon = {momentum = 0.9\n, nesterov = true}\n",
            f"deck.toml:2: not TOML: unclosed inline table ({BRACES}): muon = {{momentum = 0.9",
        ),
        ("a.\nb = 1\n", "deck.toml:1: not TOML: invalid initial character for a key part: a."),
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


TRICKY = '''# [not.a.table]
title = "a [b] # c = 1"   # comment with "quote
[run] # header comment

  "steps"   = 3
'dir' = 'C:\\path\\'
[batch.deep]
x = [ # list
  1, [2, "]"],  # ] not the end
  { y = "}", z = [ { w = 1 },
     { w = 2 } ] },
]
after = 1
text = """
key = "not a key" \\""" still
[nor.a.table]
"""
last = \'\'\'
other = 1\'\'\'\'\'
a.b . "c.d" = { e = 1, f.g = 2 }
"quo\\"te\\u0041" = 1979-05-27T07:32:00Z
[[servers]]
name = "one"
[servers.part]
p = 1
[[servers]]
name = "two"
[[servers.disks]]
size = 1
'''


def test_keys_are_found_among_comments_strings_and_brackets() -> None:
    assert key_lines(TRICKY) == {
        ("title",): 2,
        ("run",): 3,
        ("run", "steps"): 5,
        ("run", "dir"): 6,
        ("batch",): 7,
        ("batch", "deep"): 7,
        ("batch", "deep", "x"): 8,
        ("batch", "deep", "x", "2"): 10,
        ("batch", "deep", "x", "2", "y"): 10,
        ("batch", "deep", "x", "2", "z"): 10,
        ("batch", "deep", "x", "2", "z", "0"): 10,
        ("batch", "deep", "x", "2", "z", "0", "w"): 10,
        ("batch", "deep", "x", "2", "z", "1"): 11,
        ("batch", "deep", "x", "2", "z", "1", "w"): 11,
        ("batch", "deep", "after"): 13,
        ("batch", "deep", "text"): 14,
        ("batch", "deep", "last"): 18,
        ("batch", "deep", "a"): 20,
        ("batch", "deep", "a", "b"): 20,
        ("batch", "deep", "a", "b", "c.d"): 20,
        ("batch", "deep", "a", "b", "c.d", "e"): 20,
        ("batch", "deep", "a", "b", "c.d", "f"): 20,
        ("batch", "deep", "a", "b", "c.d", "f", "g"): 20,
        ("batch", "deep", 'quo"teA'): 21,
        ("servers",): 22,
        ("servers", "0"): 22,
        ("servers", "0", "name"): 23,
        ("servers", "0", "part"): 24,
        ("servers", "0", "part", "p"): 25,
        ("servers", "1"): 26,
        ("servers", "1", "name"): 27,
        ("servers", "1", "disks"): 28,
        ("servers", "1", "disks", "0"): 28,
        ("servers", "1", "disks", "0", "size"): 29,
    }


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_with_any_convention(end: str) -> None:
    assert key_lines(end.join(["[a]", "", "b = 1", "c = [", "1,", "]", "d = 2"]))[("a", "d")] == 7


@pytest.mark.parametrize("text", ["a", "a = [1", 'a = "x', "[a", "= 1", "a = {b 1}", "\x00"])
def test_other_text_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        key_lines(text)


def test_repeated_keys_and_tables() -> None:
    assert first_repeated("[a]\nb = 1\nc = 2\n\nb = 3\n") == (("a", "b"), 2, 5)
    assert first_repeated("[a]\n[b]\n[a]\n") == (("a",), 1, 3)
    assert first_repeated("[[a]]\n[[a]]\n") is None
    assert first_repeated("a = [1") is None


def _basic(text: str) -> str:
    """A basic string, with escapes where TOML asks for them."""
    escaped = [f"\\U{ord(letter):08X}" if letter in '"\\\x7f' or letter < " " else letter for letter in text]
    return f'"{"".join(escaped)}"'


names = some.one_of(some.from_regex(r"[A-Za-z0-9_-]{1,4}", fullmatch=True), some.text(max_size=4))
leaves = some.one_of(
    some.integers(-9, 9).map(str),
    some.just("true"),
    some.just("1979-05-27 07:32:00"),
    some.text(alphabet="ab#[]{},=.\" '\n", max_size=8).map(_basic),
    some.text(alphabet='ab#[]{},=." \n', max_size=8).map(lambda text: f"'''{text}'''"),
    some.text(alphabet="ab#[]{},=.' \n", max_size=8).map(lambda text: f'"""{text}"""'),
)
values = some.recursive(
    leaves,
    lambda inner: some.one_of(
        some.lists(inner, max_size=3).map(lambda items: "[ # ]\n" + ",\n ".join(items) + "]"),
        some.dictionaries(names, inner, max_size=2).map(
            lambda table: "{" + ", ".join(f"{_basic(name)} = {item}" for name, item in table.items()) + "}"
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(some.dictionaries(names, some.dictionaries(names, values, max_size=3), min_size=1, max_size=3))
def test_every_key_has_the_line_where_it_was_written(tables: dict[str, dict[str, str]]) -> None:
    tomllib: Any = pytest.importorskip("tomllib")
    text, lines = "", {}
    for section, table in tables.items():
        text += "# x = [\n"
        lines[section,] = text.count("\n") + 1
        text += f'[ {_basic(section)} ] # "\n'
        for key, value in table.items():
            lines[section, key] = text.count("\n") + 1
            text += f"{_basic(key)} = {value} # '\n"
    assert set(tomllib.loads(text)) == set(tables)
    found = key_lines(text)
    assert {path: line for path, line in found.items() if len(path) <= 2} == lines
