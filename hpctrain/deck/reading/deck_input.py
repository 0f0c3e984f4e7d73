"""Keys that a user gave: those of the deck, of the files that it includes, and of `--set` arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.deck.code import CodeEntry
from hpctrain.deck.key import expand_user_path
from hpctrain.deck.key_messages import accepts_list, unknown_key, unknown_section, value_type
from hpctrain.deck.reading.nested import leaf_names, look_up, remove, table_in
from hpctrain.deck.reading.old_keys import (
    NONE,
    RenamedKey,
    current_field,
    optional_tables,
    other_names,
    renamed_word,
)
from hpctrain.deck.run_length import LENGTHS
from hpctrain.deck.schema import sections, tables
from hpctrain.deck.sources import Place, Sources, clipped, toml_key, toml_value
from hpctrain.deck.toml import (
    INTEGER_BITS,
    MAX_DECK_BYTES,
    MOST_BITS,
    TomlError,
    has_bits,
    parse_argument,
    parse_toml,
)
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import is_unfit, read_text
from hpctrain.text import command

MOST_FILES = 100
"""Largest number of files of a deck. A file that is included twice counts twice."""

MOST_PROBLEMS = 50
"""Largest number of problems in one error."""


class DeckInput:
    """Keys of a deck with their places, before they are validated, and the problems found so far.

    Attributes:
        name: Name of the deck in messages.
        includes: True if the deck may include other files; False for a stored deck.
        values: Sections by name, as TOML has them.
        places: Place of each section ("batch") and key ("batch.micro_size").
        problems: Place and message of each problem.
        files: Names of the files that were read.
        arguments: `--set` arguments that were applied.
        only_files_missing: True if all problems are files that cannot be read.
        too_many_files: True if the problem of too many files was reported.
        trusted_code: Code that a stored deck may call; None for a deck that the user passed.
        renamed: Keys that the deck has by their old names.
        refused: Keys whose values are reported already and were left out.
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
        self.too_many_files = False
        self.trusted_code: frozenset[CodeEntry] | None = None
        self.renamed: list[RenamedKey] = []
        self.refused: set[str] = set()

    def add_problem(self, place: Place, text: str, *, file_missing: bool = False) -> None:
        """Add a problem to `problems`. Nothing is raised before `raise_problems` is called.

        Args:
            place: Place by which the problems are sorted.
            text: The whole message, which also names the place.
            file_missing: True if the problem is a file that cannot be read.
        """
        self.problems.append((place, text))
        self.only_files_missing &= file_missing

    def report(self, place: Place, sentence: str) -> None:
        """Add a problem whose message consists of the place, a colon and the sentence. Nothing is raised."""
        self.add_problem(place, f"{place.prefix}: {sentence}")

    def report_key(self, key: str, value: object, sentence: str) -> None:
        """Add a problem of the value of a key.

        Args:
            key: Full name of the key.
            value: Value that the message shows if the place does not have the written value.
            sentence: End of a sentence that begins with the key and its value.
        """
        self.add_problem(self.sources.place(key), self.sources.sentence(key, value, sentence))

    def report_error(self, place: Place, error: HpctrainError, subject: str = "") -> None:
        """Add each problem of an error to `problems`. The error is not raised.

        Args:
            place: Place by which the problems are sorted.
            error: The error.
            subject: Beginning of the messages, such as "deck.toml:4: model.from: ".
        """
        for problem in error.problems:
            missing = isinstance(error, InputOutputError)
            self.add_problem(place, f"{subject}{problem}", file_missing=missing)

    @property
    def sources(self) -> Sources:
        """Sources with the present `places`, which form messages about keys."""
        return Sources(self.name, self.places)

    def raise_problems(self) -> None:
        """Raise all problems found so far as one error; do nothing if there are none.

        They come in the order of the files and their lines, then those of `--set` arguments. Equal messages
        appear once, and at most MOST_PROBLEMS are shown. `problems` stays as it is, so that a second call
        raises the same error.

        Raises:
            HpctrainError: There are problems.
            InputOutputError: All problems are files that cannot be read.
        """

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

    def read_file(
        self, path: Path, name: str, chain: tuple[Path, ...] = (), include_place: Place | None = None
    ) -> None:
        """Add the keys of a file and of the files that it includes, whose problems are added and not raised.

        These keys take precedence over those so far, and keys of a file over those of the files that it
        includes.

        Args:
            path: Path of the file.
            name: Its name in messages.
            chain: Paths of the files that include it, the outermost first.
            include_place: Place of the `include` in the last of them; None for the deck itself.
        """
        try:
            text = read_text(path, MAX_DECK_BYTES)
        except UnicodeDecodeError as error:
            hint = f"; {command('resume', name)} resumes from a checkpoint" if path.suffix == ".h5" else ""
            self.add_problem(Place(name), f"{name}: is not UTF-8 text (byte {error.start}){hint}")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            include = "" if include_place is None else f"{include_place.prefix}: include: "
            shown = clipped(name if name.isprintable() else toml_value(name))
            sentence = f"{include}{shown}: cannot be read: {reason}"
            if isinstance(error, IsADirectoryError) and include_place is None:
                sentence += f"; a deck is a file, and {command('resume', name)} resumes a run"
            self.add_problem(include_place or Place(name), sentence, file_missing=not is_unfit(error))
        else:
            self.read_text(text, path, name, chain)

    def read_text(self, text: str, path: Path, name: str, chain: tuple[Path, ...] = ()) -> None:
        """Add the keys of a text and of the files that it includes; their problems are added and not raised.

        These keys take precedence over those so far, and keys of the text over those of the files that it
        includes. A text that is not TOML adds a problem and no keys.

        Args:
            text: The text, which need not be in a file.
            path: Path of the text's file, to whose folder the names of included files are relative. It need
                not exist.
            name: Name of the text in messages.
            chain: Paths of the files that include it, the outermost first.
        """
        self.files.append(name)
        try:
            values, paths = parse_toml(text, MOST_BITS)
        except TomlError as error:
            place = Place(name, error.line)
            self.report(place, error.reason)
            return
        lines: dict[str, int] = {}
        for names, line in paths.items():
            lines.setdefault(".".join(map(toml_key, names)), line)
        include = values.pop("include", [])
        include_place = Place(name, lines.get("include"), value=include)
        bases = [include] if isinstance(include, str) else include
        if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
            shown = clipped(toml_value(include))
            self.report(include_place, f"include = {shown}: must be a file's name, or a list of names")
            bases = []
        if bases and not self.includes:
            self.report(include_place, "include: a deck that is stored in a file cannot include others")
            bases = []
        for base in bases:
            self._include(base, path, name, chain, include_place)
        self._remove_other_names(values)
        for section, table in values.items():
            self._add_section(section, table, name, lines)

    def _include(
        self, base: str, path: Path, name: str, chain: tuple[Path, ...], include_place: Place
    ) -> None:
        base_path = path.parent / expand_user_path(base)
        if _is_one_of(base_path, (*chain, path)):
            ring = clipped(" -> ".join(file.name for file in (*chain, path, base_path)))
            self.report(include_place, f'include = "{clipped(base)}": includes itself ({ring})')
        elif len(self.files) < MOST_FILES:
            base_name = os.path.normpath(Path(name).parent / expand_user_path(base))
            self.read_file(base_path, base_name, (*chain, path), include_place)
        elif not self.too_many_files:
            self.too_many_files = True
            self.report(include_place, f"include: with this the deck has more than {MOST_FILES} files")

    def _add_section(self, section: str, table: object, name: str, lines: Mapping[str, int]) -> None:
        """Add the keys of a section of the file `name`, whose keys have these `lines` by full name."""
        full = toml_key(section)
        self.places[full] = Place(name, lines.get(full), value=table)
        written, table = table, section_of_value(section, table)
        if not isinstance(table, dict):
            self.values[section] = table
            return
        below = self.values.get(section)
        if section == "run":
            self._replace_length(table)

        def place(path: str, value: object) -> Place:
            while path not in lines and path != full:
                path = path.rpartition(".")[0]
            has_line = path != full or written is not table
            return Place(name, lines.get(path) if has_line else None, value=value)

        self.values[section] = below = below if isinstance(below, dict) else {}
        self._merge(full, below, table, place)
        if isinstance(written, list):
            rows = {path: Place(name, line) for path, line in lines.items() if path.startswith(f"{section}.")}
            self.places |= rows

    def _merge(
        self,
        path: str,
        below: dict[str, Any],
        table: Mapping[str, object],
        place: Callable[[str, object], Place],
    ) -> None:
        """Put the keys of a table into `below`, the values of that table so far."""
        for choice in tables()[path].choices() if path in tables() else ():
            if choice in table:
                self._drop_choice(path, choice, table[choice])
        for key, value in table.items():
            full = f"{path}.{toml_key(key)}"
            self.places[full] = place(full, value)
            is_table = full in tables() and isinstance(value, dict)
            if not is_table and current_field(full) is not None and not has_bits(value):
                self.report_key(full, value, f"must be below 2^{INTEGER_BITS}")
                self.refused.add(full)
                continue
            now, renamed = renamed_word(full, value, self.places[full])
            self.renamed += [] if renamed is None else [renamed]
            if full in tables() and isinstance(now, dict):
                inner = below.get(key)
                below[key] = inner if isinstance(inner, dict) else {}
                self._merge(full, below[key], now, place)
            else:
                self._remove_places(full)
                below[key] = now

    def _drop_choice(self, path: str, choice: str, value: object) -> None:
        """Remove the tables that key `choice` of table `path` selected before it got another value.

        Tables of which a `--set` argument gives a key stay.
        """
        for table in (f"{path}.{name}" for name in tables()[path].choices()[choice] if name != value):
            places = (place for key, place in self.places.items() if key.startswith(f"{table}."))
            if all(place.override is None for place in places):
                self.remove(table)

    def remove(self, path: str) -> None:
        """Remove a key, or a table in a section, with its values and places; do nothing if it is missing.

        Args:
            path: Full name, such as "optimizer.muon". Do not pass the name of a whole section: its values
                would stay, without their places.
        """
        remove(self.values, path)
        self.places.pop(path, None)
        self._remove_places(path)

    def _remove_places(self, path: str) -> None:
        """Remove the places of all keys in a table."""
        for key in [key for key in self.places if key.startswith(f"{path}.")]:
            del self.places[key]

    def apply_override(self, argument: str) -> None:
        """Apply a `--set` argument to the keys so far. Problems are added and not raised.

        Call this after all texts are read, since a later text would replace the value. The argument is also
        added to `arguments`. A key gets the new value, which takes precedence over all files and earlier
        arguments. A table of the key that is missing is added. The argument may have an old name of the key.
        If it selects a table, tables that the files have for other values are removed.

        Args:
            argument: "section.key=value"; "section.key=", which removes the key, also one of an earlier
                argument, so that it gets its default; or a word or list for a section, such as "layout=auto".
        """
        self.arguments.append(argument)
        name, equals, text = argument.partition("=")
        section, dot, key = name.strip().partition(".")
        place = Place(self.name, override=argument)
        if not equals or not section or (dot and not key):
            self.report(place, "must be written as section.key=value, such as batch.micro_size=4")
        elif section == "include":
            self.report(place, "include is a key of files only")
        elif dot:
            self._override_key(section, key, text.strip(), place)
        else:
            self._override_section(section, text, place)

    def _override_section(self, section: str, text: str, place: Place) -> None:
        """Replace a section by the table for a word or a list."""
        table = section_of_value(section, _word_or_list(text))
        if not isinstance(table, dict):
            unknown = unknown_section(section, []) if text.lstrip()[:1] == "{" else unknown_key("", section)
            sentence = f"must be written as {section}.key=value" if section in sections() else unknown
            self.report(place, sentence + ", or layout=auto, which chooses a layout" * (section == "layout"))
            return
        self._remove_chosen_keys()
        self._remove_places(section)
        self.values[section] = dict(table)
        self.places |= {f"{section}.{key}": replace(place, value=value) for key, value in table.items()}

    def _override_key(self, section: str, key: str, text: str, place: Place) -> None:
        """Set a key, whose name may contain names of tables, to the value in a text, or remove it."""
        full, path = f"{section}.{key}", section
        paths = [path]
        while "." in key and (inner := f"{path}.{key.partition('.')[0]}") in tables():
            path, key = inner, key.partition(".")[2]
            paths.append(path)
        field = current_field(full)
        if not text and (field is not None or path != section):
            self._unset(full)
            return
        for each in paths:
            self.places.setdefault(each, place)
        table = table_in(self.values, path)
        try:
            value = parse_argument(text)
        except TomlError as error:
            self.report(place, error.reason)
            return
        if field is not None and value_type(field) is str and not isinstance(value, str):
            value = value if isinstance(value, list) and accepts_list(field) else text
        if full == "layout.auto" and value is True:
            self._remove_chosen_keys()
        if section == "run":
            self._replace_length({key: value})
        if full in tables() and isinstance(value, dict):
            self._unset(full)
        self._remove_other_names({key: value}, path)
        self._merge(path, table, {key: value}, lambda _, value: replace(place, value=value))

    def _remove_other_names(self, values: Mapping[str, Any], path: str = "") -> None:
        """Remove the present keys that old keys of the next file or argument replace, and the reverse.

        Args:
            values: Keys of that file or argument.
            path: Full name of the table that they are in; "" for sections.
        """
        for key in leaf_names(values, path):
            value = look_up(values, key.removeprefix(f"{path}."))
            if key in tables() and renamed_word(key, value, Place(self.name))[0] != NONE:
                continue
            for name in other_names(key):
                self.remove(name)
                for table in optional_tables(name):
                    if look_up(self.values, table) == NONE:
                        self.remove(table)

    def _unset(self, key: str) -> None:
        """Remove a key or a table by its old or present name, with the tables that the key selects."""
        for full in (key, *other_names(key, self.values)):
            path, _, name = full.rpartition(".")
            self.remove(full)
            if path in tables() and name in tables()[path].choices():
                self._drop_choice(path, name, None)

    def _replace_length(self, keys: Mapping[str, object]) -> None:
        """Remove the length of the run that another file gave if these keys of [run] give it."""
        if any(name in keys for name in LENGTHS):
            for key in (f"run.{name}" for name in LENGTHS if name not in keys):
                if key in self.places and self.places[key].override is None:
                    self.remove(key)

    def _remove_chosen_keys(self) -> None:
        """Remove the keys that a search chose for an earlier run (layout.chosen)."""
        chosen = look_up(self.values, "layout.chosen")
        remove(self.values, "layout.chosen")
        for key in map(str, chosen) if isinstance(chosen, list) else ():
            if "." in key and self.places.get(key, Place("")).override is None:
                self.remove(key)


def section_of_value(section: str, value: object) -> object:
    """Return the table that a value stands for, if it was given in place of a whole section. Local.

    "auto" for the section "layout" stands for {"auto": True}. For "evaluation", a list of the tables
    [[evaluation]] stands for {"sets": the list}, and "" for {"sets": []}. Any other value is returned as it
    is, even if it is not a table.

    Args:
        section: Name of the section.
        value: Value that was given for it: a table, or text or a list in its place.
    """
    if section == "evaluation" and (isinstance(value, list) or value == ""):
        return {"sets": value or []}
    return {"auto": True} if (section, value) == ("layout", "auto") else value


def _word_or_list(text: str) -> object:
    """Return the word or list that an argument gives for a section; None if it is neither."""
    word = text.strip()
    if not word.startswith("["):
        return word.strip('"')
    try:
        return parse_argument(word)
    except TomlError:
        return None


def _is_one_of(path: Path, paths: Sequence[Path]) -> bool:
    """Return True if a path leads to the same file as one of some paths."""
    try:
        return os.path.realpath(path) in map(os.path.realpath, paths)
    except ValueError:  # no file can have such a name
        return False
