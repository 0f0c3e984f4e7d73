"""Checks of what a deck refers to outside of itself.

These are token files, names of parameters (frozen, for Muon, or not in 8 bits), the file of a schedule, the
rates of a machine, and code of users. A run fails with the same errors when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.deck.check import data_ranks, world_problems
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schedules import SCHEDULE_NAMES
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.mixture import tokens_exist, tokens_key
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from hpctrain.data.token_files import Tokens


def reference_problems(
    deck: Deck, ranks: int | None = None, rates: bool = True, code: bool = False
) -> Iterator[DeckProblem]:
    """Yield all problems of what the deck refers to.

    A missing token file is no problem, since it may be made later. Modules that only some references need are
    imported only for these.

    Args:
        deck: The deck.
        ranks: Number of ranks of the run; None if unknown.
        rates: True to check the rates of the machine.
        code: True to also run the code of a user's module, and to check the checkpoint that its model starts
            from.

    Raises:
        HpctrainError: The code of a user has errors.
    """
    # A module that reads a reference is imported only if the deck has such a reference.
    if deck.data.dataset is None:
        tokens = (yield from _token_problems(deck)) if tokens_exist(deck) else []
        if deck.evaluation.sets:
            yield from _held_out_problems(deck, tokens)
    if code and deck.model.module is not None:
        _require_module(deck)
    if (
        deck.model.frozen
        or deck.model.adapters
        or deck.optimizer.name == "muon"
        or deck.precision.fp8_exclude
    ):
        yield from _pattern_problems(deck)
    if deck.layout.schedule not in SCHEDULE_NAMES:
        yield from _schedule_problems(deck, ranks)
    if deck.objective.kind in POLICY_KINDS and not deck.layout.auto:
        yield from _auxiliary_problems(deck, ranks)
    if rates and deck.machine.rates is not None:
        yield from _rate_problems(deck)


def _token_problems(deck: Deck) -> Generator[DeckProblem, None, Sequence[Tokens]]:
    """Yield the problems of token files. Return the files that could be opened."""
    from hpctrain.data.data_checks import token_problems
    from hpctrain.data.deck_tokens import open_entries

    key = tokens_key(deck)
    try:
        tokens = open_entries(deck)
    except HpctrainError as error:
        place = re.compile(rf"{key}(, |: | = {re.escape(str(deck.data.tokens))}: )")
        yield from (DeckProblem(key, place.sub("", problem, count=1)) for problem in error.problems)
        return []
    yield from token_problems(deck, tokens)
    return tokens


def _held_out_problems(deck: Deck, trained: Sequence[Tokens]) -> Iterator[DeckProblem]:
    from hpctrain.data.held_out import set_problems

    yield from set_problems(deck, trained[0].tokenizer_text if trained else None)


def _require_module(deck: Deck) -> None:
    """Raise HpctrainError if the code of a user's module or its checkpoint cannot be used."""
    from hpctrain.checkpoint.exchange.by_name import open_values
    from hpctrain.model.construction import architecture_of
    from hpctrain.objective.factory import make_objective

    problems: list[str] = []
    source = None if deck.model.source is None else Path(deck.model.source)
    checks: list[Callable[[], object]] = [lambda: architecture_of(deck, 2), lambda: make_objective(deck)]
    for check in checks:
        try:
            check()
        except HpctrainError as error:
            problems += error.problems
    if source is not None:
        try:
            if not source.exists():
                raise HpctrainError("there is no such file or folder")
            if source.suffix != ".h5":
                open_values(source)
        except HpctrainError as error:
            problems += [deck.problem("model.from", problem) for problem in error.problems]
    if problems:
        raise HpctrainError(list(dict.fromkeys(problems)))


def _pattern_problems(deck: Deck) -> Iterator[DeckProblem]:
    from hpctrain.engine.name_patterns import pattern_problems
    from hpctrain.model.construction import architecture_of

    yield from pattern_problems(deck, architecture_of(deck, deck.model.vocabulary or 2))


def _schedule_problems(deck: Deck, ranks: int | None) -> Iterator[DeckProblem]:
    from hpctrain.pipeline.deck_schedule import read_schedule_file, schedule_builder

    place = deck.problem("layout.schedule", "")
    try:
        if ranks is None or world_problems(deck, ranks):
            read_schedule_file(deck)
        else:
            schedule_builder(deck, data_ranks(deck, ranks))
    except HpctrainError as error:
        yield from (DeckProblem("layout.schedule", problem.removeprefix(place)) for problem in error.problems)


def _auxiliary_problems(deck: Deck, ranks: int | None) -> Iterator[DeckProblem]:
    """Yield the problems of the keys of a critic and of a reference model."""
    from hpctrain.deck.auxiliary_decks import critic_deck, reference_deck

    for key, own_deck in (("policy.critic", critic_deck), ("policy.reference", reference_deck)):
        try:
            own_deck(deck, ranks)
        except HpctrainError as error:
            yield from (DeckProblem(key, problem.removeprefix(f"{key}: ")) for problem in error.problems)


def _rate_problems(deck: Deck) -> Iterator[DeckProblem]:
    from hpctrain.plan.time.deck_rates import deck_rates

    place = deck.problem("machine.rates", "")
    try:
        deck_rates(deck)
    except HpctrainError as error:
        yield from (DeckProblem("machine.rates", problem.removeprefix(place)) for problem in error.problems)
