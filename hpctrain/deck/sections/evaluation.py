"""The section [[evaluation]]: evaluation sets apart from the training data, their metrics and their checks.

A deck file has a table `[[evaluation]]` for each set; `Deck` holds all of them in the key `evaluation.sets`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from hpctrain.deck.key import PathText, Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import Conflicts, Relations
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.text import control_problem, either, nearest

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

VALIDATION = "validation"
"""Name of the set that is the held-out part of the training data."""


class EvaluationSet(Section):
    """One evaluation set: a table [[evaluation]]."""

    name: str = key(
        'Name in log, metrics and checkpoint.keep_best, of letters, digits, ".", "_" and "-".', min_length=1
    )
    tokens: PathText = key(
        "Token file of `hpctrain prepare`, with the same tokenizer as data.tokens.", min_length=1
    )
    sequences: int | None = key(
        "Maximum number of sequences of one evaluation; they are the first ones of the file.",
        None,
        unit="sequences",
        derived="run.evaluate_sequences",
        ge=1,
    )


class EvaluationSection(Section):
    """Evaluation sets apart from the training data, each a table [[evaluation]]: name, tokens, sequences."""

    sets: Annotated[tuple[EvaluationSet, ...], Field(strict=False)] = key(
        "All evaluation sets, evaluated together with the held-out part (run.evaluate_every) and at the end.",
        (),
    )


_SETS = "evaluation.sets"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

RELATIONS: Relations = (
    Conflicts(_SETS, "data.dataset", because="they are token files", hint="use data.validation"),
)


NOTHING_EVALUATED = "requires an evaluation set (add data.validation = 0.01 or tables [[evaluation]])"
"""Message about a key that names an evaluation set of a deck without any."""


def evaluation_set_names(deck: Deck) -> list[str]:
    """Return the names of the deck's evaluation sets; empty if nothing is evaluated.

    The held-out part of the training data, "validation", comes first if `data.validation` is above 0.
    """
    return [VALIDATION] * bool(deck.data.validation) + [each.name for each in deck.evaluation.sets]


def monitored_set(deck: Deck) -> str:
    """Return the name of the evaluation set whose lowest loss counts; "" if the deck has no such set.

    It is the set of `checkpoint.keep_best`, or otherwise the first of `evaluation_set_names`.
    """
    return deck.checkpoint.keep_best or next(iter(evaluation_set_names(deck)), "")


def evaluation_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of a deck's evaluation sets, and of keys that depend on losses of such sets.

    These keys are run.evaluate_every, run.patience and checkpoint.keep_best. Token files are not read.
    """
    run, names = deck.run, evaluation_set_names(deck)
    if run.evaluate_every and not names:
        sentence = "requires held-out sequences, but data.validation is 0"
        sentence += " (use data.validation = 0.01, add tables [[evaluation]], or leave this key out)"
        yield DeckProblem("run.evaluate_every", sentence, ("data.validation", _SETS), for_new_decks=True)
    yield from _sets(deck)
    yield from _loss_dependent_keys(deck, names)


def _sets(deck: Deck) -> Iterator[DeckProblem]:
    sets = deck.evaluation.sets
    times = Counter(each.name for each in sets)
    earlier_names: set[str] = set()
    for number, each in enumerate(sets):
        at = (number, "name")
        if not _NAME.fullmatch(each.name):
            sentence = 'must have 1 to 64 characters that are letters, digits, ".", "_" or "-"'
            yield DeckProblem(_SETS, sentence, row=at)
        elif each.name == VALIDATION:
            sentence = "is the name of the part that data.validation holds out (use another name)"
            yield DeckProblem(_SETS, sentence, row=at)
        elif each.name in earlier_names and (count := times.pop(each.name, 0)):
            yield DeckProblem(_SETS, f"is the name of {count} sets (use a different name for each)", row=at)
        earlier_names.add(each.name)
        if problem := control_problem(each.tokens):
            yield DeckProblem(_SETS, problem, row=(number, "tokens"))


def _loss_dependent_keys(deck: Deck, names: list[str]) -> Iterator[DeckProblem]:
    """Yield the problems of keys that depend on losses of evaluation sets."""
    best, others = deck.checkpoint.keep_best, ("run.evaluate_every", "data.validation", _SETS)
    is_used = {"checkpoint.keep_best": best is not None, "run.patience": deck.run.patience > 0}
    for name in (name for name, used in is_used.items() if used):
        if not names:
            yield DeckProblem(name, NOTHING_EVALUATED, others)
        elif not deck.run.evaluate_every:
            sentence = (
                "compares evaluations, but the only one is at the end (set run.evaluate_every, such as 100)"
            )
            yield DeckProblem(name, sentence, others)
    if best is not None and names and best not in names:
        yield DeckProblem("checkpoint.keep_best", unknown_set_message(best, names), others)


def unknown_set_message(name: str, names: list[str]) -> str:
    """Return the end of a message about a name that is not the name of an evaluation set.

    Args:
        name: The wrong name.
        names: Names of all evaluation sets, at least one.
    """
    near = nearest(name, names)
    hint = f"did you mean {toml_value(near)}?" if near else f"use {either(list(map(toml_value, names)))}"
    return f"is not an evaluation set ({hint})"


TRAINING_LOSS = "loss"
"""Name of the training loss."""


_KINDS = ("perplexity", "bits_per_byte")


@dataclass(frozen=True)
class MetricName:
    """Name of a metric: its kind ("loss", ...), and the evaluation set, or "" for training.

    Attributes:
        evaluation_set: Name of the set; "" for training.
        kind: "loss", "perplexity" or "bits_per_byte".
    """

    evaluation_set: str = ""
    kind: str = "loss"

    @property
    def title(self) -> str:
        """Name in tables, such as "val bits/byte"; "loss" for the training loss."""
        return f"{self.evaluation_set} {self.kind.replace('_per_', '/')}".strip()


def parse_metric_name(deck: Deck, name: str) -> MetricName:
    """Return the metric that the value of the option `--figure` names.

    Args:
        deck: Deck of the run, with its evaluation sets.
        name: "loss" for the training loss, the name of a set for its loss, or that name with "/perplexity" or
            "/bits_per_byte". If a set is called "loss", the name means that set. Names of sets contain no
            "/".

    Raises:
        HpctrainError: A run of the deck has no such metric.
    """
    names = evaluation_set_names(deck)
    set_name, slash, kind = name.partition("/")
    if set_name in names and not slash:
        return MetricName(set_name)
    if set_name in names and kind in _KINDS:
        if deck.model.loss is None and deck.data.dataset is None:
            return MetricName(set_name, kind)
        raise HpctrainError(f"--figure {name}: requires text data (use {set_name} for the loss)")
    if name == TRAINING_LOSS:
        return MetricName()
    if not names:
        raise HpctrainError(f"--figure {name}: {NOTHING_EVALUATED}")
    if set_name in names:
        known = f"{set_name}, {' or '.join(f'{set_name}/{each}' for each in _KINDS)}"
        raise HpctrainError(f"--figure {name}: is not a metric of an evaluation set (use {known})")
    raise HpctrainError(f"--figure {name}: {unknown_set_message(set_name, names)}")
