"""Text of a deck that is converted from the options of another trainer (`hpctrain deck --from`)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from hpctrain.deck.convert.deepspeed import convert_configuration
from hpctrain.deck.convert.megatron import convert_script
from hpctrain.deck.convert.rule_table import Conversion
from hpctrain.deck.convert.shell_script import parse_arguments
from hpctrain.deck.key import field_text
from hpctrain.deck.schema import fields, tables
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError, failing_as
from hpctrain.files import parse_json, read_text
from hpctrain.text import escaped

MAX_FILE_BYTES = 1 << 20
"""Largest size of a configuration or script."""

_WIDTH = 100


def converted_deck(source: str) -> str:
    """Convert a DeepSpeed configuration or Megatron-LM arguments to a deck, and return its text. Local.

    Content that begins with "{" is read as a DeepSpeed configuration, whatever the name of the file is; all
    other content is read as arguments. A shell script is not executed. The deck is not checked.

    Args:
        source: Path of the JSON file, or of a shell script or text file with arguments. If it starts with
            "--", it is taken as the arguments themselves.

    Returns:
        The deck as TOML. Options that no key expresses raise no error: comments at the top list them, with
        reasons. Required keys that the source does not set stand as comments in their sections; `read_deck`
        reports them as missing until they are filled in.

    Raises:
        HpctrainError: The source is empty, is not UTF-8 text, begins with "{" and is not JSON, or is neither
            of the two.
        InputOutputError: The file cannot be read, or is larger than MAX_FILE_BYTES.
    """
    if not source.strip():
        raise HpctrainError('--from: requires a file, such as ds_config.json or "run.sh" with its arguments')
    name, content = ("arguments", source) if source.startswith("--") else (Path(source).name, _read(source))
    if content.lstrip().startswith("{"):
        return _text(name, convert_configuration(_configuration(source, content)))
    try:
        arguments = parse_arguments(content)
    except ValueError as error:
        raise HpctrainError(f"{name}: {error}") from None
    if not arguments:
        raise HpctrainError(
            f"{source}: must be a DeepSpeed configuration (JSON, such as ds_config.json) or a script with"
            " arguments of Megatron-LM (such as --num-layers 24)"
        )
    return _text(name, convert_script(content))


def _read(path: str) -> str:
    with failing_as(f"{path}: cannot be read"):
        try:
            return read_text(path, MAX_FILE_BYTES)
        except UnicodeDecodeError:
            raise HpctrainError(f"{path}: is not UTF-8 text") from None


def _configuration(path: str, content: str) -> Mapping[str, object]:
    try:
        configuration = parse_json(content)
    except ValueError as error:
        raise HpctrainError(f"{path}: is not JSON: {error}") from None
    assert isinstance(configuration, dict)
    return configuration


def _text(name: str, conversion: Conversion) -> str:
    lines = _comment(f"Converted from {name} ({conversion.program}).")
    if conversion.unsupported:
        lines += ["#", "# Options that this deck does not have, or has only in part:"]
        for option, reason in conversion.unsupported.items():
            lines += _comment(f"  {option}: {reason}")
    if conversion.unneeded:
        lines += ["#", *_comment(f"Options that require no key: {', '.join(conversion.unneeded)}.")]
    for table in tables():
        rows = list(_rows(table, conversion))
        if rows:
            lines += ["", f"[{table}]", *rows]
    return "\n".join(lines) + "\n"


def _rows(table: str, conversion: Conversion) -> Iterator[str]:
    """Yield the lines of a table: its keys, and required ones that are missing as comments."""
    if "." in table and not any(key.startswith(f"{table}.") for key in conversion.keys):
        return
    for name, description in fields(table).items():
        key = f"{table}.{name}"
        if key in conversion.keys:
            default = f"  # {conversion.program}'s default" if key in conversion.defaults else ""
            yield f"{name} = {toml_value(conversion.keys[key])}{default}"
        elif _is_required(description):
            yield f"# {name} =   # required: {description.description}"


def _is_required(description: FieldInfo) -> bool:
    derived = field_text(description, "derived")
    return derived.endswith("else required") or (description.is_required() and not derived)


def _comment(line: str) -> list[str]:
    """Return a line as comments of limited width, whose continuation lines are indented."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        escaped(line),
        _WIDTH,
        initial_indent="# ",
        subsequent_indent=f"#   {indent}",
        break_long_words=False,
        break_on_hyphens=False,
    )
