"""Parameters that are not trained."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.shard import Parameter


def freeze(deck: Deck, world: World, models: Sequence[Transformer]) -> None:
    """Freeze what `model.frozen` names: no gradient, no weight decay, and so no update.

    HpctrainError on all ranks for a name that no parameter of the whole model has, and where one of several
    weights (or biases) that are one matrix in memory would be frozen without the others. Collective.
    """
    patterns = deck.model.frozen
    if not patterns:
        return
    leaves = [leaf for model in models for unit in model.units() for leaf in unit]
    used: set[str] = set()
    problems: list[str] = []
    left = False
    for leaf in leaves:
        for fused in (_of_dims(leaf, 2), _of_dims(leaf, 1)):
            for parameter in fused:
                matching = [p for p in patterns if fnmatchcase(parameter.shard.name, p)]
                used.update(matching)
                if matching:
                    parameter.requires_grad_(False)
                    parameter.decayed = False
            trained = [p.shard.name for p in fused if p.requires_grad]
            frozen = [p.shard.name for p in fused if not p.requires_grad]
            left = left or bool(trained)
            if trained and frozen:
                problems.append(
                    deck.problem(
                        "model.frozen", f"freezes {frozen[0]}, but not {trained[0]}, with which it is one"
                    )
                )
    found = world.everyone.all_gather_object([sorted(used), problems, left])
    everywhere = {name for names, _, _ in found for name in names}
    told = dict.fromkeys(problem for _, theirs, _ in found for problem in theirs)
    for pattern in patterns:
        if pattern not in everywhere:
            told[deck.problem("model.frozen", f'no parameter is called "{pattern}"')] = None
    if not told and not any(trained for _, _, trained in found):
        told[deck.problem("model.frozen", "leaves nothing to train")] = None
    if told:
        raise HpctrainError(list(told))


def _of_dims(leaf: Sequence[Parameter], dims: int) -> list[Parameter]:
    """A layer's matrices, or its vectors."""
    return [parameter for parameter in leaf if parameter.dim() == dims]
