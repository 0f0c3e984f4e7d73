"""Mesh of a run, and how its ranks communicate."""

from __future__ import annotations

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.rank_partition import require_no_dedicated_ranks
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.errors import HpctrainError


def make_mesh(deck: Deck, world: World) -> Mesh:
    """Return the mesh of a deck that has neither servers nor models on dedicated ranks. Collective.

    Raises:
        HpctrainError: On all ranks if the deck does not fit the world, or has such ranks.
    """
    if deck.communication.server is not None:
        sentence = 'is supported by `hpctrain run` and `hpctrain resume` only (expected "none" here)'
        raise HpctrainError(deck.problem("communication.server.mode", sentence))
    require_no_dedicated_ranks(deck, "is supported by `hpctrain run` and `hpctrain resume` only")
    transport = configure_communication(deck, world)
    return Mesh(world, axis_sizes(deck, world.size), transport=transport)


def configure_communication(deck: Deck, world: World) -> str:
    """Set how the world's ranks communicate, as the deck says, and return the transport's name. Collective.

    It is called before a mesh is made. It also sets up emulated nodes and links, and audits of messages.
    """
    keys = deck.communication
    if keys.emulate is not None and world.nodes > 1:
        sentence = f"requires all ranks on one machine, not on {world.nodes} nodes (leave it out)"
        raise HpctrainError(deck.problem("communication.emulate", sentence))
    world.sum_halves_natively(keys.half_sums == "native")
    world.emulate_nodes(keys.ranks_per_node)
    world.emulate_link(keys.link)
    if deck.stability.corruption == "off":
        world.decorate_transports(None)
    else:
        from hpctrain.audit.message_audit import audit_messages

        audit_messages(world, deck.stability.corruption)
    return keys.requested_transport
