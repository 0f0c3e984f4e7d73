"""Bytes of linear layers and their adapters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch

from hpctrain.costs.layer_bytes import matmul_bytes
from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, SavedStorage, total
from hpctrain.costs.layer_bytes.matmul_bytes import gradient_bytes, stored_input
from hpctrain.model.part import Layer, matmuls_of
from hpctrain.parallel.tensor import MatmulLayer, SplitLinear


def saved_input(layer: SplitLinear, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what a linear layer saves of its input for the weight gradient."""
    rows, group = (sizes.tokens, None) if layer.split == "inputs" else (sizes.rows, layer.sequence_group)
    by_product = stored_input if layer.shared_input else matmul_bytes.saved_input
    return by_product(layer.product, rows, sizes, group)


def saved_by_adapter(layer: SplitLinear, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what the adapter of a linear layer saves: the values between its factors."""
    adapter = layer.adapter
    return [] if adapter is None else [sizes.features(len(adapter.adapted) * adapter.rank)]


@singledispatch
def deferred_operands(layer: MatmulLayer, sizes: ActivationSizes) -> int:
    """Return the bytes of the tensors that deferred weight gradients of a layer keep."""
    raise NotImplementedError(f"deferred_operands of {type(layer).__name__}")


@deferred_operands.register
def _operands_of_linear(layer: SplitLinear, sizes: ActivationSizes) -> int:
    rows = sizes.rows if layer.split == "replicated" else sizes.tokens
    gradient = gradient_bytes(layer.product, rows, sizes)
    plain = sizes.features(layer.product.shape[0]).bytes
    # The gradients of a split bias are deferred, too, and need the output gradient itself.
    of_biases = plain if layer.split == "outputs" and layer.biases and gradient < plain else 0
    return total(saved_input(layer, sizes)) + gradient + of_biases + 2 * total(saved_by_adapter(layer, sizes))


def planned_converted_bytes(layers: Iterable[Layer]) -> int:
    """Return the bytes of the weights that remain converted to fp32 after a step."""
    return sum(
        4 * outputs * inputs
        for product in matmuls_of(layers)
        for outputs, inputs in product.shapes
        if product.layer_context.products.kernels.reuses_converted(outputs, inputs)
    )
