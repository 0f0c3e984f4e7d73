"""Bytes of the primitives that oneDNN compiles and caches for matrix products on a CPU.

oneDNN compiles a primitive for each matrix shape and each number of rows. It computes all products of 16-bit
matrices that are not converted, and fp32 products of the kernels that are named after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes
from hpctrain.costs.layer_bytes.mixture_bytes import padded_row_counts
from hpctrain.model.part import Layer
from hpctrain.parallel.experts.expert_layer import Experts
from hpctrain.parallel.kernels.matmul_kernels import Fp32Kernel, MatmulKernel, OneDnn, Pass
from hpctrain.parallel.matmul import Matmul

_MOST_PRODUCTS = 1024
"""Capacity of oneDNN's primitive cache by default."""

_PASSES: tuple[Pass, ...] = ("forward", "input_gradient", "weight_gradient")


def prepared_bytes(layers: Iterable[Layer], sizes: ActivationSizes, product_bytes: int) -> int:
    """Return the bytes of the primitives for the products of layers; 0 on a GPU.

    Args:
        layers: Layers of one rank.
        sizes: Sizes of a micro-batch on the rank.
        product_bytes: Bytes of one primitive, which do not depend on the size of the product.
    """
    if sizes.gpu:
        return 0
    products = {each for layer in layers for each in _prepared_products(layer, sizes)}
    of_experts = sum(1 for *_, row_count in products if row_count)
    other_count = len(products) - of_experts
    return product_bytes * (other_count + min(of_experts, _MOST_PRODUCTS))


def _prepared_products(layer: Layer, sizes: ActivationSizes) -> Iterator[tuple[Pass, int, int, int]]:
    """Yield the pass, outputs, inputs and row count (in units; 0 if it is fixed) of a layer's products."""
    for module in layer.modules():
        if isinstance(module, Experts):
            if sizes.itemsize > 2:
                continue
            for weight in (module.gate_up, module.down):
                _, *outputs, inputs = weight.shard.local
                for rows in range(padded_row_counts(module, sizes)):
                    yield from ((each, prod(outputs), inputs, rows + 1) for each in _PASSES)
        elif type(product := getattr(module, "product", None)) is Matmul:
            table = product.layer_context.products.kernels
            for each in _PASSES:
                if _prepares(table.kernel_for(each, *product.shape), sizes):
                    yield (each, *product.shape, 0)


def _prepares(kernel: MatmulKernel, sizes: ActivationSizes) -> bool:
    """Return True if oneDNN computes the products of a kernel."""
    inner = kernel.inner if isinstance(kernel, Fp32Kernel) else kernel
    return isinstance(inner, OneDnn) or (type(kernel) is MatmulKernel and sizes.itemsize == 2)
