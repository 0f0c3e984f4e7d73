"""Strategies of decks: mutations of a deck that is right, and text that is hardly one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as some

from hpctrain.deck.presets import presets
from hpctrain.deck.schema import fields, sections

Tables = dict[str, dict[str, str]]

RIGHT: Tables = {
    "run": {"steps": "20"},
    "model": {"family": '"gpt2"', "layers": "2", "hidden": "64", "heads": "8"},
    "data": {"tokens": '"tokens.h5"'},
    "layout": {"tensor": "1"},
    "batch": {"global_size": "8", "sequence": "64"},
}

KEYS = [(section, key) for section in sections() for key in fields(section)]
WORDS = [
    "none",
    "full",
    "balanced",
    "disk",
    "fp16",
    "node",
    "zb-v",
    "interleaved",
    "llama",
    "cuda",
    "xpu",
    *presets(),
]
SIZES = [
    "1e400 GB",
    "9" * 400 + " MB",
    "-5 s",
    "1e999 d",
    "nan",
    "25 XB",
    "1_0 kB",
    "1__0 kB",
    "\u0663 MB",
    "1 h 2 h",
]
ODD = [
    "",
    ".",
    "..",
    "/",
    "/dev/zero",
    "\0",
    "a\nb",
    "\x1b[31m",
    "\u202e",
    "\ufeff",
    "x" * 300,
    "y" * 5000,
    "~",
]
LARGE = [2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**4299]

names = some.one_of(
    some.sampled_from(
        [*sections(), *(key for _, key in KEYS), "include", "0", "", "model.layers", "n" * 5000]
    ),
    some.text(max_size=6),
)
texts = some.one_of(some.sampled_from([*WORDS, *SIZES, *ODD]), some.text(max_size=12))
numbers = some.one_of(
    some.integers(-3, 70).map(str),
    some.integers(-(2**70), 2**70).map(str),
    some.sampled_from(LARGE).map(str),
    some.sampled_from(
        ["9" * 5000, "-0x" + "f" * 10, "0x" + "f" * 5000, "0b" + "1" * 5000, "1." + "0" * 5000]
    ),
    some.floats().map(repr),
    some.sampled_from(["1e999", "-1e-999", "+nan", "-inf", "1_000", "0o17", "00", "1__0"]),
)
leaves = some.one_of(
    numbers,
    texts.map(json.dumps),
    some.sampled_from(
        ["true", "false", "1979-05-27T07:32:00Z", "07:32:00", "2024-02-30", "'raw'", '"""a\nb"""']
    ),
)
values = some.one_of(
    leaves,
    some.recursive(
        leaves,
        lambda inner: some.one_of(
            some.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]"),
            some.tuples(names.map(json.dumps), inner).map(lambda pair: f"{{ {pair[0]} = {pair[1]} }}"),
        ),
        max_leaves=5,
    ),
    some.integers(1, 5000).map(lambda depth: "[" * depth + "1" + "]" * depth),
    some.integers(1, 2000).map(lambda depth: "{a=" * depth + "1" + "}" * depth),
    some.integers(1, 30_000).map(lambda length: f"[{'1, ' * length}]"),
)
keys = some.one_of(some.sampled_from(KEYS), some.tuples(some.sampled_from([*sections()]), names))


@some.composite
def decks(draw: Callable[[Any], Any]) -> str:
    """A deck in which some keys have other values, are missing, or are not of this world."""
    tables = {section: dict(table) for section, table in RIGHT.items()}
    for section, key in draw(some.lists(keys, max_size=5)):
        tables.setdefault(section, {})[bare(key)] = draw(values)
    for section, key in draw(some.lists(some.sampled_from(KEYS), max_size=2)):
        tables.get(section, {}).pop(key, None)
    lines = []
    for section, table in tables.items():
        lines += [f"[{section}]", *(f"{key} = {value}" for key, value in table.items())]
    for line in draw(some.lists(some.one_of(lines_of_toml, some.text(max_size=10)), max_size=2)):
        lines.insert(draw(some.integers(0, len(lines))), line)
    return "\n".join(lines) + "\n"


def bare(key: str) -> str:
    """A key as TOML writes it."""
    plain = key.replace("_", "").isalnum() and key.isascii()
    return key if plain else json.dumps(key)


lines_of_toml = some.one_of(
    some.tuples(names, values).map(lambda pair: f"{bare(pair[0])} = {pair[1]}"),
    names.map(lambda name: f"[{bare(name)}]"),
    names.map(lambda name: f"[[{bare(name)}]]"),
    some.lists(names, min_size=1, max_size=3).map(lambda path: f"[{'.'.join(map(bare, path))}]"),
    some.integers(2, 3000).map(lambda length: ".".join("a" * length) + " = 1"),
    some.sampled_from(
        ["include = []", 'include = "\\u0000"', "include = 3", 'include = ["", 1]', "[", "]", "= 1"]
    ),
)
raw = some.one_of(
    some.lists(lines_of_toml, max_size=8).map("\n".join),
    some.text(alphabet="[]{}=.,\"'\\#\n ab1_-:Tu", max_size=60),
    some.text(max_size=40),
)
arguments = some.one_of(
    some.tuples(some.sampled_from(KEYS), values).map(lambda pair: f"{pair[0][0]}.{pair[0][1]}={pair[1]}"),
    some.tuples(some.sampled_from(KEYS), texts).map(lambda pair: f"{pair[0][0]}.{pair[0][1]}={pair[1]}"),
    some.tuples(names, some.text(max_size=8)).map("=".join),
    some.sampled_from(
        ["data.tokens=\udcff", "\udcff=1", "run.title=a\udcffb", "include=x", "=", ".=", "a.=", "run.=1"]
    ),
)
