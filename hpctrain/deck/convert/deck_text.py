"""The text of a deck from what another program is told: keys, what they do not say, what is missing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from hpctrain.characters import escaped
from hpctrain.deck.convert import deepspeed, megatron
from hpctrain.deck.convert.rules import Translated
from hpctrain.deck.convert.script import arguments_of
from hpctrain.deck.key import extra
from hpctrain.deck.schema import fields, sections
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError, failing_as
from hpctrain.files import parse_json, read_text

FILE_BYTES = 1 << 20
"""Of a configuration, or a script, at most."""

_WIDTH = 100


def foreign_deck(source: str) -> str:
    """A deck, as TOML, from a DeepSpeed configuration or from Megatron-LM's arguments: those of a file, of
    a script of a shell for instance, or these themselves, where `source` begins with dashes.

    HpctrainError where it is neither.
    """
    if not source.strip():
        raise HpctrainError('--from: names no file (ds_config.json, or a script with arguments: "run.sh")')
    name, content = ("arguments", source) if source.startswith("--") else (Path(source).name, _read(source))
    if content.lstrip().startswith("{"):
        return _text(name, deepspeed.NAME, deepspeed.translated(_configuration(source, content)))
    if not arguments_of(content):
        neither = f"is neither a configuration of {deepspeed.NAME} (JSON, as ds_config.json)"
        raise HpctrainError(f"{source}: {neither} nor has arguments of {megatron.NAME} (as --num-layers 24)")
    return _text(name, megatron.NAME, megatron.translated(content))


def _read(path: str) -> str:
    with failing_as(f"{path}: cannot be read"):
        try:
            return read_text(path, FILE_BYTES)
        except UnicodeDecodeError:
            raise HpctrainError(f"{path}: is not UTF-8 text") from None


def _configuration(path: str, content: str) -> Mapping[str, object]:
    try:
        found = parse_json(content)
    except ValueError as error:
        raise HpctrainError(f"{path}: is not JSON: {error}") from None
    assert isinstance(found, dict)
    return found


def _text(name: str, program: str, found: Translated) -> str:
    lines = _comment(f"From {name}, of {program}.")
    if found.left:
        lines += ["#", "# Not in this deck, or not all of it:", *_listed(found.left)]
    if found.needless:
        lines += ["#", *_comment(f"Needing no key here: {', '.join(found.needless)}.")]
    for section in sections():
        rows = list(_rows(section, found))
        if rows:
            lines += ["", f"[{section}]", *(row.format(program=program) for row in rows)]
    return "\n".join(lines) + "\n"


def _rows(section: str, found: Translated) -> Iterator[str]:
    """Keys, and those that are still to be given as comments."""
    for name, field in fields(section).items():
        key = f"{section}.{name}"
        if key in found.keys:
            default = "  # {program}'s default" if key in found.defaults else ""
            value = toml_value(found.keys[key]).replace("{", "{{").replace("}", "}}")
            yield f"{name} = {value}{default}"
        elif _is_to_be_given(field):
            yield f"# {name} =   # to be given: {field.description}"


def _is_to_be_given(field: FieldInfo) -> bool:
    derived = extra(field, "derived")
    return derived.endswith("else required") or (field.is_required() and not derived)


def _listed(left: Mapping[str, str]) -> Iterator[str]:
    for setting, why in left.items():
        yield from _comment(f"  {setting}: {why}")


def _comment(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        escaped(line),
        _WIDTH,
        initial_indent="# ",
        subsequent_indent=f"#   {indent}",
        break_long_words=False,
        break_on_hyphens=False,
    )
