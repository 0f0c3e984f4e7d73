"""Number of replicas, groups of data ranks with local steps, of a run on another number of ranks."""

from __future__ import annotations

from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.local_steps import fitting_replicas, has_outer_model
from hpctrain.text import counted


def may_diverge(deck: Deck) -> bool:
    """Return True if a deck has local steps with which replicas may diverge, even if only one is left.

    It is False without [layout.local_steps], and if that table has one replica, one step and no outer
    optimizer.
    """
    return deck.layout.local_steps is not None and (
        has_outer_model(deck) or deck.layout.steps_between_syncs > 1
    )


def fit_continued_replicas(deck: Deck, before: Deck, ranks_before: int, ranks: int) -> tuple[Deck, str]:
    """Return the deck of a continued run with as many replicas as its ranks form, and a message. Local.

    A replica is a group of data ranks of [layout.local_steps], and it keeps its number of ranks. With the
    number of replicas, `layout.data` and batch sizes that the new data ranks cannot divide change, too. The
    deck is returned unchanged if replicas cannot diverge (`may_diverge`), or if the ranks do not form whole
    replicas. The result is not checked; `check_world` does that.

    Args:
        deck: The deck of the continued run.
        before: The deck of the run so far.
        ranks_before: Number of ranks of the run so far. A valid deck with several replicas has neither
            parameter servers nor dedicated ranks.
        ranks: Number of ranks of the continued run.

    Returns:
        The deck, and a message for the log; "" if the number of replicas does not change.
    """
    of_replica, rest = divmod(ranks_before, before.layout.replicas)
    if rest or not (may_diverge(deck) and may_diverge(before)):
        return deck, ""
    replicas, rest = divmod(ranks, of_replica)
    if rest or not replicas:
        return deck, ""
    deck, sentence = _with(deck, replicas, ranks)
    old = before.layout.replicas
    if sentence and replicas != old:
        origin = f"the optimizer state of one of the {old} earlier ones" if old > 1 else "its optimizer state"
        sentence += f"; each replica continues from the outer model with {origin}"
    return deck, sentence


def fit_initial_replicas(deck: Deck, ranks: int) -> tuple[Deck, str]:
    """Return the deck of a new run with as many replicas as its ranks allow, and a message. Local.

    A replica is a group of data ranks of [layout.local_steps]. The number of replicas is at most that of the
    deck, and 1 if expert ranks do not fit. With it, `layout.data` changes, and batch sizes that the data
    ranks cannot divide change in proportion, rounded down, so that the run trains with smaller batches than
    the deck says. A deck whose replicas cannot diverge (`may_diverge`), or whose other axes do not fit the
    ranks, is returned unchanged. The result is not checked; `check_world` does that.

    Args:
        deck: The deck, which is not changed.
        ranks: Number of ranks of the run. A valid deck with several replicas has neither parameter servers
            nor dedicated ranks.

    Returns:
        The deck, and a message for the log; "" if the number of replicas does not change.
    """
    model_ranks = deck.layout.pipeline * deck.layout.tensor * deck.layout.context
    if not may_diverge(deck) or ranks % model_ranks:
        return deck, ""
    fitting = fitting_replicas(deck, ranks // model_ranks, ranks // deck.layout.pipeline)
    return _with(deck, max((each for each in fitting if each <= deck.layout.replicas), default=1), ranks)


def _with(deck: Deck, replicas: int, ranks: int) -> tuple[Deck, str]:
    """Return the deck with `replicas` replicas, and a message about the change, or "" if there is none.

    Batch sizes that are multiples of micro_size x data ranks do not change. Others change with the number of
    replicas, so that the batch size of each replica stays the same.
    """
    layout, batch = deck.layout, deck.batch
    if replicas == layout.replicas:
        return deck, ""
    data = ranks // (layout.pipeline * layout.tensor * layout.context)
    sizes = {"global_size": batch.global_size, "ramp_from": batch.ramp_from}
    sentence = f"{counted(ranks, 'rank')} form{'s' * (ranks == 1)} {counted(replicas, 'replica')}"
    sentence += f" instead of layout.local_steps.replicas = {layout.replicas}"
    for name, size in sizes.items() if data else ():
        if size % (batch.micro_size * data):
            sizes[name] = size * replicas // layout.replicas
            sentence += f"; batch.{name} becomes {sizes[name]}, the same for each replica"
    data_key = {} if layout.data is None else {"data": data}
    return deck.with_keys(layout={"local_steps.replicas": replicas, **data_key}, batch=sizes), sentence
