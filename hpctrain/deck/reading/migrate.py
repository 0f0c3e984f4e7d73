"""Text of a deck with present names of keys in place of old ones (`hpctrain deck DECK --migrate`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.deck.reading.deck_input import DeckInput
from hpctrain.deck.reading.old_keys import NONE, RenamedKey, rename_keys
from hpctrain.deck.schema import tables
from hpctrain.deck.toml import TomlError, parse_toml
from hpctrain.errors import HpctrainError

_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"(\s*)[\"']?([\w.\-]+)[\"']?(\s*=)")


def migrated_text(path: Path) -> str:
    """Return the text of a deck's file with present names of keys; all other lines stay as they are. Local.

    Old keys without effect are left out if they have their default values; with other values they are an
    error. Nothing is written, and files that the deck includes keep their old keys. Keys of a new table are
    moved to it, with the comments above them. The text ends with one line break, also if it has no old key.

    Raises:
        HpctrainError: The deck cannot be parsed, an old key has no effect or contradicts another one, an old
            key stands in an inline table, or the result would not have the values of the deck.
        InputOutputError: The file, or one that it includes, cannot be read.
    """
    readable = DeckInput(str(path))
    readable.read_file(path, str(path))
    readable.raise_problems()
    original = path.read_text(encoding="utf-8-sig")
    values, renamed_keys = _present_values(original, path)
    own = [each for each in renamed_keys if each.place.file == str(path)]
    text = _Text(original.split("\n"))
    for renamed in sorted(own, key=lambda each: each.place.line or 0, reverse=True):
        text.move(renamed)
    migrated = text.joined()
    try:
        same = _present_values(migrated, path)[0] == values
    except HpctrainError:
        same = False
    if not same:
        raise HpctrainError(
            [
                f"{path}: these keys must be renamed by hand, because renaming them line by line would "
                "change the deck:"
            ]
            + [each.warning for each in own]
        )
    return migrated


def _present_values(text: str, path: Path) -> tuple[dict[str, Any], list[RenamedKey]]:
    """Return the values of a deck by present names, without sections that are empty, and its old keys."""
    written = DeckInput(str(path))
    written.read_text(text, path, str(path))
    written.raise_problems()
    keys = rename_keys(written.values, written.places, lambda table: table == "model.experts")
    for each in keys:
        if each.problem:
            written.add_problem(each.place, f"{each.place.prefix}: {each.old}: {each.problem}")
    written.raise_problems()
    values = {name: table for name, table in written.values.items() if table != {}}
    return values, [*written.renamed, *keys]


@dataclass
class _Text:
    """Lines of a deck, and the lines that moved into other tables."""

    lines: list[str]
    moved: dict[str, list[str]] = field(default_factory=dict)
    emptied: set[str] = field(default_factory=set)

    def move(self, renamed: RenamedKey) -> None:
        """Move the lines of an old key to its present table, or change them in place if the table stays.

        Lines that go to another table are kept in `moved` until `joined` is called. Call this from the last
        key of the file to the first, since the lines below a key move.

        Args:
            renamed: An old key whose place is a line of this text, not one of an included file.

        Raises:
            HpctrainError: The key does not begin a line of its own.
        """
        number = renamed.place.line
        first = None if number is None else _KEY.match(self.lines[number - 1])
        name = renamed.old.rpartition(".")[2]
        if number is None or first is None or first[2].rpartition(".")[2] != name:
            where = renamed.place.prefix
            raise HpctrainError(
                f"{where}: {renamed.old}: must be on a separate line (move it there, and migrate again)"
            )
        end = next(
            end for end in range(number, len(self.lines) + 1) if _is_complete(self.lines[number - 1 : end])
        )
        lines = self.lines[number - 1 : end]
        table, _, new = renamed.new.rpartition(".")
        old_table = renamed.old.rpartition(".")[0]
        if renamed.old in tables() and renamed.value in {0, NONE}:
            self.lines[number - 1 : end] = [f'{first[1]}{name} = "{NONE}"']
            return
        lines[0] = f"{new}{first[3]}{lines[0][first.end() :]}"
        if table == old_table:
            self.lines[number - 1 : end] = lines
            return
        start = number - 1
        while table and start and self.lines[start - 1].lstrip().startswith("#"):
            start -= 1
        lines = [*self.lines[start : number - 1], *lines]
        del self.lines[start:end]
        self.emptied.add(old_table)
        if table:
            self.moved[table] = [*lines, *self.moved.get(table, [])]

    def joined(self) -> str:
        """Return the text of the deck with the lines that `move` took out put into their present tables.

        Lines of a table that the deck has go directly below its header. A new table goes behind the section
        that contains it, or to the end if the deck has no such section. Sections that became empty are left
        out. The text ends with one line break. Call this once, after `move` for each old key: it changes
        `lines`.
        """
        for table in (name for name in tables() if name in self.moved):
            headers = self._headers()
            if table in headers:
                self.lines[headers[table] + 1 : headers[table] + 1] = self.moved[table]
                continue
            outer, section = table.rpartition(".")[0], table.partition(".")[0]
            before = headers.get(outer, headers.get(section, len(self.lines)))
            end = next((at for at in headers.values() if at > before), len(self.lines))
            while end < len(self.lines) and self.lines[end - 1].lstrip().startswith("#"):
                end -= 1
            while end and not self.lines[end - 1].strip():
                end -= 1
            after = [""] if end < len(self.lines) and self.lines[end].strip() else []
            self.lines[end:end] = ["", f"[{table}]", *self.moved[table], *after]
        for section in self.emptied:
            self._remove_empty(section)
        return "\n".join(self.lines).rstrip("\n") + "\n"

    def _headers(self) -> dict[str, int]:
        """Return the index of the line of each table's header, in order."""
        return {match[1]: at for at, line in enumerate(self.lines) if (match := _HEADER.match(line))}

    def _remove_empty(self, section: str) -> None:
        """Remove the header of a section that has no line below it any more."""
        at = self._headers().get(section)
        if at is None:
            return
        end = at + 1
        while end < len(self.lines) and not self.lines[end].strip():
            end += 1
        if end == len(self.lines) or self.lines[end].lstrip().startswith("["):
            self.lines[at:end] = [""] if at and self.lines[at - 1].strip() and end < len(self.lines) else []


def _is_complete(lines: list[str]) -> bool:
    """Return True if lines are a key with its whole value."""
    try:
        parse_toml("\n".join(lines))
    except TomlError:
        return False
    return True
