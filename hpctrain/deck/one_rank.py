"""Deck of the same model for one rank."""

from __future__ import annotations

from hpctrain.deck.schema import Deck


def on_one_rank(deck: Deck) -> Deck:
    """Return the deck with a layout for one rank, or for data ranks only."""
    layout = {
        "data": None,
        "pipeline": 1,
        "schedule": "1f1b",
        "chunks": 1,
        "split": None,
        "tensor": 1,
        "context": 1,
        "expert": 1,
        "expert_tensor": 1,
        "sequence_parallel": False,
        "zero": 0,
        "zero_group": None,
        "local_steps": None,
    }
    return deck.with_keys(
        layout=layout,
        memory={"optimizer": "device", "parameters": "device"},
        run={"noise_scale_steps": 0},
    )
