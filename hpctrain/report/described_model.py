"""Comparison of the parameters in a checkpoint with the model that its stored deck describes."""

from __future__ import annotations

from hpctrain.checkpoint.checkpoint_index import CheckpointIndex
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.model.construction import bare_model
from hpctrain.model.part import parameter_list
from hpctrain.model.shape import ModelShape

_PREFIX = "/model/"


def require_described_model(structure: CheckpointIndex) -> None:
    """Check that a checkpoint contains the parameters that its stored deck describes.

    No command can load a checkpoint in which they differ. Checkpoints without a deck, without a vocabulary or
    of a user's module are not checked.

    Raises:
        InputOutputError: A parameter is missing, is not in the deck's model, or has another shape.
    """
    try:
        deck = stored_deck(structure.state, structure.path)
    except HpctrainError:
        return
    if deck.model.module is not None or deck.model.vocabulary is None:
        return
    stored = {
        name.removeprefix(_PREFIX): tuple(each.shape)
        for name, each in structure.datasets.items()
        if name.startswith(_PREFIX) and not structure.auxiliary_model(name)
    }
    model = bare_model(ModelShape.of(deck, deck.model.vocabulary))
    described = {each.shard.name: tuple(each.shard.shape) for each in parameter_list(model)}
    wrong = [
        f"{name} has shape {list(stored[name])}, but {list(described[name])} in the model of the deck"
        if name in stored and name in described
        else f"{name} is {'missing' if name not in stored else 'not in the model of the deck'}"
        for name in sorted(stored.keys() | described.keys())
        if stored.get(name) != described.get(name)
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more differ)" if len(wrong) > 1 else ""
        raise InputOutputError(f"{structure.path}: its deck describes another model: {wrong[0]}{more}")
