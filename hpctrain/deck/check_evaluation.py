"""Checks of evaluation sets, and of keys that depend on evaluations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from hpctrain.deck.evaluation import VALIDATION
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.text import control_problem, either, nearest

_SETS = "evaluation.sets"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

NOTHING_EVALUATED = (
    "goes by evaluations, but nothing is evaluated (data.validation = 0.01 would be, or sets [[evaluation]])"
)
"""Message about a key that names an evaluation set of a deck without any."""


def set_names(deck: Deck) -> list[str]:
    """Return the names of the deck's evaluation sets, the held-out share first."""
    return [VALIDATION] * bool(deck.data.validation) + [each.name for each in deck.evaluation.sets]


def watched_set(deck: Deck) -> str:
    """Return the evaluation set whose lowest loss counts; "" if there is none."""
    return deck.checkpoint.keep_best or next(iter(set_names(deck)), "")


def evaluation_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of the evaluation sets of a deck. Token files are not read."""
    run, names = deck.run, set_names(deck)
    if run.evaluate_every and not names:
        sentence = "evaluates on held-out sequences, but data.validation = 0 holds none out"
        would = f"{sentence} (0.01 would, or [[evaluation]]; or leave the key out)"
        yield DeckProblem("run.evaluate_every", would, ("data.validation", _SETS), for_new_decks=True)
    yield from _sets(deck)
    yield from _followed(deck, names)


def _sets(deck: Deck) -> Iterator[DeckProblem]:
    sets = deck.evaluation.sets
    if sets and deck.data.dataset is not None:
        sentence = "are of token files, but data.dataset brings samples (data.validation holds some out)"
        yield DeckProblem(_SETS, sentence, ("data.dataset",))
    times = Counter(each.name for each in sets)
    told: set[str] = set()
    for number, each in enumerate(sets):
        at = (number, "name")
        if not _NAME.fullmatch(each.name):
            sentence = 'is no name of a set: it may have letters, digits, ".", "_" and "-" in it, 64 at most'
            yield DeckProblem(_SETS, sentence, row=at)
        elif each.name == VALIDATION:
            sentence = "is the share that data.validation holds out: a set has another name"
            yield DeckProblem(_SETS, sentence, row=at)
        elif each.name in told and (count := times.pop(each.name, 0)):
            yield DeckProblem(_SETS, f"{count} sets are called so: each has a name of its own", row=at)
        told.add(each.name)
        if problem := control_problem(each.tokens):
            yield DeckProblem(_SETS, problem, row=(number, "tokens"))


def _followed(deck: Deck, names: list[str]) -> Iterator[DeckProblem]:
    """Yield the problems of keys that depend on losses of evaluation sets."""
    best, others = deck.checkpoint.keep_best, ("run.evaluate_every", "data.validation", _SETS)
    asked = {"checkpoint.keep_best": best is not None, "run.patience": deck.run.patience > 0}
    for key in (key for key, wanted in asked.items() if wanted):
        if not names:
            yield DeckProblem(key, NOTHING_EVALUATED, others)
        elif not deck.run.evaluate_every:
            sentence = "compares evaluations, but there is one alone, at the end (run.evaluate_every = 100"
            yield DeckProblem(key, f"{sentence} makes more)", others)
    if best is not None and names and best not in names:
        yield DeckProblem("checkpoint.keep_best", unknown_set(best, names), others)


def unknown_set(name: str, names: list[str]) -> str:
    """Return the message about a name that is not the name of an evaluation set."""
    near = nearest(name, names)
    would = f"did you mean {toml_value(near)}?" if near else f"{either(list(map(toml_value, names)))} is"
    return f"names no set that is evaluated ({would})"
