"""The forms of communication that a deck could have instead, as changes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from hpctrain.deck.check_world import data_ranks
from hpctrain.deck.communication import Communication
from hpctrain.deck.schema import Deck, Layout

LOCAL_STEPS = 20
"""Steps of a replica between two meetings, where a deck does not say."""

_PLAIN = ("communication.compress=none", "communication.warmup=0", "communication.error_feedback=true")


def other_forms(deck: Deck, ranks: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each form by its name, exact sums first, with the `--set` arguments that make it of the deck.

    Forms of sums are those of the schema; with several data ranks also every way of local steps, a replica
    each. What a form does not do without is set as papers advise. Whether the deck can have it is not asked.
    """
    apart = ("layout.replicas=1", "communication.local_steps=1") if "replicas" in Layout.model_fields else ()
    yield "exact", (*_PLAIN, *apart)
    warm = max(1, deck.run.steps // 4)
    more = {
        "onebit": (f"communication.warmup={warm}", "optimizer.clip=0"),
        "topk": (f"communication.warmup={warm}",),
    }
    for name in get_args(Communication.model_fields["compress"].annotation):
        if name != "none":
            changes = [f"communication.compress={name}", *more.get(name, ())]
            given = {change.partition("=")[0] for change in changes}
            plain = (change for change in _PLAIN if change.partition("=")[0] not in given)
            yield name, (*plain, *apart, *changes)
    data = data_ranks(deck, ranks)
    if not apart or data == 1:
        return
    steps = deck.value("communication.local_steps")
    local = steps if isinstance(steps, int) and steps > 1 else LOCAL_STEPS
    for name in get_args(Communication.model_fields["outer"].annotation):
        changes = [f"layout.replicas={data}", f"communication.local_steps={local}"]
        yield f"{name}, {local} local steps", (*_PLAIN, *changes, f"communication.outer={name}")
