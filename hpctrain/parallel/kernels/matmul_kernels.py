"""How a CPU computes the three products of a matrix: ways that agree to rounding, and differ in speed.

Which library is fastest depends on the processor: MKL leaves AVX-512 to Intel's own, oneDNN does not, and
where the processor has no instructions for 16-bit numbers, a product of these takes longer than one of the
same numbers in fp32. `engine/kernel_choice.py` measures and chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from hpctrain.parallel.activation_sizes import ActivationSizes

PRODUCT_ELEMENTS = 1 << 22
"""Of a product in another format than the sum to which it is added; a larger one comes in pieces.

torch converts a piece before it adds it: to 17 MB of fp32. From 32 MB on the C library maps memory anew each
time, and the faults of its pages take four times as long as the sum.
"""

BLOCK_ROWS = 2048
"""Rows of a table that the CPU multiplies by at a time."""

Pass = Literal["forward", "logits", "input_gradient", "weight_gradient"]

Matrix = tuple[Pass, int, int]
"""A pass of a matrix [outputs, inputs]: the pass, outputs, inputs."""

PASSES: tuple[Pass, ...] = ("forward", "logits", "input_gradient", "weight_gradient")


class MatmulKernel:
    """The library that torch itself takes, of operands as they are."""

    name = "library"
    converts = False
    """Whether it multiplies a matrix in 16 bits in fp32, and so gladly takes it in fp32."""

    def multiplies(self, storage: torch.dtype) -> bool:  # noqa: ARG002
        """Whether it is there, for operands of this format on a CPU."""
        return True

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., k] times [n, k] transposed, with a bias [n] added: [..., n]."""
        return functional.linear(inputs, weight, bias)

    def logits(self, inputs: Tensor, table: Tensor) -> Tensor:
        """As `forward`, of [r, k] and a table of many rows.

        In fp32 on the CPU block by block of the table, which takes two thirds of the time of one product: the
        library packs all of a transposed table before it multiplies.
        """
        if not inputs.is_cpu or inputs.dtype != torch.float32 or len(table) <= BLOCK_ROWS:
            return functional.linear(inputs, table)
        outputs = inputs.new_empty(len(inputs), len(table))
        for start in range(0, len(table), BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            torch.mm(inputs, table[part].t(), out=outputs[:, part])
        return outputs

    def input_gradient(self, output_gradient: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """[..., n] times [n, k]: [..., k], into `out` where there is one."""
        return torch.matmul(output_gradient, weight, out=out)

    def add_weight_gradient(self, into: Tensor, output_gradient: Tensor, inputs: Tensor, first: bool) -> None:
        """`into` [n, k] += output_gradient [m, n]^T inputs [m, k]; what was there counts not if `first`."""
        left = output_gradient.t()
        if left.dtype == into.dtype:
            into.addmm_(left, inputs, beta=0 if first else 1)
            return
        if not left.is_cpu and into.dtype == torch.float32:
            torch.addmm(into, left, inputs, into.dtype, beta=0 if first else 1, out=into)
            return
        rows = max(1, PRODUCT_ELEMENTS // inputs.shape[1])
        for some, part in zip(into.split(rows), left.split(rows), strict=True):
            if first:
                some.copy_(part @ inputs)
            else:
                some.add_(part @ inputs)

    def passing(self, rows: int, outputs: int, inputs: int, at: ActivationSizes) -> int:  # noqa: ARG002
        """Bytes that a product of so many rows and of a matrix [outputs, inputs] takes beside operands and
        results as stored: the one of the three that takes most.
        """
        return apart_bytes(outputs * inputs, at)


class OneDnn(MatmulKernel):
    """oneDNN, of operands in fp32: torch leaves these to MKL."""

    name = "onednn"

    @override
    def multiplies(self, storage: torch.dtype) -> bool:
        there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        return there and storage == torch.float32

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
    def add_weight_gradient(self, into: Tensor, output_gradient: Tensor, inputs: Tensor, first: bool) -> None:
        left, right = output_gradient.t(), inputs.t()
        rows = max(1, PRODUCT_ELEMENTS // inputs.shape[1])
        for some, part in zip(into.split(rows), left.split(rows), strict=True):
            if first:
                some.copy_(_onednn(part, right))
            else:
                some.add_(_onednn(part, right))

    def passing(self, rows: int, outputs: int, inputs: int, at: ActivationSizes) -> int:  # noqa: ARG002
        """See MatmulKernel: the matrix as it lays it out, or operands, and a product that is added."""
        product = min(outputs * inputs, PRODUCT_ELEMENTS)
        return 4 * max(rows * inputs + outputs * inputs, rows * (inputs + outputs) + product)


class Fp32Kernel(MatmulKernel):
    """Operands of 16 bits are converted to fp32, multiplied so, and results rounded once: what is added to
    sums in fp32 not at all.
    """

    converts = True

    def __init__(self, name: str, by: MatmulKernel) -> None:
        self.name, self.by = name, by

    @override
    def multiplies(self, storage: torch.dtype) -> bool:
        return storage in {torch.bfloat16, torch.float16} and self.by.multiplies(torch.float32)

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See MatmulKernel; the matrix, here and below, may be converted already."""
        product = self.by.forward(inputs.float(), weight.float(), None if bias is None else bias.float())
        return product.to(inputs.dtype)

    @override
    def logits(self, inputs: Tensor, table: Tensor) -> Tensor:
        return self.by.logits(inputs.float(), table.float()).to(inputs.dtype)

    @override
    def input_gradient(self, output_gradient: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        product = self.by.input_gradient(output_gradient.float(), weight.float())
        return product.to(output_gradient.dtype) if out is None else out.copy_(product)

    @override
    def add_weight_gradient(self, into: Tensor, output_gradient: Tensor, inputs: Tensor, first: bool) -> None:
        by = self.by if into.dtype == torch.float32 else LIBRARY
        by.add_weight_gradient(into, output_gradient.float(), inputs.float(), first)

    def passing(self, rows: int, outputs: int, inputs: int, at: ActivationSizes) -> int:
        """See MatmulKernel: operands and results in fp32, and what their product takes in passing."""
        by = self.by if at.gradient_itemsize == 4 else LIBRARY
        beside = by.passing(rows, outputs, inputs, replace(at, itemsize=4))
        return 4 * (rows * outputs + rows * inputs + outputs * inputs) + beside


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
"""By `machine.products`, and what is kept of measurements. Of those that take as long the first is chosen."""


class KernelTable:
    """Which kernel computes which pass of matrices of which shape [n, k]: what is chosen, or else `other`.

    `record` tells what was chosen by the names of what was measured, and `why` in words from what. With
    `keeps`, where matrices are whole all the time, one that is converted is so once for as long as it stays.
    """

    def __init__(
        self,
        other: MatmulKernel = LIBRARY,
        keeps: bool = False,
        chosen: Mapping[Matrix, MatmulKernel] | None = None,
        record: Mapping[str, str] | None = None,
        why: str = "",
    ) -> None:
        self.other, self.keeps = other, keeps
        self.chosen = {} if chosen is None else dict(chosen)
        self.record, self.why = {} if record is None else dict(record), why
        self.stays: int | None = None
        """A number for each time for which matrices stay what they are; None where they may change."""
        self._times = 0

    def of(self, kind: Pass, outputs: int, inputs: int) -> MatmulKernel:
        """What computes this pass of a matrix [outputs, inputs]."""
        return self.chosen.get((kind, outputs, inputs), self.other)

    def choose(self, kind: Pass, outputs: int, inputs: int, kernel: MatmulKernel) -> None:
        """Have this compute this pass of such a matrix from now on."""
        self.chosen[kind, outputs, inputs] = kernel

    def copies(self, outputs: int, inputs: int) -> bool:
        """Whether a matrix of that shape is kept converted for a step."""
        kinds: tuple[Pass, ...] = ("forward", "logits", "input_gradient")
        return self.keeps and any(self.of(kind, outputs, inputs).converts for kind in kinds)

    @contextmanager
    def constant_matrices(self) -> Iterator[None]:
        """Matrices stay what they are within."""
        self._times += 1
        self.stays = self._times if self.keeps else None
        try:
            yield
        finally:
            self.stays = None

    def passing(self, rows: int, outputs: int, inputs: int, at: ActivationSizes) -> int:
        """Bytes that the products of so many rows and of a matrix of that shape take in passing."""
        kernels = {self.chosen.get((kind, outputs, inputs), self.other) for kind in PASSES}
        return max(kernel.passing(rows, outputs, inputs, at) for kernel in kernels)


def kernel_named(name: str, storage: torch.dtype) -> MatmulKernel:
    """The kernel that `machine.products` names for operands of a format; the library where it names none, or
    one that is not there.
    """
    kernel = KERNELS.get(name, LIBRARY)
    return kernel if kernel.multiplies(storage) else LIBRARY


def apart_bytes(elements: int, at: ActivationSizes) -> int:
    """What the product for a weight's gradient takes beside a sum in another format to which it is added:
    itself, and on a CPU, where torch adds what is of one format, converted.
    """
    if at.itemsize == at.gradient_itemsize:
        return 0
    converted = 0 if at.gpu else at.gradient_itemsize
    return min(elements, PRODUCT_ELEMENTS) * (at.itemsize + converted)


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., k] times [n, k] transposed: [..., n]; of no elements by torch, as it takes none."""
    if not left.numel() or not right.numel():
        return functional.linear(left, right, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product
