"""Comparison of the parameters of a checkpoint with the model that its own deck describes."""

from __future__ import annotations

from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.checkpoint.structure import Structure
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.model.build import bare_model
from hpctrain.model.part import parameter_list
from hpctrain.model.shape import ModelShape

_PREFIX = "/model/"


def require_described_model(structure: Structure) -> None:
    """Raise InputOutputError if the deck of a checkpoint describes other parameters than the file has.

    No verb can read such a file. A file without a deck or vocabulary, or of a user's module, is not compared.
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
        if name.startswith(_PREFIX) and not structure.companion(name)
    }
    model = bare_model(ModelShape.of(deck, deck.model.vocabulary))
    described = {each.shard.name: tuple(each.shard.shape) for each in parameter_list(model)}
    wrong = [
        f"{name} has shape {list(stored[name])}, and by the deck {list(described[name])}"
        if name in stored and name in described
        else f"{name} is {'not in the deck' if name in stored else 'missing'}"
        for name in sorted(stored.keys() | described.keys())
        if stored.get(name) != described.get(name)
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more differ)" if len(wrong) > 1 else ""
        raise InputOutputError(f"{structure.path}: its deck describes another model: {wrong[0]}{more}")
