"""Parser of the TOML text of decks and of `--set` values, with line numbers and bounds on its size."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from hpctrain.deck.sources import clipped
from hpctrain.deck.toml_lines import LONGEST_TEXT, BoundError, KeyPath, first_repeated, key_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGE = Path(__file__).parent

DECK_BYTES = 256 << 10
"""Largest size of a deck's file."""


class TomlError(Exception):
    """Error in the text of a deck.

    Attributes:
        line: Its line number, counted from 1; None if it is not known.
        reason: Message without the line.
    """

    def __init__(self, line: int | None, reason: str) -> None:
        self.line, self.reason = line, reason
        super().__init__(reason)


def parse_toml(text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Parse the text of a deck.

    Returns:
        The values, and the line number of each key and table by its path, such as ("batch", "micro_size").

    Raises:
        TomlError: The text is not TOML or exceeds a bound. No other exception is raised.
    """
    lines: dict[KeyPath, int] = {}
    try:
        lines = key_lines(text)
    except BoundError as error:
        key = ".".join(error.path[:2])
        raise TomlError(error.line, f"{clipped(key)}: {error.reason}" if key else error.reason) from None
    except ValueError:
        pass  # the parser below gives a better message
    try:
        return tomllib.loads(text), lines
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(text, str(error)) from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise TomlError(None, f"not TOML: {str(error)[:1].lower()}{clipped(str(error)[1:])}") from None


def parse_argument(text: str) -> object:
    """Parse the value of a `--set` argument as TOML. Text that is not TOML is returned as it is.

    Raises:
        TomlError: The text is not UTF-8 or exceeds a bound.
    """
    if not is_utf8(text):
        raise TomlError(None, "is not UTF-8 text")
    if len(text) > LONGEST_TEXT:
        raise TomlError(None, f"text of {len(text)} characters, more than {LONGEST_TEXT}")
    line = f"value = {text}"
    try:
        key_lines(line)
        parsed = tomllib.loads(line)
    except BoundError as error:
        raise TomlError(None, error.reason) from None
    except (ValueError, OverflowError, RecursionError):
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


@cache
def read_data_file(name: str) -> dict[str, Any]:
    """Return the content of a TOML file in this package, which is read once per process.

    Args:
        name: Path of the file relative to the package, such as "presets.toml".
    """
    content: dict[str, Any] = tomllib.loads((_PACKAGE / name).read_text(encoding="utf-8"))
    return content


def is_utf8(text: str) -> bool:
    """Return True if a text can be encoded; arguments of a process may contain bytes that are not UTF-8."""
    return re.search("[\ud800-\udfff]", text) is None


def _syntax_error(text: str, message: str) -> TomlError:
    """Return the error of a text that is not TOML, from the parser's message, with the line of the text."""
    repeated = first_repeated(text)
    if repeated is not None:
        path, first, line = repeated
        return TomlError(line, f"{clipped('.'.join(path))} is given twice, first on line {first}")
    match = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    reason = clipped(message[: match.start()] if match else message)
    rows = text.rstrip("\n").split("\n")
    line = int(match[1]) if match and match[1] else len(rows)
    shown = clipped(rows[min(line, len(rows)) - 1].strip())
    twice = re.fullmatch(r"Cannot declare \((.*)\) twice", reason)
    if twice:
        key = ".".join(re.findall(r"'([^']*)'", twice[1]))
        return TomlError(line, f"{key} is given twice: {shown}")
    hints = {"Invalid value": " (text needs quotes)", r"Illegal character '\n'": " (a quote is not closed)"}
    return TomlError(line, f"not TOML: {reason[:1].lower()}{reason[1:]}{hints.get(reason, '')}: {shown}")
