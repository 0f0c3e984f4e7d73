"""Everything that a user wrote: the keys of the deck, of the files that it includes, and of `--set`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.deck.code import CodeEntry
from hpctrain.deck.key import expand_home
from hpctrain.deck.key_messages import accepts_list, unknown_key, unknown_section, value_type
from hpctrain.deck.nested import look_up
from hpctrain.deck.old_keys import RenamedKey, current_field, new_names, renamed_word
from hpctrain.deck.run_length import LENGTHS
from hpctrain.deck.schema import sections, tables
from hpctrain.deck.sources import Place, clipped, toml_value
from hpctrain.deck.toml import DECK_BYTES, TomlError, parse_argument, parse_toml
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import is_unfit, read_text
from hpctrain.words import command

MOST_FILES = 100  # that a deck is made of, one that is included twice counted twice
MOST_PROBLEMS = 50  # problems of one deck


class DeckInput:
    """The keys that were written, with their places, and the problems so far.

    `values` holds sections by name, as TOML gives them (not yet checked against the schema); `places` the
    place of every section ("batch") and key ("batch.micro_size"). Without `includes`, no other file is read.
    `trusted_code` is the code that a stored deck names and may call; None for a deck that the user gave.
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
        self.full = False
        self.trusted_code: frozenset[CodeEntry] | None = None
        self.renamed: list[RenamedKey] = []

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
        texts = list(dict.fromkeys(text for _, text in sorted(self.problems, key=order)))
        more = len(texts) - MOST_PROBLEMS
        texts[MOST_PROBLEMS:] = [f"{self.name}: and {more} more problems"] if more > 0 else []
        raise (InputOutputError if self.only_files_missing else HpctrainError)(texts)

    def read_file(self, path: Path, name: str, chain: tuple[Path, ...], asked: Place | None = None) -> None:
        """Take the keys of a file; `chain` are the files that include it, `asked` where that was written."""
        try:
            text = read_text(path, DECK_BYTES)
        except UnicodeDecodeError as error:
            hint = f"; {command('resume', name)} goes on from a checkpoint" if path.suffix == ".h5" else ""
            self.add(Place(name), f"{name}: is not UTF-8 text (byte {error.start}){hint}")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            include = "" if asked is None else f"{asked.prefix}: include: "
            shown = clipped(name if name.isprintable() else toml_value(name))
            sentence = f"{include}{shown}: cannot be read: {reason}"
            unfit = is_unfit(error)
            if isinstance(error, IsADirectoryError):
                unfit = asked is not None
                if not unfit:
                    sentence += f"; a deck is a file, and {command('resume', name)} goes on with a run"
            self.add(asked or Place(name), sentence, file_missing=not unfit)
        else:
            self.read_text(text, path, name, chain)

    def read_text(self, text: str, path: Path, name: str, chain: tuple[Path, ...]) -> None:
        """Take the keys of a text, on top of those of the files that it includes."""
        self.files.append(name)
        try:
            values, lines = parse_toml(text)
        except TomlError as error:
            place = Place(name, error.line)
            self.add(place, f"{place.prefix}: {error.reason}")
            return
        include = values.pop("include", [])
        asked = Place(name, lines.get(("include",)), value=include)
        bases = [include] if isinstance(include, str) else include
        if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
            shown = clipped(toml_value(include))
            self.add(asked, f"{asked.prefix}: include = {shown}: must be a file's name, or a list of names")
            bases = []
        if bases and not self.includes:
            self.add(asked, f"{asked.prefix}: include: a deck that is stored in a file cannot include others")
            bases = []
        for base in bases:
            self._include(base, path, name, chain, asked)
        for section, table in values.items():
            self._take(section, table, name, lines)

    def _include(self, base: str, path: Path, name: str, chain: tuple[Path, ...], asked: Place) -> None:
        base_path = path.parent / expand_home(base)
        if _is_one_of(base_path, (*chain, path)):
            ring = clipped(" -> ".join(file.name for file in (*chain, path, base_path)))
            sentence = f'{asked.prefix}: include = "{clipped(base)}": goes round in a circle ({ring})'
            self.add(asked, sentence)
        elif len(self.files) < MOST_FILES:
            base_name = os.path.normpath(Path(name).parent / expand_home(base))
            self.read_file(base_path, base_name, (*chain, path), asked)
        elif not self.full:
            self.full = True
            self.add(asked, f"{asked.prefix}: include: with this the deck has more than {MOST_FILES} files")

    def _take(self, section: str, table: object, name: str, lines: Mapping[tuple[str, ...], int]) -> None:
        self.places[section] = Place(name, lines.get((section,)), value=table)
        written, table = table, whole_section(section, table)
        if not isinstance(table, dict):
            self.values[section] = table
            return
        below = self.values.get(section)
        if section == "run":
            self._replace_length(table)

        def place(path: str, value: object) -> Place:
            parts = path.split(".")
            known = (line for end in range(len(parts), 1, -1) if (line := lines.get(tuple(parts[:end]))))
            return Place(
                name, next(known, lines.get((section,)) if written is not table else None), value=value
            )

        self.values[section] = below = below if isinstance(below, dict) else {}
        self._merge(section, below, table, place)
        if isinstance(written, list):
            rows = (path for path in lines if path[0] == section and len(path) > 1)
            self.places |= {".".join(path): Place(name, lines[path]) for path in rows}

    def _merge(
        self,
        path: str,
        below: dict[str, Any],
        table: Mapping[str, object],
        place: Callable[[str, object], Place],
    ) -> None:
        """Write the keys of a table on top of those of files that it includes, in place."""
        for choice in tables()[path].choices() if path in tables() else ():
            if choice in table:
                self._drop_choice(path, below, choice, table[choice])
        for key, value in table.items():
            full = f"{path}.{key}"
            self.places[full] = place(full, value)
            now, renamed = renamed_word(full, value, self.places[full])
            self.renamed += [] if renamed is None else [renamed]
            if full in tables() and isinstance(now, dict):
                inner = below.get(key)
                below[key] = inner if isinstance(inner, dict) else {}
                self._merge(full, below[key], now, place)
            else:
                self._forget_below(full)
                below[key] = now

    def _drop_choice(self, path: str, table: dict[str, Any], choice: str, value: object) -> None:
        """Forget the tables that a key of `table` had selected before it got another value."""
        for name in tables()[path].choices()[choice]:
            if name == value or self._is_overridden(f"{path}.{name}"):
                continue
            if table.pop(name, None) is not None:
                self._forget_below(f"{path}.{name}")
                self.places.pop(f"{path}.{name}", None)

    def _is_overridden(self, path: str) -> bool:
        """Return True if a `--set` argument gives a key of a table."""
        keys = (key for key in self.places if key.startswith(f"{path}."))
        return any(self.places[key].override is not None for key in keys)

    def _forget_below(self, path: str) -> None:
        for key in [key for key in self.places if key.startswith(f"{path}.")]:
            del self.places[key]

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
        whole = whole_section(section, _word_or_list(text)) if not dot else None
        if isinstance(whole, dict):
            self._leave_open()
            self.values[section] = dict(whole)
            kept = {key: place for key, place in self.places.items() if not key.startswith(f"{section}.")}
            self.places = kept | {
                f"{section}.{key}": replace(place, value=value) for key, value in whole.items()
            }
            return
        if not dot:
            homes = unknown_section(section, []) if text.lstrip()[:1] == "{" else unknown_key("", section)
            sentence = f"must be written as {section}.key=value" if section in sections() else homes
            sentence += ", or layout=auto, which has it chosen" * (section == "layout")
            self.add(place, f"{place.prefix}: {sentence}")
            return
        path, table, key = self._table_of(section, key, place)
        full = f"{path}.{key}"
        field = current_field(full)
        if not text.strip() and (field is not None or path != section):
            self._leave_out(full)
            return
        try:
            value = parse_argument(text.strip())
        except TomlError as error:
            self.add(place, f"{place.prefix}: {error.reason}")
            return
        if field is not None and value_type(field) is str and not isinstance(value, str):
            value = value if isinstance(value, list) and accepts_list(field) else text.strip()
        if full == "layout.auto" and value is True:
            self._leave_open()
        if section == "run":
            self._replace_length({key: value})
        if full in tables() and isinstance(value, dict):
            self._leave_out(full)
        self._merge(path, table, {key: value}, lambda _, value: replace(place, value=value))

    def _table_of(self, section: str, key: str, place: Place) -> tuple[str, dict[str, Any], str]:
        """Return the full name of the innermost table that a dotted key names, its values, and the rest."""
        path, table, rest = "", self.values, f"{section}.{key}"
        while True:
            name, dot, inner = rest.partition(".")
            full = f"{path}.{name}".lstrip(".")
            if not dot or (path and full not in tables()):
                return path, table, rest
            below = table.get(name)
            table[name] = table = below if isinstance(below, dict) else {}
            path, rest = full, inner
            self.places.setdefault(path, place)

    def _leave_out(self, key: str) -> None:
        """Forget a key, and the tables that it selects, as if they had never been written."""
        for full in (key, *new_names(key)):
            path, _, name = full.rpartition(".")
            table = look_up(self.values, path)
            if isinstance(table, dict):
                table.pop(name, None)
                self.places.pop(full, None)
                self._forget_below(full)
                if path in tables() and name in tables()[path].choices():
                    self._drop_choice(path, table, name, None)

    def _replace_length(self, keys: Mapping[str, object]) -> None:
        """Forget how another file gave the length of the run, where these keys of [run] give it."""
        run = self.values.get("run")
        if not isinstance(run, dict) or not any(name in keys for name in LENGTHS):
            return
        for name in LENGTHS:
            place = self.places.get(f"run.{name}")
            if name not in keys and place is not None and place.override is None:
                run.pop(name, None)
                del self.places[f"run.{name}"]

    def _leave_open(self) -> None:
        """Forget the keys that were chosen for a run (layout.chosen)."""
        layout = self.values.get("layout")
        chosen = layout.pop("chosen", []) if isinstance(layout, dict) else []
        for full in chosen if isinstance(chosen, list) else []:
            section, _, name = str(full).partition(".")
            table = self.values.get(section)
            if isinstance(table, dict) and self.places.get(str(full), Place("")).override is None:
                table.pop(name, None)
                self.places.pop(str(full), None)


def whole_section(section: str, written: object) -> object:
    """The table that a word, or tables in a row, stand for in place of a section, else what was written."""
    if section == "evaluation" and (isinstance(written, list) or written == ""):
        return {"sets": written or []}
    return {"auto": True} if (section, written) == ("layout", "auto") else written


def _word_or_list(text: str) -> object:
    """What an argument gives in place of a section; None where that can be neither."""
    word = text.strip()
    if not word.startswith("["):
        return word.strip('"')
    try:
        return parse_argument(word)
    except TomlError:
        return None


def _is_one_of(path: Path, others: Sequence[Path]) -> bool:
    try:
        return os.path.realpath(path) in map(os.path.realpath, others)
    except ValueError:  # no file can have such a name
        return False
