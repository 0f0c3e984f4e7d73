"""Reading a deck: TOML with includes and overrides, every problem at once, and its text again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hpctrain.deck.check import check_deck
from hpctrain.deck.defaults import Tables, fill
from hpctrain.deck.locate import first_repeated, key_lines
from hpctrain.deck.presets import PRESETS
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import Place, Sources, toml_value
from hpctrain.errors import HpctrainError, InputOutputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in Deck.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
KEYS = [f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields]


def read_deck(path: str | Path, overrides: Sequence[str] = ()) -> Deck:
    """The deck in a file, with `key=value` overrides on top.

    HpctrainError with every problem that was found; InputOutputError if a file cannot be read.
    """
    reader = _Reader(Path(path).name)
    reader.file(Path(path), ())
    return reader.deck(overrides)


def parse_deck(text: str, overrides: Sequence[str] = (), name: str = "deck.toml") -> Deck:
    """The deck in a text, which cannot include files; errors as `read_deck`."""
    reader = _Reader(name)
    reader.text(text, name, None, ())
    return reader.deck(overrides)


def deck_text(deck: Deck) -> str:
    """The resolved deck as TOML: every key with its value; what has none is a comment."""
    lines = []
    for section, model in SECTIONS.items():
        lines.append(f"[{section}]")
        values = getattr(deck, section)
        for key in model.model_fields:
            value = getattr(values, key)
            lines.append(f"# {key} is not set" if value is None else f"{key} = {toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


class _Reader:
    """Collects tables, the places of their keys, and problems."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tables: Tables = {section: {} for section in SECTIONS}
        self.places: dict[str, Place] = {}
        self.problems: list[str] = []

    def file(self, path: Path, including: tuple[Path, ...]) -> None:
        """Add a file's keys; those of files that include it come on top."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InputOutputError(f"{path}: no such deck") from None
        except OSError as error:
            raise InputOutputError(f"{path}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            raise HpctrainError(f"{path}: is no text in UTF-8, so it cannot be a deck") from None
        self.text(text, str(path), path, including)

    def text(self, text: str, name: str, path: Path | None, including: tuple[Path, ...]) -> None:
        """Add the keys of a text, below which those of the files that it includes lie."""
        tables = _parse(text, name)
        lines = key_lines(text)
        for included in self._includes(
            tables.pop("include", []), f"{name}:{lines.get(('include',), 1)}", path
        ):
            resolved = included.resolve()
            chain = (*including, *((path.resolve(),) if path else ()))
            if resolved in chain:
                self.problems.append(
                    f"{name}:{lines.get(('include',), 1)}: include = {included}: includes itself"
                )
                continue
            if not included.exists():
                self.problems.append(
                    f"{name}:{lines.get(('include',), 1)}: include = {included}: no such file"
                )
                continue
            self.file(included, chain)
        for section, content in tables.items():
            where = f"{name}:{lines.get((section,), 1)}"
            if section not in SECTIONS:
                self.problems.append(f"{where}: {_unknown_section(section, content)}")
            elif not isinstance(content, dict):
                self.problems.append(f"{where}: {section} is a section; write [{section}] and its keys below")
            else:
                for key, value in content.items():
                    place = Place(name, lines.get((section, key)), value=value)
                    self._set(section, key, value, place)

    def _includes(self, value: object, where: str, path: Path | None) -> list[Path]:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.problems.append(
                f'{where}: include: must be a file\'s name or a list of them, as include = "base.toml"'
            )
            return []
        if names and path is None:
            self.problems.append(f"{where}: include: only a deck that is a file can include others")
            return []
        return [path.parent / name for name in names] if path is not None else []

    def override(self, text: str) -> None:
        """Add one `section.key=value`; the value is TOML, or else plain text."""
        name, equals, written = text.partition("=")
        name, written = name.strip(), written.strip()
        if not equals or not name:
            self.problems.append(f"--set {text}: must be section.key=value, as run.steps=100")
            return
        try:
            value = tomllib.loads(f"value = {written}")["value"]
        except tomllib.TOMLDecodeError:
            value = written
        section, _, key = name.partition(".")
        if section not in SECTIONS or not key:
            self.problems.append(f"--set {text}: {_unknown_key(name)}")
            return
        self._set(section, key, value, Place(self.name, override=text, value=value))

    def _set(self, section: str, key: str, value: object, place: Place) -> None:
        name = f"{section}.{key}"
        if key not in SECTIONS[section].model_fields:
            self.problems.append(f"{place.prefix}: {_unknown_key(name)}")
            return
        self.tables[section][key] = value
        self.places[name] = place

    def deck(self, overrides: Sequence[str]) -> Deck:
        """Apply the overrides, fill defaults, validate; HpctrainError with all problems."""
        for text in overrides:
            self.override(text)
        preset = self.tables["model"].get("preset")
        filled = set(fill(self.tables, self.name))
        for name in filled:
            self.places[name] = Place(self.name, note=f"from the preset {preset}")
        sources = Sources(self.name, dict(self.places))
        try:
            deck = Deck.model_validate(self.tables)
        except ValidationError as error:
            unknown_preset = preset is not None and preset not in PRESETS
            self.problems += [
                _sentence(details, sources)
                for details in error.errors()
                if not (
                    unknown_preset
                    and details["type"] == "missing"
                    and details["loc"][0] in {"model", "batch"}
                )
            ]
            raise HpctrainError(self.problems) from None
        deck._sources = sources
        self.problems += check_deck(deck)
        if self.problems:
            raise HpctrainError(self.problems)
        return deck


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        repeated = first_repeated(text)
        if repeated is not None:
            path, first, second = repeated
            raise HpctrainError(
                f"{name}:{second}: {'.'.join(path)} is given twice, first in line {first}"
            ) from None
        message = str(error)
        _, _, rest = message.partition("(at line ")
        line = rest.split(",")[0]
        what, _, _ = message.partition(" (at ")
        where = f"{name}:{line}" if line.isdigit() else name
        raise HpctrainError(f"{where}: is no TOML: {what[0].lower()}{what[1:]}") from None
    return tables


def _unknown_section(section: str, content: object) -> str:
    close = get_close_matches(section, SECTIONS, 1, 0.5)
    if not isinstance(content, dict):
        return f"{section}: keys stand in sections; {_suggestion(section)}"
    meant = f"did you mean [{close[0]}]?" if close else f"the sections are {', '.join(SECTIONS)}"
    return f"[{section}]: no such section; {meant}"


def _unknown_key(name: str) -> str:
    section, _, key = name.partition(".")
    return f"{name}: no such key; {_suggestion(key or section, section)}"


def _suggestion(key: str, section: str = "") -> str:
    """The nearest key: of the same section, of the same name elsewhere, or of a similar one elsewhere."""
    own = [name.partition(".")[2] for name in KEYS if name.startswith(f"{section}.")]
    close = get_close_matches(key, own, 1, 0.6)
    if close:
        return f"did you mean {section}.{close[0]}?"
    everywhere = {name.partition(".")[2]: name for name in KEYS}
    close = get_close_matches(key, everywhere, 1, 0.6)
    if close:
        return f"did you mean {everywhere[close[0]]}?"
    return "`hpctrain deck --reference` lists all keys"


def _sentence(details: ErrorDetails, sources: Sources) -> str:
    section, *keys = (str(part) for part in details["loc"])
    name = ".".join([section, *keys[:1]])
    if details["type"] == "missing":
        return f"{sources.name}: {name} is missing; {_description(name)}"
    return sources.sentence(name, details["input"], _wanted(details))


def _description(name: str) -> str:
    section, _, key = name.partition(".")
    field = SECTIONS[section].model_fields[key]
    text = (field.description or "").rstrip(".")
    return f"it is the {text[0].lower()}{text[1:]}"


def _wanted(details: ErrorDetails) -> str:
    """What would be right, in words."""
    context = details.get("ctx", {})
    given = f"not {_kind(details['input'])}"
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("above", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("below", "lt"),
    }
    match details["type"]:
        case "int_type" | "int_from_float" | "int_parsing":
            return f"must be a whole number, {given}"
        case "float_type" | "float_parsing":
            return f"must be a number, {given}"
        case "bool_type" | "bool_parsing":
            return f"must be true or false, {given}"
        case "string_type":
            return f"must be a text in quotes, {given}"
        case "string_too_short":
            return "must not be empty"
        case "literal_error":
            expected = str(context["expected"]).replace("'", '"')
            names = [part.strip().strip('"') for part in expected.replace(" or ", ", ").split(",")]
            close = get_close_matches(str(details["input"]), names, 1, 0.6)
            return f"must be {expected}" + (f'; did you mean "{close[0]}"?' if close else "")
        case "finite_number":
            return "must be a finite number"
        case kind if kind in bounds:
            word, key = bounds[kind]
            return f"must be {word} {context[key]}"
        case _:
            text = details["msg"].removeprefix("Value error, ")
            return f"{text[0].lower()}{text[1:]}"


def _kind(value: object) -> str:
    match value:
        case bool():
            return "true or false"
        case int():
            return "a whole number"
        case float():
            return "a fraction"
        case str():
            return "a text"
        case list():
            return "a list"
        case dict():
            return "a table"
        case _:
            return type(value).__name__
