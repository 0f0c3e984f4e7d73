"""How many replicas a run has on other ranks than before: fewer where one was lost, or more."""

from __future__ import annotations

from hpctrain.deck.check_local_steps import fitting_replicas, in_replicas
from hpctrain.deck.schema import Deck
from hpctrain.text import counted


def may_part(deck: Deck) -> bool:
    """Whether a deck is one of replicas, of which perhaps one is left."""
    return deck.layout.local_steps is not None and (in_replicas(deck) or deck.layout.steps_between_syncs > 1)


def with_ranks(deck: Deck, before: Deck, ranks_before: int, ranks: int) -> tuple[Deck, str]:
    """The deck with as many replicas as `ranks` make, and a sentence where these are others than its own.

    `before` is the deck of the run on `ranks_before` ranks: a replica's ranks stay as many. Where the ranks
    make no whole replicas the deck is as it was, and its check says what is wrong.
    """
    of_replica, rest = divmod(ranks_before, before.layout.replicas)
    if rest or not (may_part(deck) and may_part(before)):
        return deck, ""
    replicas, rest = divmod(ranks, of_replica)
    if rest or not replicas:
        return deck, ""
    deck, sentence = _with(deck, replicas, ranks)
    old = before.layout.replicas
    if sentence and replicas != old:
        origin = f"the optimizer state of one of the {old}" if old > 1 else "the one's optimizer state"
        sentence += f"; each goes on from the outer model, with {origin}"
    return deck, sentence


def begun_with(deck: Deck, ranks: int) -> tuple[Deck, str]:
    """As `with_ranks`, of a run that begins: with the most replicas, up to the deck's, that the ranks can be
    cut into.
    """
    model_ranks = deck.layout.pipeline * deck.layout.tensor * deck.layout.context
    if not may_part(deck) or ranks % model_ranks:
        return deck, ""
    fitting = fitting_replicas(deck, ranks // model_ranks, ranks // deck.layout.pipeline)
    return _with(deck, max((each for each in fitting if each <= deck.layout.replicas), default=1), ranks)


def _with(deck: Deck, replicas: int, ranks: int) -> tuple[Deck, str]:
    """The deck with so many replicas, and a sentence of it. A size of its batch stays as it is where the data
    ranks divide it, else that of a replica does.
    """
    layout, batch = deck.layout, deck.batch
    if replicas == layout.replicas:
        return deck, ""
    data = ranks // (layout.pipeline * layout.tensor * layout.context)
    sizes = {"global_size": batch.global_size, "ramp_from": batch.ramp_from}
    sentence = f"{counted(ranks, 'rank')} make{'s' * (ranks == 1)} {counted(replicas, 'replica')}"
    sentence += f", where layout.local_steps.replicas was {layout.replicas}"
    for name, size in sizes.items() if data else ():
        if size % (batch.micro_size * data):
            sizes[name] = size * replicas // layout.replicas
            sentence += f"; batch.{name} becomes {sizes[name]}, as much for each as before"
    given = {} if layout.data is None else {"data": data}
    return deck.with_keys(layout={"local_steps.replicas": replicas, **given}, batch=sizes), sentence
