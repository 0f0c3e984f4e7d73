"""The objective that a deck asks for."""

from __future__ import annotations

from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.objective.next_token import NextToken
from hpctrain.objective.objective import Objective
from hpctrain.objective.of_module import NextTokenOfLogits, users_loss


def make_objective(deck: Deck) -> Objective:
    """The deck's objective. HpctrainError where it names a function that is not to be found."""
    if deck.model.loss is not None:
        try:
            return users_loss(deck.model.loss)
        except HpctrainError as error:
            first, *frames = error.problems
            raise HpctrainError([deck.problem("model.loss", first), *frames]) from error
    if deck.model.module is not None:
        return NextTokenOfLogits(deck.stability.z_loss)
    return NextToken(deck.stability.z_loss)
