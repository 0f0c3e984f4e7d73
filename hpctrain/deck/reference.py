"""The reference of all keys of the deck, as text, generated from the schema."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_origin

from pydantic.fields import FieldInfo

from hpctrain.deck.check import RELATIONS, TRANSFORMER_RELATIONS
from hpctrain.deck.key import field_text
from hpctrain.deck.key_messages import expected_value, row_section, unknown_section, value_type
from hpctrain.deck.presets import presets
from hpctrain.deck.relations import relations_text
from hpctrain.deck.resume_rules import resume_rules
from hpctrain.deck.schema import fields, sections, tables
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.text import nearest, table
from hpctrain.units import format_bytes

_WIDTH = 100
_COLUMNS = (23, 30, 30, 9)  # widths of key, type, default and unit; with margin and gaps they fill the width

_HEAD = """
A deck is a TOML file of the sections and keys below; keys without a default ("required") must be
given. Sizes may be written as "25 MB", "24 MiB" or "4G" (binary), times as "90 s", "1 h 30 min" or
"1-12:30:00". "~" at the beginning of a path is the home folder. At
the top of a deck, include = "base.toml" (or a list) takes the keys of other files, relative to this
one; the keys of this file have precedence. On the command line, --set section.key=value has precedence over
all files, and --set section.key= resets a key to its default. A default that names other keys follows
them, also in a resumed run. "Resume" says what happens to a resumed run if the value has changed.
"free": the run uses it. "refused": it is an error.
"fresh optimizer": it is an error unless optimizer.restart = true initializes
the optimizer's state again, since the checkpoint has none for the new value.
"""
_PRESET_KEYS = ("family", "layers", "hidden", "heads", "key_value_heads", "mlp", "vocabulary", "norm_epsilon")

_HEADINGS = {"key_value_heads": "kv_heads", "norm_epsilon": "epsilon"}
"""Headings of columns of presets that are shorter than the names of keys."""


def reference_text(section: str | None = None, width: int = _WIDTH) -> str:
    """Return the text of `hpctrain deck --reference`: keys with type, default, unit and help.

    Args:
        section: Name of the section or table to describe, such as "model" or "model.adapters"; None for all
            sections, preceded by an introduction.
        width: Columns of the terminal. Lines have at most so many, but never more than 100. Below 100, lists
            replace the tables.

    Raises:
        HpctrainError: There is no such section or table.
    """
    if section is not None and section not in tables():
        raise HpctrainError(f"--reference {section}: {_unknown_table(section)}")
    as_table = width >= _WIDTH
    width = min(width, _WIDTH)
    parts: list[list[str]] = [] if section else [_wrapped(" ".join(_HEAD.split()), width, 0)]
    for name in [section] if section else sections():
        parts.append([*_wrapped(f"[{name}]  {_purpose(name)}", width, 2), ""])
        for heading, full, keys in _tables(name):
            parts[-1] += ["", *_wrapped(heading, width, 2), ""] if heading else []
            parts[-1] += _section_table(full, keys) if as_table else _section_list(full, keys, width)
    if section in {None, "model"}:
        parts.append(_presets(width, as_table))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _unknown_table(name: str) -> str:
    """Return the end of a message about a section or table that does not exist, which may be a key."""
    table_name, _, key = name.rpartition(".")
    if table_name in tables() and key in fields(table_name):
        return f"is a key, not a section (its section is {table_name})"
    near = nearest(name, tables()) if table_name else None
    return f"unknown section (did you mean [{near}]?)" if near else unknown_section(name, [])


def _tables(section: str) -> Iterator[tuple[str, str, Mapping[str, FieldInfo]]]:
    """Yield heading, full name and keys of a section, and then of each table that one of its keys holds."""
    yield "", section, fields(section)
    for key, field in fields(section).items():
        full = f"{section}.{key}"
        if row := row_section(field):
            yield f"  Keys of each [[{section}]], a table of {full}:", full, row.model_fields
    for name in tables():
        if name.startswith(f"{section}."):
            yield f"  [{name}]  {_purpose(name)}", name, fields(name)


def _purpose(name: str) -> str:
    """Return the docstring of the class of a table on one line."""
    return " ".join((tables()[name].__doc__ or "").split())


def _section_table(section: str, keys: Mapping[str, FieldInfo]) -> Iterator[str]:
    yield from _row(("key", "type", "default", "unit"))
    for key, field in keys.items():
        yield from _row((key, _type(key, field), _default(field), field_text(field, "unit")))
        for text in _sentences(f"{section}.{key}", field):
            yield from _indented(text, _WIDTH)


def _section_list(section: str, keys: Mapping[str, FieldInfo], width: int) -> Iterator[str]:
    for key, field in keys.items():
        yield f"  {key}"
        unit, default = field_text(field, "unit"), _default(field)
        facts = [_type(key, field), default if default == "required" else f"default: {default}"]
        facts += [f"in {unit}"] if unit else []
        for text in ("; ".join(facts), *_sentences(f"{section}.{key}", field)):
            yield from _indented(text, width)


def _sentences(key: str, field: FieldInfo) -> list[str]:
    """Return the help of a key, its relations to other keys, and what happens if it changes."""
    relations = relations_text(key, RELATIONS + TRANSFORMER_RELATIONS)
    return [field.description or "", relations, resume_rules()[key].sentence]


def _indented(text: str, width: int) -> list[str]:
    """Return indented lines that do not break names at a hyphen, such as "schedule-free"."""
    indent = " " * 6
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _type(name: str, field: FieldInfo) -> str:
    if name == "preset":
        return "name of a preset, see below"
    words = expected_value(field)
    return words if get_origin(value_type(field)) is Literal else words.removeprefix("a ")


def _default(field: FieldInfo) -> str:
    derived = field_text(field, "derived")
    if derived:
        return derived
    if field.is_required():
        return "required"
    if field.default is None:
        return "the defaults of its keys"
    size = f" ({format_bytes(field.default)})" if field_text(field, "unit") == "bytes" else ""
    return toml_value(field.default) + size


def _presets(width: int, as_table: bool) -> list[str]:
    heading = "Presets  The keys of [model], and batch.sequence, that model.preset fills."
    lines = [*_wrapped(heading, width, 2), ""]
    columns = (*_PRESET_KEYS, "sequence")
    rows = [
        [name, *(str(preset.model[key]) for key in _PRESET_KEYS), str(preset.sequence)]
        for name, preset in presets().items()
    ]
    if as_table:
        lines += [
            "  " + line
            for line in table([["preset", *(_HEADINGS.get(name, name) for name in columns)], *rows], gap=" ")
        ]
    else:
        for name, *values in rows:
            facts = ", ".join(f"{key} {value}" for key, value in zip(columns, values, strict=True))
            lines += _wrapped(f"  {name}: {facts}", width, 6)
    lines.append("")
    for name, preset in presets().items():
        if experts := preset.experts:
            sizes = f"{name}: {experts['count']} experts of mlp {experts['mlp']}"
            lines += _wrapped(f"{sizes}, each token goes to {experts['per_token']}.", width, 4)
        if scaling := preset.rope_scaling:
            by = f"rotary positions are scaled by {scaling['factor']:g} ({scaling['kind']})"
            lines += _wrapped(f"{name}: {by}.", width, 4)
    lines.append("")
    for source in dict.fromkeys(preset.source for preset in presets().values()):
        names = [name for name, preset in presets().items() if preset.source == source]
        lines += _wrapped(f"{', '.join(names)}: {source}.", width, 4)
    return lines


def _row(cells: Sequence[str]) -> Iterator[str]:
    """Yield the lines of one row of the table of keys; long cells continue on further lines."""
    wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, _COLUMNS, strict=True)]
    for index in range(max(map(len, wrapped))):
        parts = [cell[index] if index < len(cell) else "" for cell in wrapped]
        padded = [part.ljust(width) for part, width in zip(parts, _COLUMNS, strict=True)]
        yield ("  " + "  ".join(padded)).rstrip()


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * indent)
