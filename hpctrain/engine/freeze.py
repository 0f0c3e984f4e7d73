"""Parameters that are not trained."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.frozen import freeze_parameters, frozen_problems
from hpctrain.model.part import Part


def freeze(deck: Deck, world: World, models: Sequence[Part]) -> None:
    """Freeze what `model.frozen` names: no gradient, no weight decay, and so no update.

    HpctrainError on all ranks for a name that no parameter of the whole model has, and where one of several
    weights (or biases) that are one matrix in memory would be frozen without the others. Collective.
    """
    patterns = deck.model.frozen
    if not patterns:
        return
    found = world.everyone.all_gather_object(freeze_parameters(models, patterns))
    problems = frozen_problems(patterns, found)
    if problems:
        raise HpctrainError([deck.problem("model.frozen", problem) for problem in problems])
