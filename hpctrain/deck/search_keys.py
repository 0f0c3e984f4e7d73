"""Keys that layout.auto, or a search, chooses if the deck does not give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpctrain.deck.sources import Place

SEARCH_KEYS = (
    "layout.tensor",
    "layout.sequence_parallel",
    "layout.context",
    "layout.context_form",
    "layout.expert",
    "layout.expert_tensor",
    "layout.pipeline",
    "layout.schedule",
    "layout.chunks",
    "layout.split",
    "layout.zero",
    "layout.zero_group",
    "batch.micro_size",
    "memory.recompute",
    "memory.activations",
    "memory.optimizer",
)
"""Full names of the keys."""


def is_left_to_search(places: Mapping[str, Place], keys: Iterable[str]) -> bool:
    """Return True if at least one of `keys` is among SEARCH_KEYS and the deck does not give it.

    Whether layout.auto is on, or a search follows at all, is left to the caller.

    Args:
        places: Places of the deck's keys by full name. A place with a `note` does not count as given, since
            the value is from a preset, from model.from or from another key.
        keys: Full names of keys.
    """
    explicit_keys = {key for key, place in places.items() if not place.note}
    return not explicit_keys.issuperset(set(keys) & set(SEARCH_KEYS))
