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
    """Return True if a search chooses any of these keys, because the deck does not give it."""
    given = {key for key, place in places.items() if not place.note}
    return not given.issuperset(set(keys) & set(SEARCH_KEYS))
