"""Interface of a check of matrix products, which layers call in steps that are checked (`fault_checks/`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.parallel.kernels.matmul_kernels import MatmulKernel
from hpctrain.parallel.shards import Parameter

if TYPE_CHECKING:
    from hpctrain.parallel.fp8.quantize import QuantizedTensor

RowsOfExperts = Iterable[tuple[int, slice]]
"""Number and rows of each expert."""


class ProductCheck(ABC):
    """Check of the products of training steps. It changes no bit of what is computed.

    Attributes:
        active: True within a step that is checked. Layers call nothing in other steps.
    """

    active = False

    @abstractmethod
    def begin_step(self, step: int) -> None:
        """Start to check a training step, within which weights do not change."""

    @abstractmethod
    def check_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Check the gradients of parameters after their last addition, before anything else changes them."""

    @abstractmethod
    def collect_faults(self) -> list[DetectedFault]:
        """Return the faults of the completed step. Waits for the device."""

    @abstractmethod
    def checked_kernel(self, kernel: MatmulKernel, weights: Sequence[Parameter]) -> MatmulKernel:
        """Return a kernel that checks the results of another one, for fused weights."""

    @abstractmethod
    def check_quantized_product(
        self,
        weights: Sequence[Parameter],
        operands: tuple[QuantizedTensor, QuantizedTensor],
        output: Tensor,
        transposed: bool,
    ) -> None:
        """Check a product in 8 bits.

        Args:
            weights: Fused weights.
            operands: Rows of tokens, and the weights as they were multiplied.
            output: The product.
            transposed: True for the gradient of the input.
        """

    @abstractmethod
    def expect_quantized_addition(
        self,
        weights: Sequence[Parameter],
        operands: tuple[QuantizedTensor, QuantizedTensor],
        into: Tensor,
        overwrite: bool,
    ) -> None:
        """Record that a product in 8 bits will be added to a gradient next; `finish_addition` follows.

        Args:
            weights: Fused weights.
            operands: Gradient of the output [m, n], and input of the layer [m, k].
            into: Gradient [n, k] to which the product will be added.
            overwrite: True if the gradient will be overwritten instead.
        """

    @abstractmethod
    def finish_addition(self, weights: Sequence[Parameter]) -> None:
        """Report that the expected addition to the gradient of fused weights is done."""

    @abstractmethod
    def check_grouped_product(
        self,
        weight: Parameter,
        operands: tuple[Tensor, Tensor, Tensor],
        segments: RowsOfExperts,
        transposed: bool,
    ) -> None:
        """Check the product of each expert's rows with its matrix. Waits for the device.

        Args:
            weight: Weight of all experts.
            operands: Inputs [m, k], matrices [e, n, k], and output [m, n]. If `transposed`, inputs are [m, n]
                and the output is [m, k].
            segments: Number and rows of each expert.
            transposed: True for the gradient of the input.
        """

    @abstractmethod
    def expect_grouped_addition(
        self,
        weight: Parameter,
        operands: tuple[Tensor, Tensor],
        into: Tensor,
        segments: RowsOfExperts,
        overwrite: bool,
    ) -> None:
        """Record that products of each expert's rows will be added to a gradient [e, n, k] next.

        Args:
            weight: Weight of all experts.
            operands: Gradient of the output [m, n], and inputs [m, k].
            into: The gradient.
            segments: Number and rows of each expert.
            overwrite: True if the gradient will be overwritten instead.
        """

    @abstractmethod
    def expect_lookup(self, table: Parameter, into: Tensor, indices: Tensor, rows: Tensor) -> None:
        """Record that `rows` [m, k] will be added to the rows `indices` [m] of a table's gradient next."""
