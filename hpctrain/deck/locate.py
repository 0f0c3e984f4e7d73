"""From key path to line number in TOML text.

TOML parsers give values without their lines. This scanner only follows the structure (tables, keys,
strings, brackets) of text that is already known to parse, and tells where each key stands.
"""

from __future__ import annotations

import re

Path = tuple[str, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\r\n]*")
_QUOTES = ('"""', "'''", '"', "'")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_LETTERS = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r"}


def key_lines(text: str) -> dict[Path, int]:
    """Line (from 1) of every key and table header of TOML text, by path such as ("batch", "micro_size").

    Tables that are only implied (`a.b = 1` implies `a`) have the line of their first mention. In a list of
    tables or inline tables a path has the number of the item: ("servers", "0", "name").
    Raises `ValueError` where the text is not TOML.
    """
    lines: dict[Path, int] = {}
    for path, line in key_mentions(text):
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], line)
    return lines


def first_repeated(text: str) -> tuple[Path, int, int] | None:
    """The first key or table that is given twice, its first line and its second, or None."""
    seen: dict[Path, int] = {}
    try:
        for path, line in key_mentions(text):
            if path in seen:
                return path, seen[path], line
            seen[path] = line
    except ValueError:
        return None
    return None


def key_mentions(text: str) -> list[tuple[Path, int]]:
    """Every key and table header with its line, in the order of the text."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.mentions


class _Scanner:
    """One pass over the text; `at` is the next character's index."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.mentions: list[tuple[Path, int]] = []
        self.items: dict[Path, int] = {}

    def document(self) -> None:
        table: Path = ()
        while self._skip(_BLANK):
            if self.text.startswith("[", self.at):
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> Path:
        many = self.text.startswith("[[", self.at)
        self.at += 2 if many else 1
        line = self._line()
        path = self._resolve(self._key())
        if many:
            number = self.items.get(path, -1) + 1
            self.items[path] = number
            path = (*path, str(number))
        self._expect("]]" if many else "]")
        self.mentions.append((path, line))
        return path

    def _resolve(self, path: Path) -> Path:
        """The path of a header, with the number of the last item after each list of tables above it."""
        resolved: Path = ()
        for index, name in enumerate(path):
            resolved = (*resolved, name)
            if index + 1 < len(path) and resolved in self.items:
                resolved = (*resolved, str(self.items[resolved]))
        return resolved

    def _pair(self, table: Path) -> None:
        line = self._line()
        path = (*table, *self._key())
        self._expect("=")
        self.mentions.append((path, line))
        self._skip(_SPACE)
        self._value(path)

    def _key(self) -> Path:
        parts: list[str] = []
        while True:
            self._skip(_SPACE)
            bare = _BARE_KEY.match(self.text, self.at)
            if bare is not None:
                parts.append(bare[0])
                self.at = bare.end()
            else:
                parts.append(self._string())
            self._skip(_SPACE)
            if not self.text.startswith(".", self.at):
                return tuple(parts)
            self.at += 1

    def _value(self, path: Path) -> None:
        match self.text[self.at : self.at + 1]:
            case '"' | "'":
                self._string()
            case "[":
                self.at += 1
                self._items(path)
            case "{":
                self.at += 1
                self._inline_table(path)
            case _:
                self._skip(_SCALAR)

    def _items(self, path: Path) -> None:
        number = 0
        while self._inside("]"):
            self._value((*path, str(number)))
            number += 1
            self._separator("]")

    def _inline_table(self, path: Path) -> None:
        while self._inside("}"):
            self._pair(path)
            self._separator("}")

    def _inside(self, closing: str) -> bool:
        self._skip(_BLANK)
        if self.text.startswith(closing, self.at):
            self.at += 1
            return False
        return True

    def _separator(self, closing: str) -> None:
        self._skip(_BLANK)
        if not self.text.startswith(closing, self.at):
            self._expect(",")

    def _string(self) -> str:
        quote = next((quote for quote in _QUOTES if self.text.startswith(quote, self.at)), None)
        if quote is None:
            raise ValueError(f"line {self._line()}: a key or a string was expected")
        start = self.at + len(quote)
        end = start
        while not self.text.startswith(quote, end):
            if end >= len(self.text):
                raise ValueError(f"line {self._line()}: a string does not end")
            end += 2 if quote[0] == '"' and self.text[end] == "\\" else 1
        if len(quote) == 3:  # up to two quotes may stand right before the closing three
            while self.text.startswith(quote, end + 1):
                end += 1
        self.at = end + len(quote)
        inner = self.text[start:end]
        return _ESCAPE.sub(_unescape, inner) if quote[0] == '"' else inner

    def _expect(self, mark: str) -> None:
        self._skip(_SPACE)
        if not self.text.startswith(mark, self.at):
            raise ValueError(f"line {self._line()}: {mark} was expected")
        self.at += len(mark)

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Step over what matches; whether any text is left."""
        match = pattern.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return self.at < len(self.text)

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if code[0] in "uU" else _LETTERS.get(code, code)
