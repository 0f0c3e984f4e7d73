"""Kernels of the matrix products of a deck: names of measurements, stored choices, and their description."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch

from hpctrain.deck.schema import Deck
from hpctrain.engine.mesh_sizes import micro_batches
from hpctrain.host.device import on_host
from hpctrain.model.precision import Precision
from hpctrain.parallel.kernels.matmul_kernels import (
    KERNELS,
    LIBRARY,
    KernelTable,
    MatmulKernel,
    Pass,
    PassShape,
    kernel_named,
)
from hpctrain.parallel.kernels.timing import MatmulPass
from hpctrain.parallel.vocabulary import chunk_rows

_PASS_NAMES: Mapping[Pass, str] = {
    "forward": "forward",
    "logits": "logits",
    "input_gradient": "input gradients",
    "weight_gradient": "weight gradients",
}
_PASSES = {words: kind for kind, words in _PASS_NAMES.items()}
_NAME = re.compile(r"([a-z ]{1,30}), (\w{1,10}), (\d{1,12}) x (\d{1,12}) x (\d{1,12})", re.ASCII)
_IN_16_BITS = " in 16 bits"


def matmul_name(measured: MatmulPass, deck: Deck) -> str:
    """Return the name under which a deck stores the fastest kernel of a product.

    It consists of what determines the fastest kernel: the pass, the formats and the sizes.
    """
    size = f"{measured.rows} x {measured.outputs} x {measured.inputs}"
    return f"{_PASS_NAMES[measured.kind]}{_sum_suffix(deck)}, {deck.precision.compute}, {size}"


def measures_kernels(deck: Deck, device: torch.device) -> bool:
    """Return True if kernels for a device are chosen by measurement."""
    return deck.machine.products == "auto" and deck.precision.compute != "fp8" and on_host(device)


def micro_batch_tokens(deck: Deck) -> int:
    """Return the number of tokens of a micro-batch on one rank."""
    return deck.batch.micro_size * deck.batch.sequence // deck.layout.context


def kernels_of(deck: Deck, device: torch.device, data: int) -> KernelTable:
    """Return the table of the kernels that compute the matrix products of a run of the deck. Local.

    It has a single kernel if the deck names one, or if the device or the precision leaves no choice. Else it
    has the kernel of each product that `deck.runtime_choices` has stored after measurements.

    Args:
        deck: The deck.
        device: Device that computes.
        data: Number of data ranks.
    """
    storage = Precision.of(deck).product
    other = kernel_named(deck.machine.products, storage) if on_host(device) else LIBRARY
    keeps = deck.layout.zero < 3 and micro_batches(deck, data) > 1
    if not measures_kernels(deck, device):
        return KernelTable(other, keeps)
    return KernelTable(
        other,
        keeps,
        _measured_kernels(deck, storage),
        deck.runtime_choices.kernels,
        deck.runtime_choices.kernels_note,
    )


def _measured_kernels(deck: Deck, storage: torch.dtype) -> dict[PassShape, MatmulKernel]:
    """Return the measured kernels for the deck's formats, by pass and sizes.

    If there are several numbers of rows, as in a plan, the nearest one counts.
    """
    tokens = micro_batch_tokens(deck)
    nearest: dict[PassShape, tuple[int, MatmulKernel]] = {}
    for name, how in deck.runtime_choices.kernels.items():
        read, kernel = _parse_name(name, deck), KERNELS[how]
        if read is None or not kernel.is_available(storage):
            continue
        difference = min(
            abs(read.rows - each) for each in (tokens, chunk_rows(tokens, read.outputs, gpu=False))
        )
        if read.shape not in nearest or difference < nearest[read.shape][0]:
            nearest[read.shape] = difference, kernel
    return {shape: kernel for shape, (_, kernel) in nearest.items()}


def pass_shape_of_name(name: str, deck: Deck) -> PassShape | None:
    """Return the pass and the sizes of a measurement's name; None if it does not have the deck's formats."""
    read = _parse_name(name, deck)
    return None if read is None else read.shape


def _parse_name(name: str, deck: Deck) -> MatmulPass | None:
    """Return the product of a measurement's name, or None if it does not have the deck's formats."""
    match = _NAME.fullmatch(name)
    kind = None if match is None else _PASSES.get(match[1].removesuffix(_IN_16_BITS))
    if match is None or kind is None:
        return None
    read = MatmulPass(kind, *map(int, match.groups()[2:]))
    return read if name == matmul_name(read, deck) else None


def _sum_suffix(deck: Deck) -> str:
    stored = deck.precision.gradients == "compute" and deck.precision.compute != "fp32"
    return _IN_16_BITS if stored else ""


def describe_kernels(deck: Deck, kernels: KernelTable) -> list[str]:
    """Return the lines in which a run or a plan describes its kernels; empty if it uses the default."""
    if deck.machine.products != "auto":
        return [f'matrix products use "{deck.machine.products}" (machine.products)']
    if not kernels.chosen:
        return []
    passes = []
    for kind, words in _PASS_NAMES.items():
        counts = Counter(kernel.name for (each, *_), kernel in kernels.chosen.items() if each == kind)
        if counts:
            by = (f"{name}" + (f" ({count})" if len(counts) > 1 else "") for name, count in counts.items())
            passes.append(f"{words} {', '.join(by)}")
    return [f"matrix products use: {'; '.join(passes)} ({kernels.note})"]
