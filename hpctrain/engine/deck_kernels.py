"""Kernels of the matrix products of a deck: names of measurements, stored choices, and their description."""

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
from hpctrain.engine.function_choice import with_stored_functions
from hpctrain.engine.mesh_sizes import micro_batches
from hpctrain.errors import InputOutputError
from hpctrain.host.device import on_host
from hpctrain.model.precision import Precision
from hpctrain.parallel.kernels.matmul_kernels import (
    KERNELS,
    LIBRARY,
    KernelTable,
    MatmulKernel,
    Matrix,
    Pass,
    kernel_named,
)
from hpctrain.parallel.kernels.timing import MatmulPass
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


def matmul_name(measured: MatmulPass, deck: Deck) -> str:
    """Return the name of a measured product: everything that decides which kernel is the fastest."""
    size = f"{measured.rows} x {measured.outputs} x {measured.inputs}"
    return f"{_WORDS[measured.kind]}{_sums(deck)}, {deck.precision.compute}, {size}"


def chooses_kernels(deck: Deck, device: torch.device) -> bool:
    """Return True if kernels for a device are chosen by measurement."""
    return deck.machine.products == "auto" and deck.precision.compute != "fp8" and on_host(device)


def micro_batch_tokens(deck: Deck) -> int:
    """Return the number of tokens of a micro-batch on one rank."""
    return deck.batch.micro_size * deck.batch.sequence // deck.layout.context


def kernels_of(deck: Deck, device: torch.device, data: int) -> KernelTable:
    """Return the kernels of a deck: those that were measured for it, if it does not name one.

    Args:
        deck: The deck.
        device: Device that computes.
        data: Number of data ranks.
    """
    storage = Precision.of(deck).product
    other = kernel_named(deck.machine.products, storage) if on_host(device) else LIBRARY
    keeps = deck.layout.zero < 3 and micro_batches(deck, data) > 1
    if not chooses_kernels(deck, device):
        return KernelTable(other, keeps)
    return KernelTable(
        other, keeps, _chosen(deck, storage), deck.runtime_choices.kernels, deck.runtime_choices.kernels_note
    )


def _chosen(deck: Deck, storage: torch.dtype) -> dict[Matrix, MatmulKernel]:
    """Return the measured kernels for the deck's formats, by pass and matrix.

    If there are several numbers of rows, as in a plan, the nearest one counts.
    """
    tokens = micro_batch_tokens(deck)
    nearest: dict[Matrix, tuple[int, MatmulKernel]] = {}
    for name, how in deck.runtime_choices.kernels.items():
        read, kernel = _read(name, deck), KERNELS[how]
        if read is None or not kernel.multiplies(storage):
            continue
        difference = min(
            abs(read.rows - each) for each in (tokens, chunk_rows(tokens, read.outputs, gpu=False))
        )
        if read.matrix not in nearest or difference < nearest[read.matrix][0]:
            nearest[read.matrix] = difference, kernel
    return {matrix: kernel for matrix, (_, kernel) in nearest.items()}


def matrix_of(name: str, deck: Deck) -> Matrix | None:
    """Return the pass and the matrix of a measurement's name, or None if it has other formats."""
    read = _read(name, deck)
    return None if read is None else read.matrix


def _read(name: str, deck: Deck) -> MatmulPass | None:
    """Return the product of a measurement's name, or None if it does not have the deck's formats."""
    match = _NAME.fullmatch(name)
    kind = None if match is None else _PASSES.get(match[1].removesuffix(_IN_16_BITS))
    if match is None or kind is None:
        return None
    read = MatmulPass(kind, *map(int, match.groups()[2:]))
    return read if name == matmul_name(read, deck) else None


def _sums(deck: Deck) -> str:
    stored = deck.precision.gradients == "compute" and deck.precision.compute != "fp32"
    return _IN_16_BITS if stored else ""


def describe_kernels(deck: Deck, kernels: KernelTable) -> list[str]:
    """Return the lines in which a run or a plan describes its kernels; empty if it uses the default."""
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
    """Return identifiers of the kernels that compute "products" and "functions", to compare runs."""
    kernels = groups.products.kernels
    choice = crc32(json.dumps(kernels.record, sort_keys=True).encode()) if kernels.record else None
    return {
        "products": kernels.default.name if choice is None else f"chosen {choice:08x}",
        "functions": f"compiled {groups.functions.record}" if groups.functions.compiled else "torch",
    }


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


MOST_KNOWN, LONGEST_NAME = 500, 1000
"""Largest number of stored choices of a processor or run, and length of a name."""


def known_kernels(stored: object) -> dict[str, str]:
    """Return the valid choices of a stored object, by name. It may come from a file that anybody wrote."""
    rows = list(stored.items())[-MOST_KNOWN:] if isinstance(stored, Mapping) else []
    return {
        name: how
        for name, how in rows
        if isinstance(name, str) and isinstance(how, str) and how in KERNELS and len(name) <= LONGEST_NAME
    }
