"""The forms of communication that a deck could have instead, as changes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from hpctrain.deck.check import data_ranks
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.communication import Communication
from hpctrain.deck.sections.local_steps import LocalStepsTable
from hpctrain.deck.sections.server import ServerTable
from hpctrain.deck.sources import toml_value

LOCAL_STEPS = 20
"""Steps of a replica between two meetings, where a deck does not say."""

_PLAIN: Mapping[str, object] = {
    "communication.compress": "none",
    "communication.warmup": 0,
    "communication.server": None,
    "layout.local_steps": None,
}
"""The keys by which all bits travel in every step, and tables that a deck leaves out for this."""

_WARMED = frozenset({"onebit", "topk"})
"""Forms whose papers begin with exact sums."""


def other_forms(deck: Deck, ranks: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each form by its name, exact sums first, with the `--set` arguments that make it of the deck.

    Forms of sums are those of the schema; with several data ranks also every way of local steps, a replica
    each. What a form does not do without is set as papers advise. Whether the deck can have it is not asked.
    """
    yield "exact", _changes(deck, [])
    warm = max(1, deck.run.steps // 4)
    form = deck.communication.compression
    own = [f"communication.warmup={deck.communication.warmup}"]
    if form is not None:
        table = f"communication.{deck.communication.compress}"
        own += [f"{table}.{key}={toml_value(value)}" for key, value in form.model_dump().items()]
    for name in get_args(Communication.model_fields["compress"].annotation):
        if name == deck.communication.compress != "none":
            yield name, _changes(deck, [f"communication.compress={name}", *own])
        elif name != "none":
            warm_up = [f"communication.warmup={warm}"] if name in _WARMED else []
            yield name, _changes(deck, [f"communication.compress={name}", *warm_up])
    for name in get_args(ServerTable.model_fields["mode"].annotation):
        yield f"server {name}", _changes(deck, [f"communication.server.mode={name}"])
    data = data_ranks(deck, ranks)
    if data == 1:
        return
    steps = deck.layout.steps_between_syncs
    local = steps if steps > 1 else LOCAL_STEPS
    for name in get_args(LocalStepsTable.model_fields["outer"].annotation):
        apart = [f"replicas={data}", f"steps={local}", f"outer={name}"]
        yield f"{name}, {local} local steps", _changes(deck, [f"layout.local_steps.{each}" for each in apart])


def _changes(deck: Deck, given: Sequence[str]) -> tuple[str, ...]:
    """These, after what takes the other forms of the deck back."""
    back = []
    for key, value in _PLAIN.items():
        is_given = any(change.startswith((f"{key}=", f"{key}.")) for change in given)
        if deck.value(key) != value and (value is None or not is_given):
            back.append(f"{key}={toml_value('none' if value is None else value)}")
    return (*back, *given)
