"""TOML text to values and lines, within the bounds of a deck; what is wrong as a line and a sentence."""

from __future__ import annotations

import re
import sys
from typing import Any

from hpctrain.deck.sources import clipped
from hpctrain.deck.toml_lines import LONGEST_TEXT, BoundError, Path, first_repeated, key_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DECK_BYTES = 256 << 10  # of a deck's file at most


class TomlError(Exception):
    """A text that no deck can be: the line, None where it is not known, and the rest of a sentence."""

    def __init__(self, line: int | None, reason: str) -> None:
        self.line, self.reason = line, reason
        super().__init__(reason)


def parse_toml(text: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """The values of a text, and the line of every key and table. Raises `TomlError`, and nothing else."""
    lines: dict[Path, int] = {}
    try:
        lines = key_lines(text)
    except BoundError as error:
        named = ".".join(error.path[:2])
        raise TomlError(error.line, f"{clipped(named)}: {error.reason}" if named else error.reason) from None
    except ValueError:
        pass  # the parser says better what is wrong
    try:
        return tomllib.loads(text), lines
    except tomllib.TOMLDecodeError as error:
        raise _syntax(text, str(error)) from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise TomlError(None, f"not TOML: {str(error)[:1].lower()}{clipped(str(error)[1:])}") from None


def parse_argument(text: str) -> object:
    """The value of a `--set` argument: as TOML, or else the bare text itself. Raises `TomlError`."""
    if not encodes(text):
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


def encodes(text: str) -> bool:
    """Whether a text can be written as UTF-8: bytes of an argument that were none cannot."""
    return re.search("[\ud800-\udfff]", text) is None


def _syntax(text: str, message: str) -> TomlError:
    """A text that is not TOML: the parser's message, with the line as it stands in the file."""
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
        named = ".".join(re.findall(r"'([^']*)'", twice[1]))
        return TomlError(line, f"{named} is given twice: {shown}")
    if reason == "Invalid value":
        hint = " (text needs quotes)"
    else:
        hint = " (a quote is not closed)" if reason == r"Illegal character '\n'" else ""
    return TomlError(line, f"not TOML: {reason[:1].lower()}{reason[1:]}{hint}: {shown}")
