"""Parser of the TOML text of decks and of `--set` values, with line numbers and bounds on its size.

TOML parsers return values without their lines. A scanner follows only the structure of the text (tables,
keys, strings, brackets) and records the line of each key. It runs before the parser and therefore also
enforces bounds, since some texts would exceed the parser's stack or take it quadratic time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from hpctrain.deck.sources import clipped

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGE = Path(__file__).parent

MAX_DECK_BYTES = 256 << 10
"""Largest size of a deck's file."""

KeyPath = tuple[str, ...]
"""Names of a key and of the tables and list items that contain it, the outermost first."""

MAX_DEPTH = 32
"""Largest number of names in a path; nested lists count as well."""

MOST_KEYS = 1000
"""Largest number of keys and table headers of a file."""

MOST_VALUES = 20_000
"""Largest number of values of a file, those in lists and tables included."""

LONGEST_TEXT = 4096
"""Largest number of characters of a text or name, as of a file's path."""

INTEGER_BITS = 63
"""Largest number of bits of an integer of a deck, without the sign."""

MOST_BITS = 4096
"""Number of bits that any integer of _MOST_DIGITS digits has at most."""

_MOST_DIGITS = 1000

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\r\n]*")
# The last quotes of a string of several lines may have up to two further quotes before them.
_STRING = re.compile(
    r'''"""(?P<basic_lines>(?:[^"\\]|\\.|""?(?!"))*"{0,2})"""'''
    r"""|'''(?P<literal_lines>(?:[^']|''?(?!'))*'{0,2})'''"""
    r'|"(?P<basic>(?:[^"\\\n]|\\.)*)"'
    r"|'(?P<literal>[^'\n]*)'",
    re.DOTALL,
)
_INTEGER = re.compile(r"[+-]?(?:0x[0-9a-f]+|0o[0-7]+|0b[01]+|[0-9]+)")


class TomlError(Exception):
    """Error in the text of a deck, with its line. It is no HpctrainError and no ValueError.

    Attributes:
        line: Its line number, counted from 1; None if it is not known.
        reason: Message without the line.
    """

    def __init__(self, line: int | None, reason: str) -> None:
        self.line, self.reason = line, reason
        super().__init__(reason)


class BoundError(ValueError):
    """Error (a ValueError, no TomlError) of a text that exceeds a bound.

    Attributes:
        path: Path of the key where it does.
        line: Its line number.
        reason: End of a sentence about the key.
    """

    def __init__(self, path: KeyPath, line: int, reason: str) -> None:
        self.path, self.line, self.reason = path, line, reason
        super().__init__(f"line {line}: {'.'.join(path)}: {reason}")


def parse_toml(text: str, bits: int = INTEGER_BITS) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Parse the text of a deck.

    Values that no key of a deck may have, such as dates and infinite numbers, are returned like others.

    Args:
        text: The text.
        bits: Largest number of bits of an integer, without the sign.

    Returns:
        The values as Python's TOML parser returns them, and the line number (counted from 1) of each key and
        table by its path, such as ("batch", "micro_size"), as `key_lines` returns them.

    Raises:
        TomlError: The text is not TOML or exceeds a bound. No other exception is raised. It is neither an
            HpctrainError nor a ValueError.
    """
    lines: dict[KeyPath, int] = {}
    try:
        lines = key_lines(text, bits)
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

    So "4" becomes the number 4, "[1, 2]" a list, both "adamw" and '"adamw"' the text adamw, and "" stays "".

    Raises:
        TomlError: The text contains bytes that are not UTF-8, or exceeds a bound.
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

    All calls for a file return the same dictionary, so do not change it.

    Args:
        name: Path of the file relative to the package, such as "old_keys.toml".
    """
    content: dict[str, Any] = tomllib.loads((_PACKAGE / name).read_text(encoding="utf-8"))
    return content


def is_utf8(text: str) -> bool:
    """Return True if a text can be encoded as UTF-8.

    Arguments of a process may contain other bytes, which Python represents by characters that cannot be
    encoded.
    """
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
    row = rows[min(line, len(rows)) - 1]
    column = int(match[2]) - 1 if match and match[2] else len(row)
    shown = clipped(row.strip())
    twice = re.fullmatch(r"Cannot declare \((.*)\) twice", reason)
    if twice:
        key = ".".join(re.findall(r"'([^']*)'", twice[1]))
        return TomlError(line, f"{key} is given twice: {shown}")
    remedy = _remedy(reason, row[:column], row[column:])
    return TomlError(
        line, f"not TOML: {reason[:1].lower()}{reason[1:]}{f' ({remedy})' if remedy else ''}: {shown}"
    )


def _remedy(reason: str, before: str, rest: str) -> str:
    """Return what to write instead, or what is wrong in plain words; "" if it is not known.

    Args:
        reason: Message of the parser.
        before: Beginning of the line, up to the place of the error.
        rest: Rest of the line.
    """
    word = re.match(r"[\[\s]*(true|false)\b", rest, re.IGNORECASE)
    ends = re.fullmatch(r"\s*(#.*)?", rest) is not None
    in_braces = reason == "Unclosed inline table" or before.rstrip()[-1:] in {",", "{"}
    match reason:
        case "Invalid value" if word:
            return f"write {word[1].lower()}"
        case "Invalid value" if re.match(r"[+-]?\.\d", rest):
            return "write a digit before the point"
        case "Invalid value":
            return "text needs quotes"
        case r"Illegal character '\n'":
            return "a quote is not closed"
        case "Unclosed inline table" | "Invalid initial character for a key part" if ends and in_braces:
            return "a table in braces must end on the line where it begins; [section.table] can have several"
    return ""


def key_lines(text: str, bits: int = INTEGER_BITS) -> dict[KeyPath, int]:
    """Return the line number, counted from 1, of each key and table header by its path.

    A path is a tuple such as ("batch", "micro_size"). Implied tables (`a.b = 1` implies `a`), and keys that
    are given twice, have the line where they first occur. Items of lists of tables are numbered from 0:
    ("servers", "0", "name").

    Args:
        text: The text.
        bits: Largest number of bits of an integer, without the sign.

    Raises:
        BoundError: The text exceeds a bound. This is a ValueError, too, but not a TomlError.
        ValueError: The text is not TOML. Only its structure is checked.
    """
    lines: dict[KeyPath, int] = {}
    for path, line in key_mentions(text, bits):
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], line)
    return lines


def first_repeated(text: str) -> tuple[KeyPath, int, int] | None:
    """Return the first key or table that a text gives a second time; None if there is none.

    The result is None, too, if the text is not TOML for another reason, or exceeds a bound.

    Returns:
        Its path, the line of its first occurrence and that of the second one, counted from 1.
    """
    seen: dict[KeyPath, int] = {}
    with suppress(ValueError):
        for path, line in key_mentions(text, MOST_BITS):
            if path in seen:
                return path, seen[path], line
            seen[path] = line
    return None


def key_mentions(text: str, bits: int) -> list[tuple[KeyPath, int]]:
    """Return the path of each key and table header with its line, counted from 1, in the order of the text.

    A path that occurs several times is in the result several times. Keys of inline tables are included,
    tables that are only implied (`a.b = 1` implies `a`) are not.

    Args:
        text: The text.
        bits: Largest number of bits of an integer, without the sign.

    Raises:
        BoundError: The text exceeds a bound.
        ValueError: The text is not TOML.
    """
    scanner = _Scanner(text, bits)
    scanner.document()
    return scanner.mentions


class _Scanner:
    """Scanner of a text. `at` is the index of the next character, and `path` is the current key."""

    def __init__(self, text: str, bits: int) -> None:
        self.text = text
        self.bits = bits
        self.at = 0
        self.line = 1
        self.counted = 0
        self.values = 0
        self.path: KeyPath = ()
        self.mentions: list[tuple[KeyPath, int]] = []
        self.items: dict[KeyPath, int] = {}

    def document(self) -> None:
        """Read the whole text and record the lines of its keys in `mentions`.

        Raises:
            BoundError: The text exceeds a bound.
            ValueError: The text is not TOML.
        """
        table: KeyPath = ()
        while self._skip(_BLANK):
            if self.text.startswith("[", self.at):
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> KeyPath:
        many = self.text.startswith("[[", self.at)
        self.at += 2 if many else 1
        line = self._line()
        path = self._resolve(self._key())
        if many:
            number = self.items.get(path, -1) + 1
            self.items[path] = number
            path = (*path, str(number))
        self._expect("]]" if many else "]")
        self._mention(path, line)
        return path

    def _resolve(self, path: KeyPath) -> KeyPath:
        """Return the path of a header with the number of the current item after each list of tables."""
        resolved: KeyPath = ()
        for index, name in enumerate(path):
            resolved = (*resolved, name)
            if index + 1 < len(path) and resolved in self.items:
                resolved = (*resolved, str(self.items[resolved]))
        return resolved

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = (*table, *self._key())
        self._expect("=")
        self._mention(path, line)
        self._skip(_SPACE)
        self._value(path)

    def _mention(self, path: KeyPath, line: int) -> None:
        self.path = path
        self.mentions.append((path, line))
        if len(self.mentions) > MOST_KEYS:
            raise self._bound_error(f"more than {MOST_KEYS} keys in one deck")
        if len(path) > MAX_DEPTH:
            raise self._bound_error(f"more than {MAX_DEPTH} names deep")

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while True:
            self._skip(_SPACE)
            bare = _BARE_KEY.match(self.text, self.at)
            if bare is not None:
                parts.append(bare[0])
                self.at = bare.end()
            else:
                parts.append(self._string())
            if len(parts) > MAX_DEPTH:
                self.path = tuple(parts)
                raise self._bound_error(f"more than {MAX_DEPTH} names deep")
            self._skip(_SPACE)
            if not self.text.startswith(".", self.at):
                return tuple(parts)
            self.at += 1

    def _value(self, path: KeyPath) -> None:
        self.values += 1
        if self.values > MOST_VALUES:
            raise self._bound_error(f"more than {MOST_VALUES} values in one deck")
        if len(path) > MAX_DEPTH:
            raise self._bound_error(f"lists and tables more than {MAX_DEPTH} deep")
        match self.text[self.at : self.at + 1]:
            case '"' | "'":
                self._string()
            case "[":
                for number in self._items("]"):
                    self._value((*path, str(number)))
            case "{":
                for _ in self._items("}"):
                    self._pair(path)
            case _:
                first = self.at
                self._skip(_SCALAR)
                if not is_within(self.text[first : self.at].strip(), self.bits):
                    raise self._bound_error("must be below 2^63")

    def _items(self, closing: str) -> Iterator[int]:
        """Read brackets and commas, and yield the number of each item, which the caller reads next."""
        self.at += 1
        for number in count():
            self._skip(_BLANK)
            if self.text.startswith(closing, self.at):
                break
            yield number
            self._skip(_BLANK)
            if not self.text.startswith(closing, self.at):
                self._expect(",")
        self.at += 1

    def _string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if match is None:
            raise ValueError(f"line {self._line()}: expected a key or a string")
        self.at = match.end()
        kind = str(match.lastgroup)
        has_escapes = kind.startswith("basic") and "\\" in match[kind]
        inner = str(tomllib.loads(f"value = {match[0]}")["value"] if has_escapes else match[kind])
        if len(inner) > LONGEST_TEXT:
            raise self._bound_error(f"text of {len(inner)} characters, more than {LONGEST_TEXT}")
        return inner

    def _expect(self, mark: str) -> None:
        self._skip(_SPACE)
        if not self.text.startswith(mark, self.at):
            raise ValueError(f"line {self._line()}: expected {mark}")
        self.at += len(mark)

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Skip text that matches a pattern, and return True if any text is left."""
        match = pattern.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return self.at < len(self.text)

    def _line(self) -> int:
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.line

    def _bound_error(self, reason: str) -> BoundError:
        return BoundError(self.path, self._line(), reason)


def is_within(scalar: str, bits: int = INTEGER_BITS) -> bool:
    """Return False for an integer in TOML notation with more bits, without the sign; True for other text."""
    digits = scalar.replace("_", "").lower()
    if _INTEGER.fullmatch(digits) is None:
        return True
    if len(digits.lstrip("+-0xob")) > _MOST_DIGITS:
        return False
    try:
        return has_bits(int(digits, 0), bits)
    except ValueError:
        return True  # "007" is an integer in Python no more than in TOML


def has_bits(value: object, bits: int = INTEGER_BITS) -> bool:
    """Return True if all integers in a value, which may be a list or a table, are in [-2^bits, 2^bits)."""
    if isinstance(value, list | dict):
        items = value.values() if isinstance(value, dict) else value
        return all(has_bits(item, bits) for item in items)
    return not isinstance(value, int) or -(1 << bits) <= value < 1 << bits
