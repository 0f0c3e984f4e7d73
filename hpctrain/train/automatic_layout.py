"""Choice of a layout for a deck that leaves it open (`layout.auto`)."""

from __future__ import annotations

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.plan.search.deck_search import chosen_layout, with_choice
from hpctrain.plan.search.layout_sentences import changed, choice
from hpctrain.plan.search.search_space import Values


def choose_layout(world: World, deck: Deck) -> tuple[Deck, str]:
    """Return the deck with the fastest layout that fits these ranks, and a sentence about it. Collective.

    A deck that sets its layout is returned as it is, with "".

    Raises:
        HpctrainError: No layout fits; raised on all ranks.
    """
    if not deck.layout.auto:
        return deck, ""
    shared: tuple[Values, str] | None = None
    with world.agreement():
        if world.rank == 0:
            candidate, machine = chosen_layout(deck, world.size, world.local_size)
            sentence = choice(changed(deck, candidate.changes), candidate.seconds, machine.name)
            shared = candidate.changes, sentence
    shared = world.everyone.broadcast_object(shared)
    assert shared is not None
    changes, sentence = shared
    with world.agreement():
        deck = with_choice(deck, changes, world.size)
    return deck, sentence
