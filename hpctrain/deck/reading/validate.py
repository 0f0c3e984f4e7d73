"""Validation of the keys of a deck, which reports all problems with their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from hpctrain.deck.check import check_deck, world_problems
from hpctrain.deck.key import field_text, table_class
from hpctrain.deck.key_messages import expected_value, unknown_key, unknown_section, value_hint, value_type
from hpctrain.deck.presets import preset_named
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.reading.deck_input import DeckInput
from hpctrain.deck.reading.defaults import fill_defaults
from hpctrain.deck.reading.nested import Tables, choices_in, leaf_names, look_up, remove, table_in
from hpctrain.deck.reading.old_keys import is_choice, rename_keys
from hpctrain.deck.rows import place_and_message, row_problems
from hpctrain.deck.run_length import LENGTHS, CompletedWork, is_epoch_count, steps_of_epochs
from hpctrain.deck.schema import Deck, field_of, fields, sections
from hpctrain.deck.schema import tables as schema_tables
from hpctrain.deck.search_keys import is_left_to_search
from hpctrain.deck.sections.model import source_problems
from hpctrain.deck.sections.module import config_arguments
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.deck.sections.policy import steps_per_rollout
from hpctrain.deck.sources import Place, Sources, clipped, toml_key, toml_value
from hpctrain.errors import HpctrainError
from hpctrain.files import is_unfit

SourceReader = Callable[[str], Mapping[str, object]]
"""Function that takes the value of `model.from` and returns the keys that its model determines, by full name.

An HpctrainError or OSError that it raises is reported with the problems of the deck. Its optional method
`sequences` returns the number of sequences in an epoch of a deck, for run.epochs.
"""

_SHAPE = ("family", "layers", "hidden", "heads")
"""Keys of [model] that describe a transformer, and that every preset has."""


@dataclass
class DeckValidator:
    """Validator that turns a DeckInput into a Deck and adds all problems to the DeckInput.

    Attributes:
        deck_input: Keys of the deck; its values and places are changed.
        readable: True if all files could be read; otherwise missing keys are not reported.
        read_source: Reader of the model that `model.from` names; None to read no model.
        for_search: True to ignore problems of keys that a search chooses.
        completed: Work that the resumed run has completed.
        source: Keys that the model in `model.from` determines.
    """

    deck_input: DeckInput
    readable: bool
    read_source: SourceReader | None
    for_search: bool
    completed: CompletedWork
    source: Mapping[str, object] = field(default_factory=dict)

    @property
    def places(self) -> dict[str, Place]:
        """Place of each section and key: `places` of the DeckInput itself, not a copy."""
        return self.deck_input.places

    def validate(self, ranks: int | None) -> Deck | None:
        """Check the DeckInput, and return its deck. Local. Call this once, and `raise_problems` after it.

        Adds all problems to the DeckInput, changes its values and places (such as the names of old keys), and
        may read the model that `model.from` names. The result does not tell if there were problems;
        `raise_problems` of the DeckInput does. If there were, the result is of no use: it is None, or a deck
        in which substitutes replace wrong keys, which was made only to check the other keys.

        Args:
            ranks: Number of ranks of the run; None if it is not known. Then what depends on it is not
                checked, nor is it for a deck with layout.auto.
        """
        self._read_source()
        self._rename_keys()
        tables, bad = self._known_tables()
        bad |= self.deck_input.refused
        bad |= self._complete_choices(tables)
        self._add_config_arguments(tables["model"])
        self._count_epochs(tables)
        explicit_keys = {*leaf_names(tables)}
        self._refuse_preset_without_effect(explicit_keys)
        deck, wrong = self._build(tables)
        self._report(tables, wrong, bad)
        if deck is None:
            bad |= set(wrong)
            deck = self._substitute(tables, explicit_keys, bad)
        if deck is not None and self.readable:
            self._check(deck, ranks, bad)
        return deck

    def _read_source(self) -> None:
        """Read the keys that the model in model.from determines. Another check reports a wrong type."""
        path = look_up(self.deck_input.values, "model.from")
        has_module = look_up(self.deck_input.values, "model.module") is not None
        if self.read_source is None or has_module or not isinstance(path, str) or not path:
            return
        place = self.places["model.from"]
        subject = f"{place.prefix}: model.from: "
        try:
            self._set_source(self.read_source(path))
        except HpctrainError as error:
            self.readable = False
            self.deck_input.report_error(place, error, subject)
        except OSError as error:
            self.readable = False
            reason = f"{clipped(path)}: cannot be read: {(error.strerror or str(error)).lower()}"
            self.deck_input.add_problem(place, f"{subject}{reason}", file_missing=not is_unfit(error))

    def _set_source(self, keys: Mapping[str, object]) -> None:
        """Take over the keys of the model in model.from. Those of a module are added to the deck."""
        if "model.module" not in keys:
            self.source = keys
            return
        for full, value in keys.items():
            section, _, name = full.partition(".")
            table = self.deck_input.values.setdefault(section, {})
            if isinstance(table, dict) and name not in table:
                table[name] = value
                self.places[full] = replace(self.places["model.from"], value=None, note="from model.from")

    def _rename_keys(self) -> None:
        """Rename keys of older versions to their present names, and report those that have no effect."""
        preset = preset_named(look_up(self.deck_input.values, "model.preset"))
        preset_tables = () if preset is None else tuple(f"model.{table}" for table in preset.tables)

        def has_table(table: str) -> bool:
            return any(f"{name}.".startswith(f"{table}.") for name in (*preset_tables, *self.source))

        for renamed in rename_keys(self.deck_input.values, self.places, has_table):
            if renamed.problem and (self.deck_input.includes or renamed.place.override is not None):
                sources = Sources(self.deck_input.name, {renamed.old: renamed.place})
                sentence = sources.sentence(renamed.old, renamed.value, renamed.problem)
                self.deck_input.add_problem(renamed.place, sentence)
            else:
                self.deck_input.renamed.append(renamed)

    def _known_tables(self) -> tuple[Tables, set[str]]:
        """Return the known sections and keys of the deck, and all keys of sections that are not tables."""
        tables: Tables = {section: {} for section in sections()}
        bad: set[str] = set()
        for section, table in self.deck_input.values.items():
            if isinstance(table, dict) and section in tables:
                tables[section] = self._known_keys(section, table)
                continue
            shown = toml_key(section)
            keys = (f"{shown}.{toml_key(key)}" for key in table) if isinstance(table, dict) else ()
            place = next(
                (self.places[key] for key in (shown, *keys) if key in self.places),
                Place(self.deck_input.name),
            )
            subject = f"{clipped(shown)} = {clipped(toml_value(table))}: "
            if isinstance(table, dict):
                subject = "" if place.override else f"[{clipped(section)}]: "
                sentence = unknown_section(section, list(table))
            elif section in tables:
                bad |= {f"{section}.{key}" for key in fields(section)}
                sentence = f"must be a section: [{section}] on a line of its own, with its keys below"
                sentence += ', or layout = "auto", which chooses a layout' * (section == "layout")
            else:
                sentence = unknown_key("", section)
            self.deck_input.report(place, subject + sentence)
        return tables, bad

    def _known_keys(self, path: str, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return the known keys of a table, and report the others."""
        known: dict[str, Any] = {}
        for key, value in table.items():
            full = f"{path}.{toml_key(key)}"
            if full in schema_tables() and isinstance(value, dict):
                known[key] = self._known_keys(full, value)
            elif key in fields(path):
                known[key] = value
            else:
                self.deck_input.report_key(full, value, unknown_key(path, key))
        return known

    def _complete_choices(self, tables: Tables) -> set[str]:
        """Set keys that select a table and are not given, if a table is given. Return contradictory keys."""
        bad: set[str] = set()
        for path, table, choice, names in choices_in(tables):
            key, given = f"{path}.{choice}", [name for name in table if name in names]
            if given and choice not in table:
                place = self.places[f"{path}.{given[0]}"]
                table[choice] = given[0]
                self.places[key] = replace(place, value=None, note=f"from [{path}.{given[0]}]")
            for name in (name for name in given if name != table[choice]):
                if not is_choice(key, table[choice]):  # which is reported as a wrong value
                    bad |= {key, *leaf_names({name: table.pop(name)}, path)}
                    continue
                place, other = self.places[f"{path}.{name}"], self.places[key]
                subject = "" if place.override else f"[{path}.{name}] "
                means = f'requires {key} = "{name}", but {other.prefix} has {toml_value(table[choice])}'
                bad |= {key, *leaf_names({name: table.pop(name)}, path)}
                self.deck_input.report(place, f"{subject}{means} (leave one of them out)")
        return bad

    def _add_config_arguments(self, model: dict[str, Any]) -> None:
        """Add the arguments of a class of `transformers` to [model] if model.from determines them."""
        if self.deck_input.trusted_code is None and (arguments := config_arguments(model)):
            model["arguments"] = arguments
            place = replace(self.places["model.from"], value=None, note="from model.from")
            self.places["model.arguments"] = place

    def _count_epochs(self, tables: Tables) -> None:
        """Replace a valid run.epochs by run.steps in the tables, with 1 step if another key is wrong."""
        run = tables["run"]
        if {"steps", "tokens"} & run.keys() or not is_epoch_count(run.get("epochs")):
            return
        place, epochs = self.places["run.epochs"], run.pop("epochs")
        run["steps"] = 1
        self.places["run.steps"] = replace(place, value=None, note="from run.epochs")
        deck, _ = self._build(tables)
        if deck is None or not self.readable:
            return
        subject = f"run.epochs = {toml_value(epochs)}: "
        sequences = getattr(self.read_source, "sequences", None)
        if deck.objective.kind in POLICY_KINDS:
            run["steps"] = steps_per_rollout(deck)
            reason = "counts sequences of token files, but a policy trains on prompts (use run.steps)"
            self.deck_input.report(place, subject + reason)
        elif deck.data.dataset is not None or sequences is None:
            reason = "requires token files whose sequences can be counted (use run.steps)"
            self.deck_input.report(place, subject + reason)
        else:
            try:
                count = sequences(deck)
                run["steps"] = steps_of_epochs(epochs, count, deck.batch, self.completed) if count else 1
            except HpctrainError as error:
                self.deck_input.report_error(place, error, f"{place.prefix}: {subject}")

    def _refuse_preset_without_effect(self, keys: set[str]) -> None:
        """Report a preset in `--set` that has no effect, since the deck has all sizes already."""
        place = self.places.get("model.preset")
        if place is None or place.override is None or not {f"model.{name}" for name in _SHAPE} <= keys:
            return
        layers = self.places["model.layers"].prefix
        sentence = f"has no effect: family, layers, hidden and heads of the model are given ({layers})"
        self.deck_input.report(place, sentence)

    def _build(self, tables: Tables) -> tuple[Deck | None, dict[str, str]]:
        """Return the deck if it is valid, and pydantic's error type, such as "missing", of each wrong key."""
        resolved = deepcopy(tables)
        places = dict(self.places)
        filled = fill_defaults(resolved, self.deck_input.name, self.source, self.completed)
        origins = [("preset", "from the preset", filled.preset), ("from", "from model.from", filled.source)]
        for origin, note, keys in origins:
            for key in keys:
                places[key] = replace(places[f"model.{origin}"], value=None, note=note)
        defaulted = frozenset(filled.others)
        sources = Sources(
            self.deck_input.name, MappingProxyType(places), defaulted, self.deck_input.trusted_code
        )
        try:
            return Deck.model_validate(resolved, context=sources), {}
        except ValidationError as error:
            return None, {_key_at(fault["loc"]): fault["type"] for fault in error.errors()}

    def _report(self, tables: Tables, wrong: Mapping[str, str], silent: set[str]) -> None:
        """Report each wrong key, except for those that are wrong only because of another problem."""
        has_model = any(name in tables["model"] for name in ("preset", "from", *_SHAPE))
        if not has_model and self.readable and "model.family" in wrong and "model.family" not in silent:
            sentence = "the name of a published model (or give model.family, layers, hidden and heads)"
            self._report_missing("model", "model.preset", sentence)
        unknown_preset = "preset" in tables["model"] and preset_named(tables["model"]["preset"]) is None
        is_known = not unknown_preset and "model.from" not in wrong
        for key, error in wrong.items():
            field = field_of(key)
            assert field is not None
            if error != "missing":
                self._report_wrong_value(tables, key, field)
            elif key not in silent and self.readable and (is_known or not field_text(field, "derived")):
                self._report_required_key(tables, key, field, has_model)

    def _report_wrong_value(self, tables: Tables, key: str, field: FieldInfo) -> None:
        """Report the value of a key, unless it is a default that follows from another wrong key."""
        value = look_up(tables, key, absent := object())
        if value is absent:
            return
        problems = list(row_problems(key, field, value, self.deck_input.sources))
        for place, sentence in problems:
            self.deck_input.add_problem(place, sentence)
        if not problems:
            self.deck_input.report_key(
                key, value, f"must be {expected_value(field)}{value_hint(value, field)}"
            )

    def _report_required_key(self, tables: Tables, key: str, field: FieldInfo, has_model: bool) -> None:
        """Report that a required key is missing, and name the keys that could be given instead."""
        table, expected = key.rpartition(".")[0], expected_value(field)
        if not field_text(field, "derived"):
            meaning = str(field.description).rstrip(".")
            self._report_missing(table, key, f"{expected} ({meaning[0].lower()}{meaning[1:]})")
        elif key == "run.steps" and not any(name in tables["run"] for name in LENGTHS):
            sentence = f"{expected} of optimizer steps (or give run.tokens or run.epochs)"
            self._report_missing(table, key, sentence)
        elif has_model and key in {"batch.sequence", *(f"model.{name}" for name in _SHAPE)}:
            self._report_missing(table, key, f"{expected} (or give model.preset)")

    def _report_missing(self, section: str, key: str, sentence: str) -> None:
        place = self.places.get(section, Place(self.deck_input.name))
        self.deck_input.report(place, f"{key} is missing: {sentence}")

    def _substitute(self, tables: Tables, explicit_keys: set[str], bad: set[str]) -> Deck | None:
        """Return a deck with substitutes for bad keys, so that relations of the other keys can be checked.

        Keys whose defaults follow from bad keys are added to `bad`.
        """
        tables = deepcopy(tables)
        for key in bad:
            path, _, name = key.rpartition(".")
            for selected in schema_tables()[path].choices().get(name, ()):
                remove(tables, f"{path}.{selected}")
            remove(tables, key)
        if "preset" in tables["model"] and any(key.startswith("model.") for key in bad):
            bad |= {key for key in _keys_of("model") if key not in explicit_keys}
        deck, wrong = self._build(tables)
        bad |= set(wrong)
        for full in wrong:
            path, _, name = full.rpartition(".")
            kind = value_type(fields(path)[name])
            if table_class(fields(path)[name]) is None:
                origin = get_origin(kind)
                value = get_args(kind)[0] if origin is Literal else () if origin is tuple else kind(1)
                table_in(tables, path)[name] = value
            else:
                remove(tables, full)
        return deck or self._build(tables)[0]

    def _check(self, deck: Deck, ranks: int | None, bad: set[str]) -> None:
        """Report the problems of relations between keys, except for those that concern bad keys."""
        problems = [*check_deck(deck, ranks), *source_problems(deck, self.source)]
        problems += [] if ranks is None or deck.layout.auto else world_problems(deck, ranks)
        for problem in problems:
            if not bad & {problem.key, *problem.others} and not self._is_ignored(problem, deck):
                self.deck_input.add_problem(*place_and_message(deck, problem))

    def _is_ignored(self, problem: DeckProblem, deck: Deck) -> bool:
        """Return True if a problem matters only for new decks, or only after a search."""
        keys = {problem.key, *problem.others}
        if (self.for_search or deck.layout.auto) and is_left_to_search(self.places, keys):
            return True
        return (problem.for_new_decks and self._are_stored(keys)) or (
            problem.no_effect and self._are_stored({problem.key})
        )

    def _are_stored(self, keys: set[str]) -> bool:
        """Return True if the keys have the values that a run stored, without includes and overrides."""
        places = [self.places.get(key) for key in keys]
        return not self.deck_input.includes and all(each is None or each.override is None for each in places)


def _key_at(location: tuple[int | str, ...]) -> str:
    """Return the full name of the key that an error of pydantic is about."""
    key = str(location[0])
    for part in location[1:]:
        if key in schema_tables() and part in fields(key):
            key = f"{key}.{part}"
    return key


def _keys_of(section: str) -> list[str]:
    """Return the full names of all keys of a section and of the tables in it."""
    names = [name for name in schema_tables() if f"{name}.".startswith(f"{section}.")]
    return [f"{name}.{key}" for name in names for key in fields(name)]
