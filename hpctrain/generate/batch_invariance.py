"""Smallest number of rows from which on the bits of a row of a matrix product do not depend on their number.

For a few rows, libraries add in another order than for many rows, and are slow. Generation pads its passes to
this number of rows, so that a text does not depend on the other texts of its pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from hpctrain.model.transformer import Transformer
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.matmul_kernels import Fp32Kernel, Pass, PassShape
from hpctrain.parallel.kernels.small_batch import SmallBatchKernel, find_block_size
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.vocabulary import VocabularyHead

_PASS_OF_HEAD: Mapping[bool, Pass] = MappingProxyType({False: "forward", True: "logits"})
"""Matmul pass that generation uses, by whether the layer is the output layer."""

_TESTED_COUNTS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 33)
_MANY_ROWS = 128
_FEW_ROWS = 4
"""Row counts up to which several products are compared, since each has one output that reveals the order."""

_PRODUCTS_OF_FEW_ROWS = 4
"""Number of products that are compared for each of these row counts."""

_CANCELLING_FEATURES = 5


def min_invariant_rows(model: Transformer) -> int:
    """Return the number of rows from which on each row of a product has the bits of a large product.

    Each matrix is multiplied with different numbers of random rows. If a compiled function computes a few
    rows with the bits of a large product, it multiplies them from now on. If no tested number of rows is
    enough, the result is 64, and bits may differ. Collective over the tensor axis and the stages of the
    model.

    Args:
        model: The model, or this rank's part of it. Its kernels may be replaced.
    """
    counts: dict[object, int] = {}
    for layer in model.layers:
        for product_layer in layer.product_layers:
            product, is_head = product_layer.product, isinstance(product_layer, VocabularyHead)
            key = type(product), product.shape, is_head
            if key not in counts:
                _choose_small_batch_kernel(model, product, is_head)
                multiply: Callable[[Tensor], Tensor] = product.logits if is_head else product.forward
                device = model.layer_context.tensor.device
                counts[key] = _min_rows_of_product(multiply, product.weight(), model.dtype, device)
    of_ranks: list[int] = model.layer_context.tensor.all_gather_object(max(counts.values(), default=1))
    of_stages: list[int] = model.layer_context.pipeline.all_gather_object(max(of_ranks))
    return max(of_stages)


def _choose_small_batch_kernel(model: Transformer, product: Matmul, is_head: bool) -> None:
    """Let a compiled function multiply a few rows, if it gives them the bits of a large product in fp32."""
    functions, kernels, kind = (
        model.layer_context.functions,
        model.layer_context.products.kernels,
        _PASS_OF_HEAD[is_head],
    )
    kernel = kernels.kernel_for(kind, *product.shape)
    converts_to_fp32 = isinstance(kernel, Fp32Kernel)
    inner = kernel.inner if isinstance(kernel, Fp32Kernel) else kernel
    is_supported = type(product) is Matmul and (converts_to_fp32 or model.dtype == torch.float32)
    # The compiled function uses one thread, while libraries use all.
    if not is_supported or isinstance(inner, SmallBatchKernel) or torch.get_num_threads() > 1:
        return
    if not isinstance(functions, CompiledFunctions):
        return
    block = find_block_size(inner, functions, *product.shape, is_head)
    if block is not None:
        small = SmallBatchKernel(inner, functions, block)
        key: PassShape = (kind, *product.shape)
        kernels.chosen[key] = Fp32Kernel(kernel.name, small) if converts_to_fp32 else small


@torch.no_grad()
def _min_rows_of_product(
    multiply: Callable[[Tensor], Tensor], weight: Tensor, dtype: torch.dtype, device: torch.device
) -> int:
    """Return the number of rows from which on a product gives them the bits of a large product. Local.

    Args:
        multiply: Product of rows [m, k] with the matrix.
        weight: The matrix [n, k].
        dtype: Format of rows.
        device: Device of rows.
    """
    rows = rounding_test_rows(weight, _MANY_ROWS).to(device, dtype)
    large_product = multiply(rows)

    def has_bits_of_large(count: int) -> bool:
        starts = range(0, count * (_PRODUCTS_OF_FEW_ROWS if count <= _FEW_ROWS else 1), count)
        return all(
            torch.equal(multiply(rows[start:][:count].clone()), large_product[start:][:count])
            for start in starts
        )

    differing = [count for count in _TESTED_COUNTS if not has_bits_of_large(count)]
    return 1 << max(differing, default=0).bit_length()


def rounding_test_rows(weight: Tensor, count: int) -> Tensor:
    """Return random rows whose products with a matrix differ if terms are added in another order.

    Products of normal random numbers in 16 bits rarely do: a sum of 32 of them seldom loses a bit in fp32.
    The elements of these rows differ by powers of two, and their terms cancel in one output of each row, so
    that mostly rounding errors remain. The rows are the same ones each time.

    Args:
        weight: The matrix [n, k].
        count: Number of rows.

    Returns:
        Rows [count, k] in the format of the matrix, on the host.
    """
    generator = torch.Generator().manual_seed(0)
    outputs, features = weight.shape
    rows = torch.randn(count, features, generator=generator, dtype=torch.float64)
    rows *= torch.exp2(torch.randint(-6, 7, rows.shape, generator=generator))
    cancelled = weight[torch.arange(count, device=weight.device) * outputs // count].double().cpu()
    rows = rows.to(weight.dtype).double()
    for place in cancelled.abs().topk(min(_CANCELLING_FEATURES, features // 2)).indices.unbind(1):
        at = torch.arange(count), place
        rows[at] = 0.0
        needed = -(rows * cancelled).sum(1) / cancelled[at]
        rows[at] = needed.nan_to_num(0.0, 0.0, 0.0).to(weight.dtype).double()
    return rows.to(weight.dtype)
