"""The objective that a deck asks for."""

from __future__ import annotations

from hpctrain.deck.schema import Deck
from hpctrain.objective.next_token import NextToken
from hpctrain.objective.objective import Objective


def make_objective(deck: Deck) -> Objective:
    """The deck's objective."""
    return NextToken(deck.stability.z_loss)
