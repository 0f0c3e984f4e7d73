"""The layout of a run whose deck leaves it open: chosen by rank 0, the same on all ranks."""

from __future__ import annotations

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.plan.search.deck_search import chosen_layout, with_choice
from hpctrain.plan.search.layout_sentences import changed, choice
from hpctrain.plan.search.search_space import Values


def choose_layout(world: World, deck: Deck) -> tuple[Deck, str]:
    """The deck with the quickest layout that fits these ranks and their nodes, and what is to be said of it;
    itself where it says how it is laid out. Collective; HpctrainError on all ranks where none fits.
    """
    if not deck.layout.auto:
        return deck, ""
    found: tuple[Values, str] | None = None
    with world.agreement():
        if world.rank == 0:
            candidate, machine = chosen_layout(deck, world.size, world.local_size)
            told = choice(changed(deck, candidate.changes), candidate.seconds, machine.name)
            found = candidate.changes, told
    found = world.everyone.broadcast_object(found)
    assert found is not None
    changes, said = found
    with world.agreement():
        deck = with_choice(deck, changes, world.size)
    return deck, said
