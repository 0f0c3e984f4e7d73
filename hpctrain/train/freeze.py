"""Parameters that are not trained."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.frozen import freeze_parameters
from hpctrain.model.transformer import Transformer


def freeze(deck: Deck, world: World, models: Sequence[Transformer]) -> None:
    """Freeze what `model.frozen` names: no gradient, no weight decay, and so no update.

    HpctrainError on all ranks for a name that no parameter of the whole model has, and where one of several
    weights (or biases) that are one matrix in memory would be frozen without the others. Collective.
    """
    patterns = deck.model.frozen
    if not patterns:
        return
    frozen = freeze_parameters(models, patterns)
    problems = [
        deck.problem("model.frozen", f"freezes {one}, but not {other}, with which it is one")
        for one, other in frozen.torn
    ]
    found = world.everyone.all_gather_object([sorted(frozen.used), problems, frozen.left])
    everywhere = {name for names, _, _ in found for name in names}
    told = dict.fromkeys(problem for _, theirs, _ in found for problem in theirs)
    for pattern in patterns:
        if pattern not in everywhere:
            told[deck.problem("model.frozen", f'no parameter is called "{pattern}"')] = None
    if not told and not any(trained for _, _, trained in found):
        told[deck.problem("model.frozen", "leaves nothing to train")] = None
    if told:
        raise HpctrainError(list(told))
