"""Bytes of matrix products: operands that they save, and temporary bytes of their kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch

from hpctrain.comm.group import Group
from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, SavedStorage
from hpctrain.parallel.fp8.delayed_matmul import DelayedMatmul
from hpctrain.parallel.fp8.quantized_matmul import QuantizedMatmul
from hpctrain.parallel.kernels.matmul_kernels import (
    LIBRARY,
    PASSES,
    PRODUCT_ELEMENTS,
    Fp32Kernel,
    MatmulKernel,
    OneDnn,
)
from hpctrain.parallel.kernels.small_batch import SmallBatchKernel
from hpctrain.parallel.matmul import Matmul


@singledispatch
def saved_input(
    product: Matmul,
    rows: int,
    sizes: ActivationSizes,
    sequence_group: Group | None,  # noqa: ARG001
) -> list[SavedStorage]:
    """Return the most that `Matmul.forward_and_save` saves for `rows` rows, with `compact` true."""
    return [SavedStorage(rows * product.shape[1] * sizes.itemsize, sizes.itemsize)]


@saved_input.register
def _saved_quantized(
    product: QuantizedMatmul, rows: int, sizes: ActivationSizes, sequence_group: Group | None
) -> list[SavedStorage]:
    if not product.has_complete_blocks(rows, sequence_group):
        return stored_input(product, rows, sizes, sequence_group)
    features, scaling = product.shape[1], product.recipe.tokens.transposed
    height, width = scaling.blocks.counts((rows, features))
    size = 1 if scaling.as_bytes else 4
    return [SavedStorage(rows * features, 1, False), SavedStorage(height * width * size, size, False)]


stored_input = saved_input.dispatch(Matmul)
# With delayed scales, the first steps have no scales and need most.
saved_input.register(DelayedMatmul, stored_input)


@singledispatch
def gradient_bytes(product: Matmul, rows: int, sizes: ActivationSizes) -> int:
    """Return the most bytes of `Matmul.gather_gradient` for `rows` rows."""
    return rows * product.shape[0] * sizes.itemsize


@gradient_bytes.register
def _quantized_gradient_bytes(product: QuantizedMatmul, rows: int, sizes: ActivationSizes) -> int:
    return (
        rows * product.shape[0] * (1 if product.has_one_token_scale else sizes.itemsize)
        + 4 * product.has_one_token_scale
    )


gradient_bytes.register(DelayedMatmul, gradient_bytes.dispatch(Matmul))


@singledispatch
def product_workspace(product: Matmul, rows: int, sizes: ActivationSizes) -> int:
    """Return the most temporary bytes of a product of `rows` rows beside operands and results."""
    table = product.layer_context.products.kernels
    kernels = {table.kernel_for(kind, *product.shape) for kind in PASSES}
    return max(kernel_workspace(kernel, rows, *product.shape, sizes) for kernel in kernels)


@product_workspace.register
def _quantized_workspace(product: QuantizedMatmul, rows: int, sizes: ActivationSizes) -> int:
    # Both operands in 8 bits, their expansions if the device cannot multiply 8 bits, and the weight gradient.
    outputs, features = product.shape
    native = sizes.gpu and product.recipe.tokens.blocks.columns is None
    inputs, gradients, weights = rows * features, rows * outputs, outputs * features
    expanded_gradient = 0 if native else min(4, sizes.gradient_itemsize)
    expanded = 0 if native else sizes.itemsize
    weight_gradient = (1 + expanded_gradient) * (inputs + gradients) + sizes.gradient_itemsize * weights
    return max(weight_gradient, (1 + expanded) * (max(inputs, gradients) + weights))


@singledispatch
def kernel_workspace(
    kernel: MatmulKernel,  # noqa: ARG001
    rows: int,  # noqa: ARG001
    outputs: int,
    inputs: int,
    sizes: ActivationSizes,
) -> int:
    """Return the most temporary bytes of products of `rows` rows with a matrix [outputs, inputs]."""
    return gradient_workspace(outputs * inputs, sizes)


@kernel_workspace.register
def _onednn_workspace(kernel: OneDnn, rows: int, outputs: int, inputs: int, sizes: ActivationSizes) -> int:  # noqa: ARG001
    # The matrix, or for weight gradients both operands, in oneDNN's layout, and the product that is added.
    product = min(outputs * inputs, PRODUCT_ELEMENTS)
    return 4 * max(rows * inputs + outputs * inputs, rows * (inputs + outputs) + product)


@kernel_workspace.register
def _fp32_workspace(kernel: Fp32Kernel, rows: int, outputs: int, inputs: int, sizes: ActivationSizes) -> int:
    by = kernel.inner if sizes.gradient_itemsize == 4 else LIBRARY
    converted = 4 * (rows * outputs + rows * inputs + outputs * inputs)
    return converted + kernel_workspace(by, rows, outputs, inputs, replace(sizes, itemsize=4))


@kernel_workspace.register
def _small_batch_workspace(
    kernel: SmallBatchKernel, rows: int, outputs: int, inputs: int, sizes: ActivationSizes
) -> int:
    return kernel_workspace(kernel.inner, rows, outputs, inputs, sizes)


def gradient_workspace(elements: int, sizes: ActivationSizes) -> int:
    """Return the temporary bytes of a weight gradient that is added to a buffer in another format.

    They are the product itself, and on a CPU the product converted, since torch adds numbers of one format.
    """
    if sizes.itemsize == sizes.gradient_itemsize:
        return 0
    converted = 0 if sizes.gpu else sizes.gradient_itemsize
    return min(elements, PRODUCT_ELEMENTS) * (sizes.itemsize + converted)
