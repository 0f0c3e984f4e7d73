"""Checks of gradient compression against the layout and the optimizer, and of its keys against each other."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.deck.check_local_steps import in_replicas
from hpctrain.deck.communication import TopKTable
from hpctrain.deck.optimizer import SgdTable
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value

_COMPRESS = ("communication.compress",)


def compression_problems(deck: Deck) -> list[DeckProblem]:
    """Return the problems of the gradient compression of a deck."""
    problems = list(_warmup(deck))
    if deck.communication.compression is not None:
        problems += [*_layout(deck), *_momentum(deck)]
    return problems


def _warmup(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of exact first steps in a run in which all steps are exact."""
    form = deck.communication.compression
    is_exact = form is None or (isinstance(form, TopKTable) and form.ratio == 1)
    if deck.communication.warmup and is_exact and not in_replicas(deck):
        why = "communication.topk.ratio = 1" if form else _form(deck)
        yield DeckProblem(
            "communication.warmup", f"has no effect with {why} (leave it out)", _COMPRESS, no_effect=True
        )


def _form(deck: Deck) -> str:
    return f"communication.compress = {toml_value(deck.communication.compress)}"


def _layout(deck: Deck) -> Iterator[DeckProblem]:
    layout = deck.layout
    if layout.zero > 1:
        sentence = (
            f"shards gradients, but {_form(deck)} needs complete gradients on each rank to keep what it "
            "does not send (0 or 1 would do)"
        )
        yield DeckProblem("layout.zero", sentence, _COMPRESS)
    elif layout.zero_group is not None:
        sentence = f"needs a second, exact sum between groups, which {_form(deck)} excludes (leave it out)"
        yield DeckProblem("layout.zero_group", sentence, (*_COMPRESS, "layout.zero"))


def _momentum(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of an optimizer whose momentum is kept by the compression."""
    keys, optimizer = deck.communication, deck.optimizer
    if keys.compress == "topk" and isinstance(optimizer.rule, SgdTable) and optimizer.rule.nesterov:
        sentence = (
            f"needs the same momentum on all ranks, but with {_form(deck)} each rank has its own until it "
            "sends it (false would do)"
        )
        yield DeckProblem("optimizer.sgd.nesterov", sentence, _COMPRESS)
    if keys.compress != "onebit":
        return
    if optimizer.name != "adamw":
        sentence = (
            f'must be "adamw" with {_form(deck)}, which sends the momentum of Adam in one bit per element'
        )
        yield DeckProblem("optimizer.name", sentence, _COMPRESS)
    if not keys.warmup:
        sentence = (
            f"must be 1 or more with {_form(deck)}: exact steps at the start determine the "
            "step size of each element for the rest of the run (a tenth of run.steps or more would do)"
        )
        yield DeckProblem("communication.warmup", sentence, _COMPRESS)
