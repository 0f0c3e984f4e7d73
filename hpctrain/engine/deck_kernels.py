"""Which kernels compute the products of a deck's layers, of what it says and of what was found for it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from hpctrain.deck.check import check_deck
from hpctrain.deck.runtime_choices import RuntimeChoices
from hpctrain.deck.schema import Deck
from hpctrain.engine.functions import functions_before
from hpctrain.engine.sizes import micro_batches
from hpctrain.errors import InputOutputError
from hpctrain.host.device import on_host
from hpctrain.model.precision import Precision
from hpctrain.parallel.kernel_times import MatmulPass
from hpctrain.parallel.kernels import KERNELS, LIBRARY, KernelTable, MatmulKernel, Matrix, Pass, kernel_named
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.vocabulary import chunk_rows

_WORDS: Mapping[Pass, str] = {
    "forward": "forward",
    "logits": "logits",
    "input_gradient": "input gradients",
    "weight_gradient": "weight gradients",
}
_PASSES = {words: kind for kind, words in _WORDS.items()}
_NAME = re.compile(r"([a-z ]{1,30}), (\w{1,10}), (\d{1,12}) x (\d{1,12}) x (\d{1,12})", re.ASCII)
_IN_16_BITS = " in 16 bits"


def name_of(measured: MatmulPass, deck: Deck) -> str:
    """What is measured, told by what decides what is quickest."""
    size = f"{measured.rows} x {measured.outputs} x {measured.inputs}"
    return f"{_WORDS[measured.kind]}{_sums(deck)}, {deck.precision.compute}, {size}"


def are_measured(deck: Deck, device: torch.device) -> bool:
    """Whether it is measured what computes products on a device."""
    return deck.machine.products == "auto" and deck.precision.compute != "fp8" and on_host(device)


def tokens_of(deck: Deck) -> int:
    """Of a micro-batch, on a rank."""
    return deck.batch.micro_size * deck.batch.sequence // deck.layout.context


def kernels_of(deck: Deck, device: torch.device, data: int) -> KernelTable:
    """The kernels of a deck on so many data ranks: those that were found for it, where it leaves it open."""
    storage = Precision.of(deck).product
    other = kernel_named(deck.machine.products, storage) if on_host(device) else LIBRARY
    keeps = deck.layout.zero < 3 and micro_batches(deck, data) > 1
    if not are_measured(deck, device):
        return KernelTable(other, keeps)
    return KernelTable(
        other, keeps, _chosen(deck, storage), deck.runtime_choices.kernels, deck.runtime_choices.kernels_note
    )


def _chosen(deck: Deck, storage: torch.dtype) -> dict[Matrix, MatmulKernel]:
    """By pass and shape what was found for the deck's formats and rows; where it was found for other rows
    alone, as may be in a plan, for the nearest number of them.
    """
    tokens = tokens_of(deck)
    nearest: dict[Matrix, tuple[int, MatmulKernel]] = {}
    for name, how in deck.runtime_choices.kernels.items():
        read, kernel = _read(name, deck), KERNELS[how]
        if read is None or not kernel.multiplies(storage):
            continue
        apart = min(abs(read.rows - each) for each in (tokens, chunk_rows(tokens, read.outputs, gpu=False)))
        if read.matrix not in nearest or apart < nearest[read.matrix][0]:
            nearest[read.matrix] = apart, kernel
    return {matrix: kernel for matrix, (_, kernel) in nearest.items()}


def matrix_of(name: str, deck: Deck) -> Matrix | None:
    """The pass and matrix of what was measured by that name; None where that is of other formats."""
    read = _read(name, deck)
    return None if read is None else read.matrix


def _read(name: str, deck: Deck) -> MatmulPass | None:
    """What was measured by that name, if it is of the deck's formats."""
    match = _NAME.fullmatch(name)
    kind = None if match is None else _PASSES.get(match[1].removesuffix(_IN_16_BITS))
    if match is None or kind is None:
        return None
    read = MatmulPass(kind, *map(int, match.groups()[2:]))
    return read if name == name_of(read, deck) else None


def _sums(deck: Deck) -> str:
    stored = deck.precision.gradients == "compute" and deck.precision.compute != "fp32"
    return _IN_16_BITS if stored else ""


def introduce_kernels(deck: Deck, kernels: KernelTable) -> list[str]:
    """What a run, or a plan, says of them, where there is anything to say."""
    if deck.machine.products != "auto":
        return [f'matrix products use "{deck.machine.products}" (machine.products)']
    if not kernels.chosen:
        return []
    passes = []
    for kind, words in _WORDS.items():
        counts = Counter(kernel.name for (each, *_), kernel in kernels.chosen.items() if each == kind)
        if counts:
            by = (f"{name}" + (f" ({count})" if len(counts) > 1 else "") for name, count in counts.items())
            passes.append(f"{words} {', '.join(by)}")
    return [f"matrix products use: {'; '.join(passes)} ({kernels.why})"]


def computed_by(groups: LayerContext) -> dict[str, str]:
    """What tells by what a run computes its "products" and "functions"."""
    kernels = groups.kernels
    choice = crc32(json.dumps(kernels.record, sort_keys=True).encode()) if kernels.record else None
    return {
        "products": kernels.other.name if choice is None else f"chosen {choice:08x}",
        "functions": f"compiled {groups.functions.record}" if groups.functions.compiled else "torch",
    }


def as_before(deck: Deck, before: Deck, state: Mapping[str, Any], path: Path) -> Deck:
    """Return the deck of a run that goes on, with what the run before it measured.

    That is the split of its pipeline, where the layout is the same, the kernels of its products, and whether
    its functions are compiled. Products are the library's, unless the deck says otherwise, where the run was
    begun when there was nothing to choose.

    Args:
        deck: Deck of the run that goes on.
        before: Deck of the run that wrote the checkpoint.
        state: State that the checkpoint stores.
        path: File of the checkpoint, for errors.

    Raises:
        InputOutputError: The state holds what no run of this deck can have measured.
    """
    is_same = deck.layout == before.layout and deck.model.layers == before.model.layers
    split = _stored_split(deck, state, path) if is_same else None
    found = RuntimeChoices(split, known_kernels(state.get("products")))
    deck = functions_before(deck.with_runtime_choices(found), before, state.get("compiled"))
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


MOST_KNOWN, LONGEST_NAME = 500, 1000
"""Choices that are kept of a processor, or of a run, and characters of a name."""


def known_kernels(found: object) -> dict[str, str]:
    """What of it may be choices by name: anybody may have written it."""
    rows = list(found.items())[-MOST_KNOWN:] if isinstance(found, Mapping) else []
    return {
        name: how
        for name, how in rows
        if isinstance(name, str) and isinstance(how, str) and how in KERNELS and len(name) <= LONGEST_NAME
    }
