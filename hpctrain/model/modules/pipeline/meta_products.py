"""Grouped matrix products (`torch._grouped_mm`) on torch's device "meta"."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def grouped_products() -> Iterator[None]:
    """Let grouped matrix products, as of experts, run on "meta" in all dtypes inside the context.

    They run in all dtypes on a CPU, but only in bf16 on "meta".
    """
    library = torch.library.Library("aten", "IMPL")
    add_grouped_products(library)
    try:
        yield
    finally:
        library._destroy()


def add_grouped_products(library: torch.library.Library) -> None:
    """Add grouped matrix products on "meta" in all dtypes to a library of implementations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has a kernel for bf16 there
        library.impl("_grouped_mm", _meta_grouped_product, "Meta", allow_override=True)


def _meta_grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,  # noqa: ARG001
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a tensor on "meta" of the shape that `torch._grouped_mm` returns."""
    rows, columns = left.shape[-2], right.shape[-1]
    groups: tuple[int, ...] = ()  # rows of one matrix times matrices, or matrices times columns of one
    if left.dim() == right.dim():
        groups = (len(left),) if left.dim() == 3 or offs is None else (offs.numel(),)
    return left.new_empty((*groups, rows, columns), dtype=out_dtype or left.dtype)
