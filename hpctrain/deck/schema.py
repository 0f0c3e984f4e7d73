"""Every key of the deck: its type, bounds, default, unit and one line of help.

The models are frozen. Keys whose default depends on other keys have none here: `defaults.fill_defaults`
writes their values before validation, and `derived` says in words what they will be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, cast

from pydantic import BaseModel, PrivateAttr
from pydantic.fields import FieldInfo

from hpctrain.deck.code import CodeEntry, NamedCode, UntrustedCodeError, code_entries, refusal_message
from hpctrain.deck.key import Section, key_name, table_class
from hpctrain.deck.runtime_choices import RuntimeChoices
from hpctrain.deck.sections.batch import Batch
from hpctrain.deck.sections.checkpoint import CheckpointSection
from hpctrain.deck.sections.communication import Communication
from hpctrain.deck.sections.data import Data
from hpctrain.deck.sections.evaluation import EvaluationSection
from hpctrain.deck.sections.layout import Layout
from hpctrain.deck.sections.learning_rate import LearningRateSection
from hpctrain.deck.sections.machine import Machine
from hpctrain.deck.sections.memory import Memory
from hpctrain.deck.sections.model import Model
from hpctrain.deck.sections.objective import POLICY_KINDS, ObjectiveSection
from hpctrain.deck.sections.optimizer import OptimizerSection
from hpctrain.deck.sections.policy import PolicySection
from hpctrain.deck.sections.precision import PrecisionSection
from hpctrain.deck.sections.report import ReportSection
from hpctrain.deck.sections.run import RunSection
from hpctrain.deck.sections.stability import Stability
from hpctrain.deck.sources import Sources


class Deck(Section):
    """A whole deck: the only description of a run. Read with `hpctrain.deck.read`."""

    run: RunSection
    model: Model
    data: Data
    objective: ObjectiveSection
    policy: PolicySection
    evaluation: EvaluationSection
    layout: Layout
    batch: Batch
    optimizer: OptimizerSection
    learning_rate: LearningRateSection
    precision: PrecisionSection
    memory: Memory
    communication: Communication
    checkpoint: CheckpointSection
    stability: Stability
    machine: Machine
    report: ReportSection

    _sources: Sources = PrivateAttr(default_factory=Sources)
    _runtime_choices: RuntimeChoices = PrivateAttr(default_factory=RuntimeChoices)

    def model_post_init(self, context: Any) -> None:
        """Store the `Sources` that were given as the context of the validation. Pydantic calls this."""
        if isinstance(context, Sources):
            self._sources = context

    @property
    def sources(self) -> Sources:
        """Places in which the keys were given, for messages. Copies that `with_keys` makes keep them."""
        return self._sources

    @property
    def runtime_choices(self) -> RuntimeChoices:
        """Choices that depend on measurements; changed copies of the deck keep them."""
        return self._runtime_choices

    @property
    def untrusted_code(self) -> frozenset[CodeEntry]:
        """Code that the deck names but may not call; empty if it may call all of its code.

        Only a stored deck has such code. Rewards are left out if the objective uses none, for example if a
        policy is only evaluated.
        """
        policy = ("policy",) if self.objective.kind in POLICY_KINDS else ()
        return self._untrusted_in("model", "data", *policy)

    def code(self, target: str) -> NamedCode:
        """Return the function or class that a key names, with the decision whether it may be called.

        It may be called only if all code that the deck names may be called. Nothing is imported, checked or
        raised: `import_function` does that.

        Args:
            target: Value of the key in this deck, where paths of files are absolute, such as
                "/home/me/train.py:build".
        """
        untrusted = self._untrusted_in("model", "data", "policy")
        return NamedCode(target, refusal_message(untrusted, self.sources.name) if untrusted else "")

    def _untrusted_in(self, *names: str) -> frozenset[CodeEntry]:
        trusted = self.sources.trusted_code
        if trusted is None:
            return frozenset()
        sections = {name: vars(getattr(self, name)) for name in names}
        return code_entries(sections, self.sources.name) - trusted

    def with_runtime_choices(self, choices: RuntimeChoices) -> Deck:
        """Return a copy of the deck whose `runtime_choices` are replaced by `choices`, all of them.

        The keys stay the same, and the copy equals the deck. `deck_text` does not write the choices. To
        change single choices, pass `replace(deck.runtime_choices, ...)`.
        """
        changed = self.model_copy()
        changed._runtime_choices = choices
        return changed

    def value(self, name: str) -> object:
        """Return the value of a key by its full name, such as "optimizer.muon.momentum".

        The result is the Section if the name is a table's. It is None if the deck does not have the table of
        the key; then the rest of the name is not checked.

        Raises:
            KeyError: A table that the deck has, or the deck itself, has no such key.
        """
        value: object = self
        for part in name.split("."):
            if value is None:
                return None
            kind = type(value)
            assert issubclass(kind, BaseModel)
            attributes = {key_name(each, field): each for each, field in kind.model_fields.items()}
            value = getattr(value, attributes[part])
        return value

    def with_keys(self, **sections: Mapping[str, object] | Section) -> Deck:
        """Return a copy of the deck with other values of keys, or other sections. Nothing is checked.

        Sources and runtime choices stay, and no other keys follow the new values. A wrong name of a key
        raises no error and changes no key.

        Args:
            sections: By the name of the section, values of its keys, or a new section. Values replace only
                these keys, as in `Section.with_values`; a section replaces the whole one of the deck.

        Raises:
            AttributeError: Values are given for a section, or for a table in a section, that does not exist.
        """
        changed = {
            name: keys if isinstance(keys, Section) else getattr(self, name).with_values(keys)
            for name, keys in sections.items()
        }
        return self.model_copy(update=changed)

    def problem(self, name: str, sentence: str) -> str:
        """Return a message about a key, such as `deck.toml:14: layout.tensor = 3: must divide ...`.

        Nothing is raised or recorded.

        Args:
            name: Full name of the key.
            sentence: End of the message after the key and its value.

        Raises:
            KeyError: The deck has no such key, as for `value`.
        """
        return self.sources.sentence(name, self.value(name), sentence)


def require_trusted_code(deck: Deck, file: object) -> None:
    """Raise an error if a deck names code that it may not call; otherwise do nothing.

    Args:
        deck: Deck of a checkpoint or a run folder.
        file: Its file, which the message names.

    Raises:
        UntrustedCodeError: `deck.untrusted_code` is not empty.
    """
    if untrusted := deck.untrusted_code:
        raise UntrustedCodeError(refusal_message(untrusted, str(file)))


@cache
def sections() -> Mapping[str, type[Section]]:
    """Return the class of each section of a deck by name, in the order of the schema.

    Tables in sections, such as [optimizer.muon], are not among them: `tables` has all.
    """
    kinds = {name: field.annotation for name, field in Deck.model_fields.items()}
    return MappingProxyType(cast("dict[str, type[Section]]", kinds))


@cache
def tables() -> Mapping[str, type[Section]]:
    """Return the class of each table of a deck by full name, such as "optimizer" or "optimizer.muon".

    All sections are among them, also "evaluation", whose key `sets` holds the list of tables [[evaluation]].
    The class of the items of such a list has no name here. Each table comes before those in it. Tables that a
    deck need not have are included.
    """

    def within(name: str, kind: type[Section]) -> Iterator[tuple[str, type[Section]]]:
        yield name, kind
        for attribute, field in kind.model_fields.items():
            if (inner := table_class(field)) is not None:
                yield from within(f"{name}.{key_name(attribute, field)}", inner)

    return MappingProxyType(dict(each for name, kind in sections().items() for each in within(name, kind)))


@cache
def fields(table: str) -> Mapping[str, FieldInfo]:
    """Return the keys of a table, such as "optimizer" or "optimizer.muon", by their names in the deck.

    Raises:
        KeyError: The schema has no such table.
    """
    kind = tables()[table]
    return MappingProxyType({key_name(each, field): field for each, field in kind.model_fields.items()})


def field_of(key: str) -> FieldInfo | None:
    """Return pydantic's field of a key, or of a table in a section, by its full name; None if there is none.

    Full names are such as "model.adapters.rank" for a key and "model.adapters" for a table. A list of tables
    is a key, too: "evaluation.sets" is the list of the tables [[evaluation]]. There is no field for a section
    ("model", "evaluation"), for keys of tables in lists ("evaluation.sets.tokens"), for old names of keys,
    and for unknown names.
    """
    table, _, name = key.rpartition(".")
    return fields(table).get(name) if table in tables() else None
