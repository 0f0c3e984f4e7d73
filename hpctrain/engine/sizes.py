"""How many ranks each axis of the mesh has."""

from __future__ import annotations

from hpctrain.comm.mesh import AXES
from hpctrain.deck.check_world import data_ranks
from hpctrain.deck.schema import Deck


def axis_sizes(deck: Deck, ranks: int) -> dict[str, int]:
    """Ranks along each axis; HpctrainError where the deck does not fit so many."""
    layout = deck.layout
    data = data_ranks(deck, ranks)
    sizes = dict.fromkeys(AXES, 1)
    return sizes | {
        "pipeline": layout.pipeline,
        "data": data,
        "context": layout.context,
        "tensor": layout.tensor,
    }
