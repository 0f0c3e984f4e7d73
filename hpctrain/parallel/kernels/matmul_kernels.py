"""Kernels of a CPU for the products of a matrix, which agree up to rounding and differ in speed.

    MatmulKernel          torch's own choice of a library ("library")
    ├── OneDnn            oneDNN for fp32, which torch leaves to MKL ("onednn")
    ├── Fp32Kernel        16-bit operands converted to fp32 for another kernel ("fp32", "fp32-onednn")
    ├── SmallBatchKernel  a compiled function for a few rows, as in generation (small_batch.py)
    └── AuditedKernel     another kernel, with a check of its results (fault_checks/)

Which library is fastest depends on the processor: MKL uses AVX-512 on Intel's processors only, oneDNN on all.
On a processor without instructions for 16-bit numbers, their product takes longer than one in fp32.
`engine/choices/kernel_choice.py` measures the kernels and chooses; a `KernelTable` holds the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

PRODUCT_ELEMENTS = 1 << 22
"""Largest part of a product that is added at a time to a sum in another format.

torch converts a part before it adds it, to 17 MB of fp32. From 32 MB on the C library maps new memory each
time, and its page faults take four times as long as the sum.
"""

BLOCK_ROWS = 2048
"""Rows of a table that the CPU multiplies at a time."""

Pass = Literal["forward", "logits", "input_gradient", "weight_gradient"]

PassShape = tuple[Pass, int, int]
"""A pass, and the numbers of outputs and inputs of its matrix."""

PASSES: tuple[Pass, ...] = ("forward", "logits", "input_gradient", "weight_gradient")


class MatmulKernel:
    """Products of a matrix in all passes, by the library that torch chooses; interface of all kernels.

    Attributes:
        name: Name in the deck (`machine.products`) and in stored measurements.
        converts: True if it converts a 16-bit matrix to fp32, so it also takes one that is converted already.
    """

    name = "library"
    converts = False

    def is_available(self, storage: torch.dtype) -> bool:  # noqa: ARG002
        """Return True if this installation has the kernel for CPU operands of a format."""
        return True

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return inputs [..., k] times weight [n, k] transposed, with a bias [n] added: [..., n]."""
        return functional.linear(inputs, weight, bias)

    def logits(self, inputs: Tensor, table: Tensor) -> Tensor:
        """Return inputs [r, k] times a table [n, k] of many rows, transposed: [r, n].

        In fp32 on a CPU it multiplies blocks of the table, which takes two thirds of the time of one product:
        the library packs all of a transposed matrix before it multiplies.
        """
        if not inputs.is_cpu or inputs.dtype != torch.float32 or len(table) <= BLOCK_ROWS:
            return functional.linear(inputs, table)
        outputs = inputs.new_empty(len(inputs), len(table))
        for start in range(0, len(table), BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            torch.mm(inputs, table[part].t(), out=outputs[:, part])
        return outputs

    def input_gradient(self, output_gradient: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return output_gradient [..., n] times weight [n, k]: [..., k], in `out` if given."""
        return torch.matmul(output_gradient, weight, out=out)

    def add_weight_gradient(
        self, into: Tensor, output_gradient: Tensor, inputs: Tensor, overwrite: bool
    ) -> None:
        """Add output_gradient [m, n] transposed times inputs [m, k] to `into` [n, k].

        Args:
            into: Gradient buffer.
            output_gradient: Gradient of the output.
            inputs: Input of the layer.
            overwrite: True to overwrite `into` instead of adding to it.
        """
        left = output_gradient.t()
        if left.dtype == into.dtype:
            into.addmm_(left, inputs, beta=0 if overwrite else 1)
        elif not left.is_cpu and into.dtype == torch.float32:
            torch.addmm(into, left, inputs, into.dtype, beta=0 if overwrite else 1, out=into)
        else:
            rows = max(1, PRODUCT_ELEMENTS // inputs.shape[1])
            for target, part in zip(into.split(rows), left.split(rows), strict=True):
                _store(target, part @ inputs, overwrite)


class OneDnn(MatmulKernel):
    """Kernel of oneDNN for operands in fp32."""

    name = "onednn"

    @override
    def is_available(self, storage: torch.dtype) -> bool:
        available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        return available and storage == torch.float32

    @override
    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _onednn(inputs, weight, bias)

    @override
    def logits(self, inputs: Tensor, table: Tensor) -> Tensor:
        return _onednn(inputs, table)

    @override
    def input_gradient(self, output_gradient: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        product = _onednn(output_gradient, weight.t())
        return product if out is None else out.copy_(product)

    @override
    def add_weight_gradient(
        self, into: Tensor, output_gradient: Tensor, inputs: Tensor, overwrite: bool
    ) -> None:
        left, right = output_gradient.t(), inputs.t()
        rows = max(1, PRODUCT_ELEMENTS // inputs.shape[1])
        for target, part in zip(into.split(rows), left.split(rows), strict=True):
            _store(target, _onednn(part, right), overwrite)


class Fp32Kernel(MatmulKernel):
    """Kernel that converts 16-bit operands to fp32 and multiplies these by another kernel.

    Results are rounded once; a weight gradient that is added in fp32 is not rounded.

    Args:
        name: Name in the deck.
        inner: Kernel that multiplies in fp32.
    """

    converts = True

    def __init__(self, name: str, inner: MatmulKernel) -> None:
        self.name, self.inner = name, inner

    @override
    def is_available(self, storage: torch.dtype) -> bool:
        return storage in {torch.bfloat16, torch.float16} and self.inner.is_available(torch.float32)

    @override
    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = self.inner.forward(inputs.float(), weight.float(), None if bias is None else bias.float())
        return product.to(inputs.dtype)

    @override
    def logits(self, inputs: Tensor, table: Tensor) -> Tensor:
        return self.inner.logits(inputs.float(), table.float()).to(inputs.dtype)

    @override
    def input_gradient(self, output_gradient: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        product = self.inner.input_gradient(output_gradient.float(), weight.float())
        return product.to(output_gradient.dtype) if out is None else out.copy_(product)

    @override
    def add_weight_gradient(
        self, into: Tensor, output_gradient: Tensor, inputs: Tensor, overwrite: bool
    ) -> None:
        kernel = self.inner if into.dtype == torch.float32 else LIBRARY
        kernel.add_weight_gradient(into, output_gradient.float(), inputs.float(), overwrite)


LIBRARY = MatmulKernel()

ONEDNN = OneDnn()

KERNELS: Mapping[str, MatmulKernel] = MappingProxyType(
    {
        kernel.name: kernel
        for kernel in (
            LIBRARY,
            ONEDNN,
            Fp32Kernel("fp32", LIBRARY),
            Fp32Kernel("fp32-onednn", ONEDNN),
        )
    }
)
"""Kernels by their name in the deck. The first of those that are equally fast is chosen."""


@dataclass(eq=False)
class KernelTable:
    """Choice of a kernel for each pass of each matrix shape [n, k].

    Attributes:
        default: Kernel of matrices without an entry.
        reuse_converted: True to convert a constant matrix to fp32 only once. Only matrices that are always in
            memory allow this.
        chosen: Kernels by pass and shape.
        stored_choices: Names of the chosen kernels by the name of the measurement, for checkpoints.
        note: Origin of the choice, in words.
        constant_period: Number of the current period in which matrices do not change. None outside of such
            periods.
    """

    default: MatmulKernel = LIBRARY
    reuse_converted: bool = False
    chosen: dict[PassShape, MatmulKernel] = field(default_factory=dict)
    stored_choices: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    constant_period: int | None = field(default=None, init=False)
    _periods: int = field(default=0, init=False)

    def kernel_for(self, kind: Pass, outputs: int, inputs: int) -> MatmulKernel:
        """Return the kernel for a pass of a matrix [outputs, inputs]."""
        return self.chosen.get((kind, outputs, inputs), self.default)

    def reuses_converted(self, outputs: int, inputs: int) -> bool:
        """Return True if a 16-bit matrix [outputs, inputs] has an fp32 copy for several products."""
        kinds: tuple[Pass, ...] = ("forward", "logits", "input_gradient")
        return self.reuse_converted and any(self.kernel_for(kind, outputs, inputs).converts for kind in kinds)

    @contextmanager
    def constant_matrices(self) -> Iterator[None]:
        """Return a context in which no matrix changes, so that layers may reuse converted copies."""
        self._periods += 1
        self.constant_period = self._periods if self.reuse_converted else None
        try:
            yield
        finally:
            self.constant_period = None


def kernel_named(name: str, storage: torch.dtype) -> MatmulKernel:
    """Return the kernel of a name, or the library if the name is "auto" or the kernel is not available."""
    kernel = KERNELS.get(name, LIBRARY)
    return kernel if kernel.is_available(storage) else LIBRARY


def _store(into: Tensor, values: Tensor, overwrite: bool) -> None:
    if overwrite:
        into.copy_(values)
    else:
        into.add_(values)


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left [..., k] times right [n, k] transposed: [..., n]. oneDNN takes no empty operands."""
    if not left.numel() or not right.numel():
        return functional.linear(left, right, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product
