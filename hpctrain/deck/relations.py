"""Relations between two keys of a deck, from which the checks, their messages and the reference are made.

Each module of `sections/` lists the relations of its keys in `RELATIONS`. An entry is one relation, or a
tuple of relations of which only the first one that does not hold is reported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, cast, get_args, get_origin

from pydantic.fields import FieldInfo
from typing_extensions import override

from hpctrain.deck.key import Section, key_name, table_class
from hpctrain.deck.problem import DeckProblem, must_divide
from hpctrain.deck.sources import clipped, toml_value
from hpctrain.text import either

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

MOST_LISTED = 3
"""Largest number of values of a key that a message lists as allowed."""


class Above:
    """Set of the numbers above a bound."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and value > self.bound

    def condition(self, key: str) -> str:
        """Return the condition that a key has a value of this set in words, such as "layout.tensor above 1".

        Args:
            key: Full name of the key.
        """
        return f"{key} above {self.bound}"


class OtherThan:
    """Set of all values except some."""

    def __init__(self, *excluded: object) -> None:
        self.excluded = excluded

    def __contains__(self, value: object) -> bool:
        return value not in self.excluded

    def condition(self, key: str) -> str:
        """Return the condition that a key has a value of this set in words.

        An example is "communication.compress other than "none"". It is the key alone if only None is
        excluded, so that any value fulfills the condition.

        Args:
            key: Full name of the key.
        """
        return key if self.excluded == (None,) else f"{key} other than {_list(self.excluded)}"


GIVEN = OtherThan(None)
"""Values of a key that a deck may leave out, or of a key whose table it may leave out, if it does not."""

SectionType = TypeVar("SectionType", bound=Section)

Values = tuple[object, ...] | Above | OtherThan
"""Values of a key: some values, or all numbers above a bound, or all values except some."""


@dataclass(frozen=True)
class Relation(ABC):
    """Base class of all relations.

    Attributes:
        key: Full name of the key that a problem is reported for.
        other: Full name of the key that it depends on.
        because: Reason, as the end of a sentence after a colon; "" if the relation explains itself.
        further_keys: Further keys that a problem depends on.
        for_new_decks: True if a run that stored these values may continue.
    """

    key: str
    other: str
    because: str = field(default="", kw_only=True)
    further_keys: tuple[str, ...] = field(default=(), kw_only=True)
    for_new_decks: bool = field(default=False, kw_only=True)

    no_effect: ClassVar[bool] = False

    @abstractmethod
    def is_violated(self, deck: Deck) -> bool:
        """Return True if the relation does not hold in a deck.

        It always holds in a deck without the table of `key`. Without the table of `other`, the value of that
        key counts as None: `Requires` and `HasEffectWith` are violated unless they allow None, all others
        hold.
        """

    @abstractmethod
    def violation_text(self, deck: Deck) -> str:
        """Return the message about a deck in which the relation does not hold.

        It completes a sentence that begins with `key` and its value, such as "requires layout.zero = 3, but
        it is 0".
        """

    @property
    @abstractmethod
    def reference_phrase(self) -> str:
        """The relation in a few words for the reference of all keys, such as "requires layout.zero = 3".

        `key` itself is not named.
        """

    def reason(self) -> str:
        """Return `because` after a colon, such as ": experts have no biases"; "" if there is none."""
        return f": {self.because}" if self.because else ""


@dataclass(frozen=True)
class Divides(Relation):
    """Relation that the value of a key must divide that of another key without a remainder."""

    @override
    def is_violated(self, deck: Deck) -> bool:
        divisor, number = value_of(deck, self.key), value_of(deck, self.other)
        return isinstance(divisor, int) and isinstance(number, int) and number % divisor != 0

    @override
    def violation_text(self, deck: Deck) -> str:
        return must_divide(self.other, cast("int", deck.value(self.other)), cast("int", deck.value(self.key)))

    @property
    @override
    def reference_phrase(self) -> str:
        return f"must divide {self.other}"


@dataclass(frozen=True)
class AtMost(Relation):
    """Relation that the value of a key must not exceed that of another key.

    Attributes:
        below: True if the values must not be equal either.
    """

    below: bool = False

    @override
    def is_violated(self, deck: Deck) -> bool:
        value, limit = value_of(deck, self.key), value_of(deck, self.other)
        if not (isinstance(value, int | float) and isinstance(limit, int | float)):
            return False
        return value >= limit if self.below else value > limit

    @override
    def violation_text(self, deck: Deck) -> str:
        return f"must be {self._bound} {_text_of(deck, self.other)}{self.reason()}"

    @property
    @override
    def reference_phrase(self) -> str:
        return f"{self._bound} {self.other}"

    @property
    def _bound(self) -> str:
        return "below" if self.below else "at most"


@dataclass(frozen=True)
class Requires(Relation):
    """Relation that a key without its default value requires that another key has one of some values."""

    values: Values

    @override
    def is_violated(self, deck: Deck) -> bool:
        return value_of(deck, self.other) not in self.values and _is_changed(deck, self.key)

    @override
    def violation_text(self, deck: Deck) -> str:
        value = deck.value(self.other)
        instead = "is not given" if value is None else f"is {clipped(toml_value(value))}"
        joined = ", which" if value is None else ", but it"
        return f"requires {_condition(self.other, self.values)}{joined} {instead}{self.reason()}"

    @property
    @override
    def reference_phrase(self) -> str:
        return f"requires {_condition(self.other, self.values)}"


@dataclass(frozen=True)
class HasEffectWith(Relation):
    """Relation that a key has an effect only if another key has one of some values.

    This is a problem only if the user gave the key, not if a run stored it.
    """

    values: Values

    no_effect: ClassVar[bool] = True

    @override
    def is_violated(self, deck: Deck) -> bool:
        return value_of(deck, self.other) not in self.values and _is_changed(deck, self.key)

    @override
    def violation_text(self, deck: Deck) -> str:
        if isinstance(self.values, tuple) and (None in self.values or len(self.values) > MOST_LISTED):
            condition = f"with {_text_of(deck, self.other)}"
        else:
            condition = f"without {_condition(self.other, self.values)}"
        return f"has no effect {condition}{self.reason()} (leave it out)"

    @property
    @override
    def reference_phrase(self) -> str:
        if None in self.values:
            return f"has no effect with {self.other}"
        return f"has an effect only with {_condition(self.other, self.values)}"


@dataclass(frozen=True)
class Conflicts(Relation):
    """Relation that forbids some values of a key if another key has some value.

    Attributes:
        values: These values of the key; None for all but its default.
        other_values: These values of the other key; None for all but its default.
        hint: What would be right, without parentheses; "" for the values of the key that would fit.
    """

    values: Values | None = None
    other_values: Values | None = None
    hint: str = ""

    @override
    def is_violated(self, deck: Deck) -> bool:
        return _is_among(deck, self.key, self.values) and _is_among(deck, self.other, self.other_values)

    @override
    def violation_text(self, deck: Deck) -> str:
        return f"conflicts with {_text_of(deck, self.other)}{self.reason()}"

    @property
    @override
    def reference_phrase(self) -> str:
        subject = "" if self.values is None else _condition("", self.values).removeprefix(" = ")
        other = self.other if self.other_values is None else _condition(self.other, self.other_values)
        return f"{subject} conflicts with {other}".strip()


Relations = tuple[Relation | tuple[Relation, ...], ...]
"""Relations of a section. Of a tuple in it, only the first relation that does not hold is reported."""


def relation_problems(deck: Deck, relations: Relations) -> Iterator[DeckProblem]:
    """Yield a problem for each relation that does not hold in a deck, in the order of the relations.

    Of a tuple of relations, only the first one that does not hold is reported.
    """
    for entry in relations:
        chain = entry if isinstance(entry, tuple) else (entry,)
        if broken := next((each for each in chain if each.is_violated(deck)), None):
            sentence = broken.violation_text(deck)
            if isinstance(broken, Conflicts):
                sentence += _hint(deck, broken, relations)
            others = (broken.other, *broken.further_keys)
            yield DeckProblem(broken.key, sentence, others, broken.for_new_decks, broken.no_effect)


def flattened(relations: Relations) -> Iterator[Relation]:
    """Yield each relation one by one, also those in tuples, in their order."""
    for entry in relations:
        yield from entry if isinstance(entry, tuple) else (entry,)


def relations_text(key: str, relations: Relations) -> str:
    """Return the relations of a key as one sentence for the reference; "" if it has none.

    An example is "Requires layout.zero = 3." for memory.keep_gathered. Several relations are separated by
    semicolons.

    Args:
        key: Full name of the key.
        relations: Relations of all keys, such as `RELATIONS` of `hpctrain.deck.check`; those whose `key` is
            another one are left out.
    """
    objects: dict[str, list[str]] = {}  # what follows "conflicts with", or whole phrases
    for phrase in dict.fromkeys(each.reference_phrase for each in flattened(relations) if each.key == key):
        head, verb, rest = phrase.rpartition("conflicts with ")
        objects.setdefault(head + verb, []).append(rest)
    text = "; ".join(f"{verb}{(', ' if verb else '; ').join(rest)}" for verb, rest in objects.items())
    return f"{text[0].upper()}{text[1:]}." if text else ""


def value_of(deck: Deck, key: str) -> object:
    """Return the value of a key by its full name; None if the deck does not have its table.

    For the name of a table it is the Section. Unlike `Deck.value`, this checks the whole name against the
    schema, so that a wrong name in a relation is never overlooked.

    Raises:
        KeyError: The schema has no such key, also if the deck does not have its table.
    """
    value: object = deck
    for attribute in _path(type(deck), key)[0]:
        value = getattr(value, attribute, None)
    return value


def _is_changed(deck: Deck, key: str) -> bool:
    """Return True if the deck has the table of a key, and the key differs from its default.

    A default that follows from other keys counts as 0 or false here.
    """
    info, value = _path(type(deck), key)[1], value_of(deck, key)
    return value is not None and (bool(value) if info.is_required() else value != info.default)


def _is_among(deck: Deck, key: str, values: Values | None) -> bool:
    if values is None:
        return _is_changed(deck, key)
    value = value_of(deck, key)
    return value is not None and value in values


@cache
def _path(kind: type[Section], key: str) -> tuple[tuple[str, ...], FieldInfo]:
    """Return the attributes that lead from a deck to a key, and the field of the key."""
    path: tuple[str, ...] = ()
    for part in key.split("."):
        fields = {key_name(each, info): (each, info) for each, info in kind.model_fields.items()}
        attribute, info = fields[part]
        path, kind = (*path, attribute), table_class(info) or kind
    return path, info


def _text_of(deck: Deck, key: str) -> str:
    """Return a key with its value, or the name alone of a table or of a list of tables."""
    value = deck.value(key)
    if isinstance(value, Section):
        return f"[{key}]"
    if value is None or (
        isinstance(value, tuple) and any(isinstance(each, Section | dict) for each in value)
    ):
        return key
    return f"{key} = {clipped(toml_value(value))}"


def _condition(key: str, values: Values) -> str:
    return f"{key} = {_list(values)}" if isinstance(values, tuple) else values.condition(key)


def _list(values: Iterable[object]) -> str:
    return either([toml_value(value) for value in values if value is not None])


def _hint(deck: Deck, broken: Conflicts, relations: Relations) -> str:
    """Return what would fit instead of a value that conflicts with another key, in parentheses."""
    if broken.hint:
        return f" ({broken.hint})"
    path, info = _path(type(deck), broken.key)
    if get_origin(info.annotation) is Literal:
        choices = get_args(info.annotation)
    elif info.is_required() or (not info.default and not isinstance(info.default, int)):
        return " (leave it out)"
    else:
        choices = (info.default,)
    of_key = [each for each in flattened(relations) if each.key == broken.key]
    fitting = [
        choice
        for choice in choices
        if not any(each.is_violated(_with_value(deck, path, choice)) for each in of_key)
    ]
    return f" (use {_list(fitting)})" if fitting else ""


def _with_value(table: SectionType, path: tuple[str, ...], value: object) -> SectionType:
    """Return a copy of a table with another value of the key that these attributes lead to."""
    inner = value if len(path) == 1 else _with_value(getattr(table, path[0]), path[1:], value)
    return table.model_copy(update={path[0]: inner})
