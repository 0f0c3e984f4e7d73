"""Rates of matrix products in the shapes of models, for all passes, by the kernels that runs choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.mesh import Mesh
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.deck_kernels import kernels_of
from hpctrain.engine.choices.kernel_choice import choose_kernels
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.host.device import on_host
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.kernels.matmul_kernels import KernelTable, Pass
from hpctrain.parallel.vocabulary import chunk_rows
from hpctrain.plan.calibrate.calibration_decks import variants
from hpctrain.plan.calibrate.clock import Clock
from hpctrain.plan.calibrate.operand_pool import OperandPool
from hpctrain.plan.calibrate.rate_fit import ProductTime
from hpctrain.plan.time.layer_seconds import layer_sizes
from hpctrain.plan.time.machine_rates import ProductPass


class ProductShape(NamedTuple):
    """Product of rows of tokens with a matrix [outputs, inputs].

    Attributes:
        rows: Number of rows.
        outputs: Number of outputs.
        inputs: Number of inputs.
        head: True for the output layer.
        biased: True if a bias is added.
    """

    rows: int
    outputs: int
    inputs: int
    head: bool
    biased: bool


class _OperandPools(NamedTuple):
    """Pools of activations, of matrices, and of sums of their gradients."""

    rows: OperandPool
    matrices: OperandPool
    sums: OperandPool


def measure_products(decks: Sequence[Deck], clock: Clock) -> list[ProductTime]:
    """Return the seconds of the matrix products of decks with one format. Collective."""
    kernels_of_shapes: dict[ProductShape, KernelTable] = {}
    world, meshes = clock.world, dict[int, Mesh]()
    for deck in decks:
        for variant, tokens, tensor in variants(deck, world.size):
            if tensor not in meshes:
                meshes[tensor] = Mesh(world, axis_sizes(variant, world.size))
            chosen_deck = choose_kernels(variant, world, meshes[tensor])
            kernels = kernels_of(chosen_deck, world.device, 1)
            for shape in shapes_of(variant, tokens, tensor, on_host(world.device)):
                kernels_of_shapes.setdefault(shape, kernels)
    largest = max(max(s.rows * s.inputs, s.rows * s.outputs, s.outputs * s.inputs) for s in kernels_of_shapes)
    formats = Precision.of(decks[0])
    group = meshes[1].group("data")
    matrix = max(s.outputs * s.inputs for s in kernels_of_shapes)
    operands = _OperandPools(
        OperandPool(formats.product, world.device, largest),
        OperandPool(formats.product, world.device, matrix, group),
        OperandPool(formats.gradient, world.device, matrix, group),
    )
    return [
        time
        for shape, kernels in kernels_of_shapes.items()
        for time in _passes(shape, kernels, operands, clock)
    ]


def shapes_of(deck: Deck, tokens: int, tensor: int, host: bool) -> Iterator[ProductShape]:
    """Yield the different matrix products of a deck on a number of tensor ranks."""
    assert deck.model.vocabulary is not None
    of_model = layer_sizes(ModelShape.of(deck, deck.model.vocabulary))
    layers = (each for layer in of_model for each in (layer, *layer.modules))
    for layer in dict.fromkeys(layers):
        for matrix in dict.fromkeys(layer.matrices):
            outputs = matrix.outputs // (tensor if matrix.split == "outputs" else 1)
            inputs = matrix.inputs // (tensor if matrix.split == "inputs" else 1)
            rows = chunk_rows(tokens, outputs, not host) if layer.is_last else tokens
            if matrix.experts == 1:
                yield ProductShape(rows, outputs, inputs, layer.is_last, matrix.biased)


def _passes(
    shape: ProductShape, kernels: KernelTable, memory: _OperandPools, clock: Clock
) -> Iterator[ProductTime]:
    m, n, k, head, biased = shape
    first: Pass = "logits" if head else "forward"
    kinds: tuple[ProductPass, ...] = ("forward", "input_gradient", "weight_gradient")
    if head:
        kinds = ("logits", "logits_input_gradient", "logits_weight_gradient")

    def forward() -> Tensor:
        kernel, inputs, weight = (
            kernels.kernel_for(first, n, k),
            memory.rows.take(m, k),
            memory.matrices.take(n, k),
        )
        if head:
            return kernel.logits(inputs, weight)
        return kernel.forward(inputs, weight, memory.rows.take(n) if biased else None)

    def input_gradient() -> Tensor:
        kernel, weight = kernels.kernel_for("input_gradient", n, k), memory.matrices.take(n, k)
        return kernel.input_gradient(memory.rows.take(m, n), weight)

    def weight_gradient() -> None:
        kernel, of_output = kernels.kernel_for("weight_gradient", n, k), memory.rows.take(m, n)
        kernel.add_weight_gradient(memory.sums.take(n, k), of_output, memory.rows.take(m, k), overwrite=False)
        if biased:
            memory.sums.take(n).add_(of_output.sum(0))

    passes: tuple[Callable[[], object], ...] = (forward, input_gradient, weight_gradient)
    with torch.no_grad():
        for kind, run, sizes in zip(kinds, passes, ((m, n, k), (m, k, n), (n, k, m)), strict=True):
            yield ProductTime(kind, *sizes, clock.seconds("products", run))
