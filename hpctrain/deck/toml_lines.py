"""Line number of each key in TOML text.

TOML parsers return values without their lines. This scanner follows only the structure of the text (tables,
keys, strings, brackets) and records the line of each key. It runs before the parser and therefore also
enforces bounds, since some texts would exceed the parser's stack or take it quadratic time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

KeyPath = tuple[str, ...]
"""Names of a key and of the tables and list items that contain it, the outermost first."""

DEEPEST = 32
"""Largest number of names in a path; nested lists count as well."""

MOST_KEYS = 1000
MOST_VALUES = 20_000

LONGEST_TEXT = 4096
"""Largest number of characters of a text or name, as of a file's path."""

_MOST_DIGITS = 70
_LAST_CHARACTER = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)

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
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_INTEGER = re.compile(r"[+-]?(?:0x[0-9a-f]+|0o[0-7]+|0b[01]+|[0-9]+)")
_LETTERS = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r"}


class BoundError(ValueError):
    """Error of a text that exceeds a bound.

    Attributes:
        path: Path of the key where it does.
        line: Its line number.
        reason: End of a sentence about the key.
    """

    def __init__(self, path: KeyPath, line: int, reason: str) -> None:
        self.path, self.line, self.reason = path, line, reason
        super().__init__(f"line {line}: {'.'.join(path)}: {reason}")


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line number, counted from 1, of each key and table header by its path.

    A path is a tuple such as ("batch", "micro_size"). Implied tables (`a.b = 1` implies `a`) have the line
    where they first occur. Items of lists of tables are numbered from 0: ("servers", "0", "name").

    Raises:
        BoundError: The text exceeds a bound.
        ValueError: The text is not TOML.
    """
    lines: dict[KeyPath, int] = {}
    for path, line in key_mentions(text):
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], line)
    return lines


def first_repeated(text: str) -> tuple[KeyPath, int, int] | None:
    """Return the path of the first key or table that occurs twice with both lines, or None if none does."""
    seen: dict[KeyPath, int] = {}
    with suppress(ValueError):
        for path, line in key_mentions(text):
            if path in seen:
                return path, seen[path], line
            seen[path] = line
    return None


def key_mentions(text: str) -> list[tuple[KeyPath, int]]:
    """Return the path and the line of each key and table header in the order of the text.

    Raises:
        BoundError: The text exceeds a bound, or contains an integer of more than 64 bits.
        ValueError: The text is not TOML.
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.mentions


class _Scanner:
    """Scanner of a text. `at` is the index of the next character, and `path` is the current key."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.counted = 0
        self.values = 0
        self.path: KeyPath = ()
        self.mentions: list[tuple[KeyPath, int]] = []
        self.items: dict[KeyPath, int] = {}

    def document(self) -> None:
        """Read the whole text and record the lines of its keys in `mentions`."""
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
        if len(path) > DEEPEST:
            raise self._bound_error(f"more than {DEEPEST} names deep")

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
            if len(parts) > DEEPEST:
                self.path = tuple(parts)
                raise self._bound_error(f"more than {DEEPEST} names deep")
            self._skip(_SPACE)
            if not self.text.startswith(".", self.at):
                return tuple(parts)
            self.at += 1

    def _value(self, path: KeyPath) -> None:
        self.values += 1
        if self.values > MOST_VALUES:
            raise self._bound_error(f"more than {MOST_VALUES} values in one deck")
        if len(path) > DEEPEST:
            raise self._bound_error(f"lists and tables more than {DEEPEST} deep")
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
                if not fits_64_bits(self.text[first : self.at].strip()):
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
            raise ValueError(f"line {self._line()}: a key or a string was expected")
        self.at = match.end()
        kind = str(match.lastgroup)
        inner = _ESCAPE.sub(_unescape, match[kind]) if kind.startswith("basic") else match[kind]
        if len(inner) > LONGEST_TEXT:
            raise self._bound_error(f"text of {len(inner)} characters, more than {LONGEST_TEXT}")
        return inner

    def _expect(self, mark: str) -> None:
        self._skip(_SPACE)
        if not self.text.startswith(mark, self.at):
            raise ValueError(f"line {self._line()}: {mark} was expected")
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


def fits_64_bits(scalar: str) -> bool:
    """Return False for an integer in TOML notation that needs more than 64 bits; True for other text."""
    digits = scalar.replace("_", "").lower()
    if _INTEGER.fullmatch(digits) is None:
        return True
    if len(digits.lstrip("+-0xob")) > _MOST_DIGITS:
        return False
    try:
        return -(1 << 63) <= int(digits, 0) < 1 << 63
    except ValueError:
        return True  # "007" is an integer in Python no more than in TOML


def _unescape(match: re.Match[str]) -> str:
    """Return the character of an escape sequence."""
    code = match[1]
    if code[0] not in "uU" or len(code) == 1:
        return _LETTERS.get(code, code)
    number = int(code[1:], 16)
    if number > _LAST_CHARACTER or number in _SURROGATES:
        raise ValueError(f"no character has the number {code[1:]}")
    return chr(number)
