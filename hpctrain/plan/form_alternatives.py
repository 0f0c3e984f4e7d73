"""Other forms of communication that a deck could use, as changes of the deck.

A form of communication is a compression of gradients, a kind of local steps, or a mode of parameter servers.
"""

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
"""Steps between two synchronizations of replicas, if the deck has no local steps."""

_EXACT: Mapping[str, object] = {
    "communication.compress": "none",
    "communication.warmup": 0,
    "communication.server": None,
    "layout.local_steps": None,
}
"""Values of keys with which gradients are summed exactly in every step."""

_WITH_WARMUP = frozenset({"onebit", "topk"})
"""Compressions whose papers begin with steps that sum exactly."""


def other_forms(deck: Deck, ranks: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each form of communication, and the `--set` arguments that select it.

    Exact sums come first. There is one form for each compression and each mode of servers that the schema
    has. With several data ranks, each kind of local steps follows, with one replica per data rank. Other keys
    that a form needs have the values that its paper recommends. The deck may not support all forms.
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
            warm_up = [f"communication.warmup={warm}"] if name in _WITH_WARMUP else []
            yield name, _changes(deck, [f"communication.compress={name}", *warm_up])
    for name in get_args(ServerTable.model_fields["mode"].annotation):
        yield f"server {name}", _changes(deck, [f"communication.server.mode={name}"])
    data = data_ranks(deck, ranks)
    if data == 1:
        return
    steps = deck.layout.steps_between_syncs
    local_steps = steps if steps > 1 else LOCAL_STEPS
    for name in get_args(LocalStepsTable.model_fields["outer"].annotation):
        table_values = [f"replicas={data}", f"steps={local_steps}", f"outer={name}"]
        yield (
            f"{name}, {local_steps} local steps",
            _changes(deck, [f"layout.local_steps.{each}" for each in table_values]),
        )


def _changes(deck: Deck, changes: Sequence[str]) -> tuple[str, ...]:
    """Return the given changes, after changes that remove all other forms of communication from the deck."""
    resets = []
    for key, value in _EXACT.items():
        is_changed = any(change.startswith((f"{key}=", f"{key}.")) for change in changes)
        if deck.value(key) != value and (value is None or not is_changed):
            resets.append(f"{key}={toml_value('none' if value is None else value)}")
    return (*resets, *changes)
