"""Choices of kernels and functions that a checkpoint stores, and how a resumed run uses them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

from hpctrain.deck.check import check_deck
from hpctrain.deck.runtime_choices import RuntimeChoices
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.function_choice import (
    LONGEST_RECORD,
    OTHER_BITS,
    RESUMED_RUN_USED,
    computed_by_torch,
)
from hpctrain.errors import InputOutputError
from hpctrain.parallel.kernels.choice_cache import known_kernels
from hpctrain.parallel.kernels.functions.layer_functions import LayerFunctions
from hpctrain.parallel.layer_context import LayerContext


def with_stored_choices(deck: Deck, before: Deck, state: Mapping[str, Any], path: Path) -> Deck:
    """Return the deck of a resumed run with the choices that its checkpoint stores.

    These are the split of the pipeline (if the layout is the same), the kernels of matrix products, and
    whether functions are compiled. A checkpoint from before kernels were chosen implies the library's.

    Args:
        deck: Deck of the resumed run.
        before: Deck of the run that wrote the checkpoint.
        state: State that the checkpoint stores.
        path: File of the checkpoint, for errors.

    Raises:
        InputOutputError: The state contains a split that does not fit the deck.
    """
    is_same = deck.layout == before.layout and deck.model.layers == before.model.layers
    split = _stored_split(deck, state, path) if is_same else None
    choices = RuntimeChoices(split, known_kernels(state.get("products")))
    deck = with_stored_functions(deck.with_runtime_choices(choices), before, state.get("compiled"))
    if "products" in state or "machine.products" in deck.sources.places:
        return deck
    return deck.with_keys(machine={"products": "library"})


def _stored_split(deck: Deck, state: Mapping[str, Any], path: Path) -> tuple[int, ...] | None:
    """Return the blocks of each part of the pipeline that a checkpoint stores, once they fit the deck."""
    if state.get("split") is None or isinstance(deck.layout.split, tuple):
        return None
    split = tuple(state["split"])
    for problem in check_deck(deck.with_keys(layout={"split": split})):
        if problem.key == "layout.split":
            stored = f"{path}: its state has an invalid split, {list(split)}"
            raise InputOutputError(f"{stored}: layout.split {problem.sentence}")
    return split


def with_stored_functions(deck: Deck, before: Deck, stored: object) -> Deck:
    """Return the deck of a resumed run with the record of the functions that the checkpoint's run used.

    If that run used torch's, they stay, unless the deck requires compiled functions and that run's deck did
    not, or `--set` requires them again.

    Args:
        deck: Deck of the resumed run.
        before: Deck of the checkpoint.
        stored: Record in the checkpoint.
    """
    choices = replace(deck.runtime_choices, compiled_record=record_of(stored))
    overridden = deck.sources.place("machine.compile").override is not None
    required = deck.machine.compile is True and (before.machine.compile is not True or overridden)
    if not choices.compiled_record and not required:
        why = "the resumed run did not compile them (--set machine.compile=true compiles them)"
        choices = replace(choices, functions=LayerFunctions(why))
    return deck.with_runtime_choices(choices)


def record_of(stored: object) -> str:
    """Return the record of functions that a checkpoint stores, from an object of any type."""
    if isinstance(stored, str):
        return stored[:LONGEST_RECORD]
    return "an earlier version's" if stored is True else ""


def computed_by(layer_context: LayerContext) -> dict[str, str]:
    """Return identifiers of the kernels that compute "products" and "functions", to compare runs."""
    kernels = layer_context.products.kernels
    choice = (
        crc32(json.dumps(kernels.stored_choices, sort_keys=True).encode()) if kernels.stored_choices else None
    )
    return {
        "products": kernels.default.name if choice is None else f"chosen {choice:08x}",
        "functions": f"compiled {layer_context.functions.library_checksums}"
        if layer_context.functions.compiled
        else "torch",
    }


def describe_functions(deck: Deck, functions: LayerFunctions) -> list[str]:
    """Return the lines in which a run on CPUs describes its functions."""
    if deck.machine.compile is False:
        warning = (
            "block functions are torch's (machine.compile = false); "
            f"{RESUMED_RUN_USED} compiled ones: {OTHER_BITS}"
        )
        return [warning] if deck.runtime_choices.compiled_record else []
    if functions.compiled:
        changed = f" ({functions.note})" if functions.note else ""
        others = computed_by_torch(deck)
        besides = f"; torch computes {', '.join(others)}" if others else ""
        return [f"block functions are compiled for this processor{changed}{besides}"]
    required = "machine.compile = true, but " if deck.machine.compile is True else ""
    return [f"{required}block functions are torch's: {functions.note}"] if functions.note else []
