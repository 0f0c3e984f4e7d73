"""The table [communication.server], parameter servers, and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import HasEffectWith, Relations
from hpctrain.deck.sections.rank_partition import count_dedicated_ranks
from hpctrain.text import counted

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


class ServerTable(Section):
    """Servers own parameters and optimizer state; workers send them gradients."""

    mode: Literal["sync", "async", "stale"] = key(
        "When workers continue: all in the same step, each without waiting, or at most staleness steps ahead."
    )
    ranks: int = key("Number of servers, which are the first ranks.", 1, unit="ranks", ge=1)
    staleness: int = key(
        'Number of steps that the fastest worker may be ahead of the slowest (mode = "stale").',
        1,
        unit="steps",
        ge=0,
    )
    correction: Literal["none", "scale", "compensate"] = key(
        "Correction of stale gradients: divide the learning rate by the staleness, or add a "
        "compensation term.",
        "none",
    )
    compensation: float = key(
        'Weight of that term: squared gradient x change of the weights (correction = "compensate").',
        0.04,
        ge=0,
        le=1e6,
    )


_MODE, _STALENESS, _CORRECTION = (
    f"communication.server.{name}" for name in ("mode", "staleness", "correction")
)

RELATIONS: Relations = (
    HasEffectWith(_STALENESS, _MODE, ("stale",)),
    HasEffectWith(_CORRECTION, _MODE, ("async", "stale"), because="no gradient is stale"),
    HasEffectWith("communication.server.compensation", _CORRECTION, ("compensate",)),
)


def server_ranks(deck: Deck) -> int:
    """Return the number of ranks that are parameter servers; 0 without [communication.server]."""
    return 0 if deck.communication.server is None else deck.communication.server.ranks


def missing_worker_problem(deck: Deck, ranks: int) -> DeckProblem:
    """Return the problem of a run that has too few ranks for a worker. Whether it has is not checked here.

    Args:
        deck: A deck with parameter servers.
        ranks: Number of ranks of the run, which the message names.
    """
    need = server_ranks(deck) + count_dedicated_ranks(deck) + 1
    sentence = f"leaves no worker among {counted(ranks, 'rank')} (start {need} ranks or more)"
    return DeckProblem("communication.server.ranks", sentence, (_MODE,))


def server_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of a correction of stale gradients if no gradient is stale; at most one.

    That is mode = "stale" with staleness = 0. There is none without [communication.server].
    """
    keys = deck.communication.server
    if keys is not None and keys.mode == "stale" and not keys.staleness and keys.correction != "none":
        sentence = f"has no effect with {_STALENESS} = 0: no gradient is stale (leave it out)"
        yield DeckProblem(_CORRECTION, sentence, (_MODE, _STALENESS), no_effect=True)
