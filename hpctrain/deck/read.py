"""From TOML text, included files and `--set` arguments to a validated Deck, and back to text.

Every problem that can be found is found before anything is raised, each with the file and line, or
the `--set` argument, that it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from hpctrain.deck.check import check_deck, source_problems
from hpctrain.deck.check_world import data_ranks, world_problems
from hpctrain.deck.code import CodeEntry, CodeTrust, Overrides, code_entries
from hpctrain.deck.deck_input import DeckInput
from hpctrain.deck.defaults import fill, find_preset, is_default
from hpctrain.deck.key import chosen_by, extra, table_of
from hpctrain.deck.key_messages import expected_value, unknown_key, unknown_section, value_hint, value_type
from hpctrain.deck.nested import Tables, leaf_names, look_up, remove, table_in
from hpctrain.deck.objective import POLICIES
from hpctrain.deck.old_keys import NONE, rename_keys
from hpctrain.deck.policy import steps_of_rollout
from hpctrain.deck.presets import PRESETS
from hpctrain.deck.problem import Problem
from hpctrain.deck.rows import located, wrong_rows
from hpctrain.deck.run_length import LENGTHS, CompletedWork, is_epoch_count, steps_of_epochs
from hpctrain.deck.schema import Deck, field_of, fields, sections
from hpctrain.deck.schema import tables as schema_tables
from hpctrain.deck.search_keys import is_left_to_search
from hpctrain.deck.sources import Place, Sources, clipped, toml_value
from hpctrain.deck.toml import is_utf8
from hpctrain.deck.user_module import config_arguments, shown
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import is_unfit

SourceReader = Callable[[str], Mapping[str, object]]
"""What model.from names -> the full names and values of the keys that its model settles.

Where it has a method `sequences`, that counts those of an epoch of a deck, for run.epochs.
"""

Further = Callable[[Deck, int | None], Iterable[Problem]]
"""A deck that is right in itself and the number of ranks, if known -> what is wrong with what it names."""

_SHAPE = ("family", "layers", "hidden", "heads")


def read_deck(
    path: str | Path,
    overrides: Sequence[str] = (),
    ranks: int | None = None,
    read_source: SourceReader | None = None,
    further: Further | None = None,
    searched: bool = False,
) -> Deck:
    """Read and validate a deck, with `--set` arguments such as "batch.micro_size=4" on top of it.

    With `ranks`, the deck is checked against that number of ranks too. `read_source` looks into what
    model.from names; without it that key is taken as it is. `further` checks what else a deck names that has
    no other problem. What keys that are `searched` are wrong with, as layout.auto has them, is not told where
    the deck does not give them. Raises `HpctrainError` with every problem, or `InputOutputError` where all
    that is wrong is that files cannot be read.
    """
    written = DeckInput(str(path))
    if not is_utf8(str(path)):
        raise HpctrainError(f"{path}: the name of a deck must be UTF-8 text")
    written.read_file(Path(path), str(path), ())
    return _deck(written, overrides, ranks, read_source, further, searched)


def parse_deck(
    text: str,
    overrides: Sequence[str] = (),
    name: str = "deck.toml",
    ranks: int | None = None,
    read_source: SourceReader | None = None,
    includes: bool = True,
    defaults_written: bool = False,
    begun: tuple[int, int] = (0, 0),
) -> Deck:
    """As `read_deck`, from text; `name` stands for the file's name in messages and for included files.

    Text out of a checkpoint is not to open files: then `includes` is false. With `defaults_written`, the text
    has all defaults as if they were given: then keys with values that they would get from other keys count
    as not given. Of a run that has `begun`, (steps, samples), a length in tokens or epochs counts these.
    Text with `Overrides` is that of a stored deck: what of its code may be called is what these say.
    """
    written = DeckInput(name, includes)
    written.read_text(text, Path(name), name, ())
    if not includes:
        _rename_stored_keys(written)
    if defaults_written:
        _leave_out_defaults(written)
    sequence = written.values.get("batch", {}).get("sequence")
    known = CompletedWork(*begun, sequence if isinstance(sequence, int) else 0)
    if isinstance(overrides, Overrides):
        written.trusted_code = _trusted(written, overrides, overrides.trust)
    return _deck(written, overrides, ranks, read_source, begun=known)


def read_stored_deck(path: Path, trust: CodeTrust, read_source: SourceReader | None = None) -> Deck:
    """Read the `deck.toml` that a run left in its folder.

    `trust` says what of the code that it names may be called; errors are as for `read_deck`.
    """
    written = DeckInput(str(path), includes=False)
    written.read_file(path, str(path), ())
    _rename_stored_keys(written)
    written.trusted_code = _trusted(written, (), trust)
    return _deck(written, (), None, read_source)


def read_code_entries(path: Path) -> frozenset[CodeEntry]:
    """Return the code that a deck of the user's own names, with the files that it includes.

    HpctrainError or InputOutputError if the file cannot be read; nothing else of it is checked.
    """
    written = DeckInput(str(path))
    written.read_file(path, str(path), ())
    written.raise_problems()
    return code_entries(written.values, str(path))


def changed_deck(
    deck: Deck,
    changes: Sequence[str],
    ranks: int | None,
    name: str = "deck.toml",
    read_source: SourceReader | None = None,
    from_user: bool = False,
) -> Deck:
    """Return a deck with other values of keys, checked anew; errors as for `read_deck`.

    Code that the deck may not call stays so.

    Args:
        deck: The deck to change.
        changes: Values of keys, as `--set` has them.
        ranks: Number of ranks that the deck is checked against; None if it is not known.
        name: Name of the deck in messages.
        read_source: As for `read_deck`.
        from_user: True if the user gave the changes, so that code which they name may be called.
    """
    written = DeckInput(name)
    written.read_text(deck_text(deck), Path(name), name, ())
    written.trusted_code = deck.sources.trusted_code
    if written.trusted_code is not None and from_user:
        written.trusted_code |= _trusted(written, changes, CodeTrust())
    return _deck(written, changes, ranks, read_source)


def _trusted(written: DeckInput, overrides: Sequence[str], trust: CodeTrust) -> frozenset[CodeEntry]:
    """Return the code that may be called of what a stored deck names, read into `written`."""
    given = DeckInput(written.name)
    for argument in overrides:
        given.override(argument)
    stored = code_entries(written.values, written.name) if trust.everything else frozenset()
    return code_entries(given.values, written.name) | trust.entries | stored


def deck_text(deck: Deck, ranks: int | None = None) -> str:
    """The resolved deck as TOML: every section and key. Parses back to an equal deck.

    Keys without a value are comments that say what stands in for it; with `ranks` (which must fit the
    deck), layout.data is told as it will be on that many. Keys whose values follow others are comments, too,
    so that they still follow when the text is read with other values of those.
    """
    has = (
        deck.model.module is not None,
        deck.data.dataset is not None,
        deck.data.mixture is not None,
        deck.objective.kind in POLICIES,
    )
    shown_keys = {
        full for table in schema_tables() for name in fields(table) if shown(full := f"{table}.{name}", *has)
    }
    values: Tables = deck.model_dump(by_alias=True, exclude_none=True)
    for full in [*leaf_names(values, schema_tables())]:
        if full not in shown_keys:
            remove(values, full)
    # Steps that run.tokens make depend on what a run has done, too.
    following = {
        key
        for key in deck.sources.defaulted & shown_keys
        if look_up(values, key) is not None and (key == "run.steps" or is_default(values, key))
    }

    def line(full: str, field: FieldInfo) -> str:
        name = full.rpartition(".")[2]
        instead, value = extra(field, "derived"), look_up(values, full)
        if ranks is not None and full == "layout.data":
            instead += f": {data_ranks(deck, ranks)} on {ranks} ranks"
        if value is None and full == "model.experts" and _has_experts(deck):
            return f'{name} = "{NONE}"'
        text = f"# {name}: {instead}" if value is None else f"{name} = {toml_value(value)}"
        return f"# {text}  # {instead}" if full in following else text

    lines: list[str] = []
    for table in schema_tables():
        if "." in table and look_up(values, table) is None:
            continue
        keys = {f"{table}.{name}": field for name, field in fields(table).items()}
        own = {
            full: field
            for full, field in keys.items()
            if full in shown_keys
            and not chosen_by(field)
            and (table_of(field) is None or look_up(values, full) is None)
        }
        if own:
            lines += ["", f"[{table}]", *(line(full, field) for full, field in own.items())]
    return "\n".join(lines[1:]) + "\n"


def _rename_stored_keys(written: DeckInput) -> None:
    """Give old keys of a stored deck their new names, and drop those that have no effect."""
    for _ in rename_keys(written.values, written.places, lambda _: False):
        pass
    written.renamed.clear()


def _leave_out_defaults(written: DeckInput) -> None:
    """Forget the keys that were written with the values they would get from other keys."""
    values: Tables = {
        section: dict(table) if isinstance(table := written.values.get(section), dict) else {}
        for section in sections()
    }
    for key in [key for key in leaf_names(values, schema_tables()) if is_default(values, key)]:
        remove(written.values, key)
        written.places.pop(key, None)


def _deck(
    written: DeckInput,
    overrides: Sequence[str],
    ranks: int | None,
    read_source: SourceReader | None,
    further: Further | None = None,
    searched: bool = False,
    begun: CompletedWork = CompletedWork(),  # noqa: B008
) -> Deck:
    """The deck of what was written, or every problem raised as one error."""
    readable = not written.problems
    for argument in overrides:
        written.override(argument)
    deck = _Validation(written, readable, read_source, searched, begun).deck(ranks)
    if deck is not None and further is not None and not written.problems:
        try:
            for problem in further(deck, ranks):
                written.add(*located(deck, problem))
        except HpctrainError as error:
            for sentence in error.problems:
                missing = isinstance(error, InputOutputError)
                written.add(Place(written.name), sentence, file_missing=missing)
    written.raise_problems()
    assert deck is not None
    return deck


class _Validation:
    """Turns what was written into a Deck and adds the problems it finds, but for those of what is `searched`.

    `readable` says whether all files could be read: if not, nothing is said of missing keys. `source` are the
    keys that the model of model.from settles.
    """

    def __init__(
        self,
        written: DeckInput,
        readable: bool,
        read_source: SourceReader | None,
        searched: bool,
        begun: CompletedWork,
    ) -> None:
        self.written, self.begun = written, begun
        self.searched = searched
        self.places = written.places
        self.readable = readable
        self.read_source = read_source
        self.source: Mapping[str, object] = {}

    def deck(self, ranks: int | None) -> Deck | None:
        """The deck, where it is valid; else perhaps one with stand-ins, and at least one problem."""
        model = self.written.values.get("model")
        model = model if isinstance(model, dict) else {}
        if model.get("module") is None:
            self._look_into_source(model.get("from"))
        self._rename_keys(model)
        tables, bad = self._known_tables()
        bad |= self._settle_choices(tables)
        if self.written.trusted_code is None and (arguments := config_arguments(tables["model"])):
            tables["model"]["arguments"] = arguments
            place = replace(self.places["model.from"], value=None, note="from model.from")
            self.places["model.arguments"] = place
        if not {"steps", "tokens"} & tables["run"].keys() and is_epoch_count(tables["run"].get("epochs")):
            self._count_epochs(tables)
        given_keys = {*leaf_names(tables, schema_tables())}
        self._idle_preset(given_keys)
        deck, wrong = self._validate(tables)
        self._report(tables, wrong, bad)
        if deck is None:
            bad |= set(wrong)
            deck = self._stand_in(tables, given_keys, bad)
        if deck is not None and self.readable:
            problems = [*check_deck(deck, ranks), *source_problems(deck, self.source)]
            problems += [] if ranks is None or deck.layout.auto else world_problems(deck, ranks)
            for problem in problems:
                keys = {problem.key, *problem.others}
                forgiven = problem.for_writers and self._stored(keys)
                forgiven = forgiven or (problem.idle and self._stored({problem.key}))
                if self.searched or deck.layout.auto:
                    forgiven = forgiven or is_left_to_search(self.places, keys)
                if not bad & keys and not forgiven:
                    self.written.add(*located(deck, problem))
        return deck

    def _stored(self, keys: set[str]) -> bool:
        """Whether all of these keys are as a run has stored them."""
        places = [self.places.get(key) for key in keys]
        return not self.written.includes and all(each is None or each.override is None for each in places)

    def _look_into_source(self, path: object) -> None:
        """Learn the keys of the model that model.from names; a wrong type is told of elsewhere."""
        if self.read_source is None or not isinstance(path, str) or not path:
            return
        place = self.places["model.from"]
        try:
            self.source = self.read_source(path)
        except HpctrainError as error:
            problems, missing = error.problems, isinstance(error, InputOutputError)
        except OSError as error:
            problems = (f"{clipped(path)}: cannot be read: {(error.strerror or str(error)).lower()}",)
            missing = not is_unfit(error)
        else:
            return
        self.readable = False
        for problem in problems:
            self.written.add(place, f"{place.prefix}: model.from: {problem}", file_missing=missing)

    def _count_epochs(self, tables: Tables) -> None:
        """Write run.steps in place of run.epochs, in place; 1 where something else is wrong."""
        run, place = tables["run"], self.places["run.epochs"]
        epochs = run.pop("epochs")
        run["steps"] = 1
        self.places["run.steps"] = replace(place, value=None, note="from run.epochs")
        deck, _ = self._validate(tables)
        if deck is None or not self.readable:
            return
        problems: Sequence[str] = ()
        sequences, missing = getattr(self.read_source, "sequences", None), False
        if deck.objective.kind in POLICIES:
            run["steps"] = steps_of_rollout(deck)
            problems = ["counts sequences of token files, and these are prompts (run.steps would do)"]
        elif deck.data.dataset is not None or sequences is None:
            problems = ["counts the sequences of token files, which cannot be done here (run.steps would do)"]
        else:
            try:
                found = sequences(deck)
            except HpctrainError as error:
                problems, missing = error.problems, isinstance(error, InputOutputError)
            else:
                run["steps"] = steps_of_epochs(epochs, found, deck.batch, self.begun) if found else 1
        for problem in problems:
            sentence = f"{place.prefix}: run.epochs = {toml_value(epochs)}: {problem}"
            self.written.add(place, sentence, file_missing=missing)

    def _rename_keys(self, model: Mapping[str, object]) -> None:
        """Give old keys their new names, and say which of them have no effect."""
        preset = PRESETS.get(name) if isinstance(name := model.get("preset"), str) else None
        brought = () if preset is None else [f"model.{key}" for key in preset.model_keys()]

        def has_table(table: str) -> bool:
            return any(f"{name}.".startswith(f"{table}.") for name in (*brought, *self.source))

        for renamed in rename_keys(self.written.values, self.places, has_table):
            if renamed.problem and (self.written.includes or renamed.place.override is not None):
                sources = Sources(self.written.name, {renamed.old: renamed.place})
                sentence = sources.sentence(renamed.old, renamed.value, renamed.problem)
                self.written.add(renamed.place, sentence)
            else:
                self.written.renamed.append(renamed)

    def _settle_choices(self, tables: Tables) -> set[str]:
        """Let a table select itself where the key that selects it is not given; return contradictory keys."""
        bad: set[str] = set()
        for path, kind in schema_tables().items():
            table = look_up(tables, path)
            for choice, names in kind.choices().items() if isinstance(table, dict) else ():
                key, given = f"{path}.{choice}", [name for name in table if name in names]
                if given and choice not in table:
                    place = self.places[f"{path}.{given[0]}"]
                    table[choice] = given[0]
                    self.places[key] = replace(place, value=None, note=f"from [{path}.{given[0]}]")
                for name in (name for name in given if name != table[choice]):
                    place, other = self.places[f"{path}.{name}"], self.places[key]
                    subject = "" if place.override else f" [{path}.{name}]"
                    means = f'is for {key} = "{name}", but {other.prefix} has {toml_value(table[choice])}'
                    bad |= {key, *leaf_names({name: table.pop(name)}, schema_tables(), path)}
                    self.written.add(place, f"{place.prefix}:{subject} {means} (leave one of them out)")
        return bad

    def _known_tables(self) -> tuple[Tables, set[str]]:
        """The sections and keys that the schema has; and the keys of sections that are none."""
        tables: Tables = {section: {} for section in sections()}
        bad: set[str] = set()
        for section, table in self.written.values.items():
            place = self.places.get(section, Place(self.written.name))
            if not isinstance(table, dict):
                if section in tables:
                    bad |= {f"{section}.{key}" for key in fields(section)}
                    sentence = f"must be a section: [{section}] on a line of its own, with its keys below"
                    sentence += ', or layout = "auto", which has it chosen' * (section == "layout")
                else:
                    sentence = unknown_key("", section)
                shown = f"{clipped(section)} = {clipped(toml_value(table))}"
                self.written.add(place, f"{place.prefix}: {shown}: {sentence}")
            elif section not in tables:
                first = next(
                    (self.places[f"{section}.{key}"] for key in table if f"{section}.{key}" in self.places),
                    place,
                )
                named_at = place if section in self.places else first
                named = "" if named_at.override else f" [{clipped(section)}]:"
                sentence = unknown_section(section, list(table))
                self.written.add(named_at, f"{named_at.prefix}:{named} {sentence}")
            else:
                tables[section] = self._known_keys(section, table)
        return tables, bad

    def _known_keys(self, path: str, table: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a table that the schema has, after a sentence about each of the others."""
        known: dict[str, Any] = {}
        for key, value in table.items():
            full = f"{path}.{key}"
            if full in schema_tables() and isinstance(value, dict):
                known[key] = self._known_keys(full, value)
            elif key in fields(path):
                known[key] = value
            else:
                self._add_key(full, value, unknown_key(path, key))
        return known

    def _validate(self, tables: Tables) -> tuple[Deck | None, dict[str, str]]:
        """The deck, or each wrong key with the validator's name for what is wrong ("missing" is one)."""
        resolved = deepcopy(tables)
        places = dict(self.places)
        filled = fill(resolved, self.written.name, self.source, self.begun)
        origins = [("preset", "from the preset", filled.preset), ("from", "from model.from", filled.source)]
        for origin, note, keys in origins:
            for key in keys:
                places[key] = replace(places[f"model.{origin}"], value=None, note=note)
        defaulted = frozenset(filled.others)
        sources = Sources(self.written.name, MappingProxyType(places), defaulted, self.written.trusted_code)
        try:
            return Deck.model_validate(resolved, context=sources), {}
        except ValidationError as error:
            return None, {_key_at(fault["loc"]): fault["type"] for fault in error.errors()}

    def _report(self, tables: Tables, wrong: Mapping[str, str], silent: set[str]) -> None:
        """Say what is wrong with each key, but not what only follows from another problem."""
        shape = [f"model.{name}" for name in _SHAPE]
        unknown = "preset" in tables["model"] and find_preset(tables) is None
        unknown |= "model.from" in wrong
        no_model = not any(name in tables["model"] for name in ("preset", "from", *_SHAPE))
        if no_model and self.readable and "model.family" in wrong and "model.family" not in silent:
            sentence = "name a published shape, or give model.family, layers, hidden and heads"
            self._missing("model", "model.preset", sentence)
        for full, kind in wrong.items():
            table = full.rpartition(".")[0]
            field = field_of(full)
            assert field is not None
            if kind != "missing":
                value = look_up(tables, full, absent := object())
                if value is absent:
                    continue  # a default that follows from a wrong key
                rows = list(wrong_rows(full, field, value, Sources(self.written.name, self.places)))
                for place, sentence in rows:
                    self.written.add(place, sentence)
                if rows:
                    continue
                self._add_key(full, value, f"must be {expected_value(field)}{value_hint(value, field)}")
            elif full in silent or not self.readable or (unknown and extra(field, "derived")):
                continue
            elif not extra(field, "derived"):
                meaning = str(field.description).rstrip(".")
                self._missing(table, full, f"{expected_value(field)} ({meaning[0].lower()}{meaning[1:]})")
            elif full == "run.steps" and not any(name in tables["run"] for name in LENGTHS):
                meaning = "optimizer steps of the whole run"
                self._missing(
                    table, full, f"{expected_value(field)} ({meaning}), or run.tokens or run.epochs"
                )
            elif (full in shape or full == "batch.sequence") and not no_model:
                self._missing(table, full, f"{expected_value(field)}, or give model.preset")

    def _idle_preset(self, keys: set[str]) -> None:
        """Refuse a preset given by `--set` on a deck that gives a shape already, as resolved decks do."""
        place = self.places.get("model.preset")
        if place is None or place.override is None or not {f"model.{name}" for name in _SHAPE} <= keys:
            return
        layers = self.places["model.layers"].prefix
        sentence = f"would not change the model, whose family, layers, hidden and heads are given ({layers})"
        self.written.add(place, f"{place.prefix}: {sentence}")

    def _stand_in(self, tables: Tables, given_keys: set[str], bad: set[str]) -> Deck | None:
        """A deck with stand-ins for the bad keys, on which the checks of the other keys can run.

        Adds to the bad keys those whose defaults follow from bad ones.
        """
        tables = deepcopy(tables)
        for key in bad:
            remove(tables, key)
        if "preset" in tables["model"] and any(key.startswith("model.") for key in bad):
            bad |= {key for key in _keys_of("model") if key not in given_keys}
        deck, wrong = self._validate(tables)
        bad |= set(wrong)
        for full in wrong:
            path, _, name = full.rpartition(".")
            kind = value_type(fields(path)[name])
            if table_of(fields(path)[name]) is None:
                value = get_args(kind)[0] if get_origin(kind) is Literal else kind(1)
                table_in(tables, path)[name] = value
            else:
                remove(tables, full)
        return deck or self._validate(tables)[0]

    def _add_key(self, key: str, value: object, sentence: str) -> None:
        sources = Sources(self.written.name, self.places)
        self.written.add(sources.place(key), sources.sentence(key, value, sentence))

    def _missing(self, section: str, key: str, sentence: str) -> None:
        place = self.places.get(section, Place(self.written.name))
        self.written.add(place, f"{place.prefix}: {key} is missing: {sentence}")


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


def _has_experts(deck: Deck) -> bool:
    """Return True if the preset of a deck is a mixture of experts."""
    return deck.model.preset is not None and PRESETS[deck.model.preset].experts > 0
