"""The forms of communication that a deck could have instead, as changes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from hpctrain.deck.check_world import data_ranks
from hpctrain.deck.communication import Communication
from hpctrain.deck.schema import Deck, Layout
from hpctrain.deck.sources import toml_value

LOCAL_STEPS = 20
"""Steps of a replica between two meetings, where a deck does not say."""

_KEPT = frozenset({"transport", "bucket_bytes", "check", "emulate", "ranks_per_node"})
"""Keys of [communication] that say how calls are made, not what is sent."""

PLAIN = {name: field.default for name, field in Communication.model_fields.items() if name not in _KEPT}
"""The keys by which all bits travel in every step."""


_OF_SUMS = ("rank", "ratio", "warmup", "error_feedback", "compress_between")
"""Keys of a form of sums, which the deck's own keeps."""

_WARMED = frozenset({"onebit", "topk"})
"""Forms whose papers begin with exact sums."""


def other_forms(deck: Deck, ranks: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each form by its name, exact sums first, with the `--set` arguments that make it of the deck.

    Forms of sums are those of the schema; with several data ranks also every way of local steps, a replica
    each. What a form does not do without is set as papers advise. Whether the deck can have it is not asked.
    """
    replicas = ["layout.replicas=1"] if "replicas" in Layout.model_fields else []
    yield "exact", _changes(deck, replicas)
    warm = max(1, deck.run.steps // 4)
    warmed = (f"communication.warmup={warm}",)
    for name in get_args(Communication.model_fields["compress"].annotation):
        if name == deck.communication.compress != "none":
            own = (
                f"communication.{key}={toml_value(deck.value(f'communication.{key}'))}" for key in _OF_SUMS
            )
            yield name, _changes(deck, [*replicas, f"communication.compress={name}", *own])
        elif name != "none":
            warm_up = warmed if name in _WARMED else ()
            yield name, _changes(deck, [*replicas, f"communication.compress={name}", *warm_up])
    for name in get_args(Communication.model_fields["server"].annotation):
        if name != "none":
            yield f"server {name}", _changes(deck, [*replicas, f"communication.server={name}"])
    data = data_ranks(deck, ranks)
    if not replicas or data == 1:
        return
    steps = deck.value("communication.local_steps")
    local = steps if isinstance(steps, int) and steps > 1 else LOCAL_STEPS
    for name in get_args(Communication.model_fields["outer"].annotation):
        apart = [f"layout.replicas={data}", f"communication.local_steps={local}"]
        yield f"{name}, {local} local steps", _changes(deck, [*apart, f"communication.outer={name}"])


def _changes(deck: Deck, given: Sequence[str]) -> tuple[str, ...]:
    """These, and what takes the other keys of the deck back to what they are by themselves."""
    named = {change.partition("=")[0] for change in given}
    usual = {f"communication.{name}": value for name, value in PLAIN.items()}
    others = {name: value for name, value in usual.items() if name not in named and deck.value(name) != value}
    back = (f"{name}={'' if value is None else toml_value(value)}" for name, value in others.items())
    return (*back, *given)
