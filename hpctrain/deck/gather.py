"""Everything that a user wrote: the keys of the deck, of the files that it includes, and of `--set`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.deck.locate import first_repeated, key_lines
from hpctrain.deck.schema import fields, sections
from hpctrain.deck.sources import Place, toml_value
from hpctrain.deck.words import plain_type, unknown_key, unknown_section
from hpctrain.errors import HpctrainError, InputOutputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Written:
    """The keys that were written, with their places, and the problems found so far.

    `values` holds sections by name, as TOML gives them (not yet checked against the schema); `places` the
    place of every section ("batch") and key ("batch.micro_size"). Without `includes`, no other file is read.
    """

    def __init__(self, name: str, includes: bool = True) -> None:
        self.name = name
        self.includes = includes
        self.values: dict[str, Any] = {}
        self.places: dict[str, Place] = {}
        self.problems: list[tuple[Place, str]] = []
        self.files: list[str] = []
        self.arguments: list[str] = []
        self.only_files_missing = True

    def add(self, place: Place, text: str, *, file_missing: bool = False) -> None:
        """Add a problem; `file_missing` if it is one of input and output."""
        self.problems.append((place, text))
        self.only_files_missing &= file_missing

    def raise_problems(self) -> None:
        """Raise all problems as one error, if there are any, in the order of the files and their lines."""

        def order(item: tuple[Place, str]) -> tuple[int, int, float]:
            place = item[0]
            if place.override is not None:
                return 1, self.arguments.index(place.override), 0
            file = self.files.index(place.file) if place.file in self.files else len(self.files)
            return 0, file, float("inf") if place.line is None else place.line

        if not self.problems:
            return
        texts = [text for _, text in sorted(self.problems, key=order)]
        raise (InputOutputError if self.only_files_missing else HpctrainError)(list(dict.fromkeys(texts)))

    def read_file(self, path: Path, name: str, chain: tuple[Path, ...], asked: Place | None = None) -> None:
        """Take the keys of a file; `chain` are the files that include it, `asked` where that was written."""
        try:
            # newline="" would keep lone carriage returns, which TOML refuses; a byte order mark is skipped.
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            self.add(Place(name), f"{name}: is not UTF-8 text (byte {error.start})")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            include = "" if asked is None else f"{asked.prefix}: include: "
            self.add(asked or Place(name), f"{include}{name}: cannot be read: {reason}", file_missing=True)
        else:
            self.read_text(text, path, name, chain)

    def read_text(self, text: str, path: Path, name: str, chain: tuple[Path, ...]) -> None:
        """Take the keys of a text, on top of those of the files that it includes."""
        self.files.append(name)
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            self._syntax(text, name, str(error))
            return
        lines = key_lines(text)
        include = values.pop("include", [])
        asked = Place(name, lines.get(("include",)), value=include)
        bases = [include] if isinstance(include, str) else include
        if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
            self.add(
                asked,
                f"{asked.prefix}: include = {toml_value(include)}: must be a file's name, or a list of names",
            )
            bases = []
        if bases and not self.includes:
            self.add(asked, f"{asked.prefix}: include: a deck that is stored in a file cannot include others")
            bases = []
        for base in bases:
            self._include(base, path, name, chain, asked)
        for section, table in values.items():
            self._take(section, table, name, lines)

    def _include(self, base: str, path: Path, name: str, chain: tuple[Path, ...], asked: Place) -> None:
        base_path = path.parent / base
        real = [file.resolve() for file in (*chain, path)]
        if base_path.resolve() in real:
            ring = [*(file.name for file in (*chain, path)), base_path.name]
            self.add(
                asked, f'{asked.prefix}: include = "{base}": goes round in a circle ({" -> ".join(ring)})'
            )
            return
        base_name = os.path.normpath(Path(name).parent / base)
        self.read_file(base_path, base_name, (*chain, path), asked)

    def _take(self, section: str, table: object, name: str, lines: Mapping[tuple[str, ...], int]) -> None:
        self.places[section] = Place(name, lines.get((section,)), value=table)
        if not isinstance(table, dict):
            self.values[section] = table
            return
        below = self.values.get(section)
        self.values[section] = {**below, **table} if isinstance(below, dict) else table
        for key, value in table.items():
            self.places[f"{section}.{key}"] = Place(name, lines.get((section, key)), value=value)

    def override(self, argument: str) -> None:
        """Take a `--set` argument: section.key=value; without a value the key is as if never written."""
        self.arguments.append(argument)
        name, equals, text = argument.partition("=")
        section, dot, key = name.strip().partition(".")
        place = Place(self.name, override=argument)
        if not equals or not section or (dot and not key):
            self.add(
                place, f"{place.prefix}: must be written as section.key=value, such as batch.micro_size=4"
            )
            return
        if section == "include":
            self.add(place, f"{place.prefix}: only a deck can include another, at its top")
            return
        if not dot:
            homes = unknown_section(section, []) if text.lstrip()[:1] == "{" else unknown_key("", section)
            told = f"must be written as {section}.key=value" if section in sections() else homes
            self.add(place, f"{place.prefix}: {told}")
            return
        table = self.values.setdefault(section, {})
        if not isinstance(table, dict):
            table = self.values[section] = {}
        full = f"{section}.{key}"
        known = section in sections() and key in fields(section)
        if known and not text.strip():
            table.pop(key, None)
            self.places.pop(full, None)
            return
        value = _override_value(text.strip())
        if known and plain_type(fields(section)[key]) is str and not isinstance(value, str):
            value = text.strip()
        table[key] = value
        self.places[full] = replace(place, value=value)

    def _syntax(self, text: str, name: str, message: str) -> None:
        """A text that is not TOML: the parser's message, with the line as it stands in the file."""
        repeated = first_repeated(text)
        if repeated is not None:
            path, first, line = repeated
            place = Place(name, line)
            self.add(place, f"{place.prefix}: {'.'.join(path)} is given twice, first on line {first}")
            return
        match = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
        told = message[: match.start()] if match else message
        rows = text.rstrip("\n").split("\n")
        line = int(match[1]) if match and match[1] else len(rows)
        place = Place(name, line)
        shown = rows[min(line, len(rows)) - 1].strip()
        twice = re.fullmatch(r"Cannot declare \((.*)\) twice", told)
        if twice:
            named = ".".join(re.findall(r"'([^']*)'", twice[1]))
            self.add(place, f"{place.prefix}: {named} is given twice: {shown}")
            return
        if told == "Invalid value":
            hint = " (text needs quotes)"
        else:
            hint = " (a quote is not closed)" if told == r"Illegal character '\n'" else ""
        self.add(place, f"{place.prefix}: not TOML: {told[:1].lower()}{told[1:]}{hint}: {shown}")


def _override_value(text: str) -> object:
    """The value of a `--set` argument: as TOML, or else the bare text itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text
