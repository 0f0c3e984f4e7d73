"""Number of ranks of each mesh axis, and of micro-batches of each data rank."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.comm.mesh import AXES
from hpctrain.deck.check import data_ranks
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError


def axis_sizes(deck: Deck, ranks: int) -> dict[str, int]:
    """Return the number of ranks of each mesh axis, for a model with experts also of their axes.

    Raises:
        HpctrainError: The deck does not fit this number of ranks.
    """
    if deck.layout.auto:
        raise HpctrainError(
            deck.problem("layout.auto", "is supported by run, resume, plan, deck and job only")
        )
    sizes = {axis: getattr(deck.layout, axis) for axis in AXES}
    return sizes | {"data": data_ranks(deck, ranks)} | expert_split(deck)


def expert_split(deck: Deck) -> dict[str, int]:
    """Return the numbers of ranks over which experts are spread, and that split each expert.

    The keys are "expert" and "expert_tensor", as in the `sizes` of a Mesh; empty if the model has no experts.
    """
    if not deck.model.experts:
        return {}
    return {"expert": deck.layout.expert, "expert_tensor": deck.layout.expert_tensor}


def micro_batches(deck: Deck, data: int) -> int:
    """Return the number of micro-batches of each of `data` data ranks in a step."""
    return -(-deck.batch.global_size // (deck.batch.micro_size * data))


def spans_nodes(nodes: Sequence[object], tensor: int) -> bool:
    """Return True if some tensor group has ranks on several nodes.

    Args:
        nodes: Node of each rank.
        tensor: Number of tensor ranks.
    """
    return any(len(set(nodes[first : first + tensor])) > 1 for first in range(0, len(nodes), tensor))
