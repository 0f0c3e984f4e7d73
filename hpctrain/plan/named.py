"""What a deck names outside of itself: token file, parameters that it freezes or gives to Muon, layers that
it leaves out of 8 bits, the file of its schedule, the rates of its machine.

A run refuses what does not fit at its start; this tells it beforehand, with the same sentences.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from hpctrain.deck.check_world import data_ranks, world_problems
from hpctrain.deck.problem import Problem
from hpctrain.deck.schedules import NAMES
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError


def named_problems(deck: Deck, ranks: int | None = None, rates: bool = True) -> Iterator[Problem]:
    """Everything in what the deck names that a run would refuse; a missing token file may still be made.

    `ranks`, where it is known, is that of the run. Without `rates` those of its machine are not looked at.
    """
    # What a deck does not name does not cost the import of what could read it.
    if deck.data.dataset is None and os.path.lexists(deck.data.tokens):
        yield from _tokens(deck)
    if deck.model.frozen or deck.optimizer.name == "muon" or deck.precision.fp8_exclude:
        yield from _patterns(deck)
    if deck.layout.schedule not in NAMES:
        yield from _schedule(deck, ranks)
    if rates and deck.machine.rates is not None:
        yield from _rates(deck)


def _tokens(deck: Deck) -> Iterator[Problem]:
    from hpctrain.data.fit import token_problems
    from hpctrain.data.tokens import TokenFile

    try:
        file = TokenFile(deck.data.tokens)
    except HpctrainError as error:
        named = f"data.tokens = {deck.data.tokens}: "
        yield from (Problem("data.tokens", problem.removeprefix(named)) for problem in error.problems)
    else:
        yield from token_problems(deck, file)


def _patterns(deck: Deck) -> Iterator[Problem]:
    from hpctrain.engine.patterns import pattern_problems
    from hpctrain.model.build import architecture_of

    yield from pattern_problems(deck, architecture_of(deck, deck.model.vocabulary or 2))


def _schedule(deck: Deck, ranks: int | None) -> Iterator[Problem]:
    from hpctrain.pipeline.wanted import make_schedule, schedule_of_file

    named = deck.problem("layout.schedule", "")
    try:
        if ranks is None or world_problems(deck, ranks):
            schedule_of_file(deck)
        else:
            make_schedule(deck, data_ranks(deck, ranks))
    except HpctrainError as error:
        yield from (Problem("layout.schedule", problem.removeprefix(named)) for problem in error.problems)


def _rates(deck: Deck) -> Iterator[Problem]:
    from hpctrain.plan.time.rates import deck_rates

    named = deck.problem("machine.rates", "")
    try:
        deck_rates(deck)
    except HpctrainError as error:
        yield from (Problem("machine.rates", problem.removeprefix(named)) for problem in error.problems)
