"""The products of a layer's matrix: forward, input gradient, weight gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage
from hpctrain.parallel.kernels.matmul_kernels import MatmulKernel, Pass
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.product_audit.matmul_audit import WatchedKernel
from hpctrain.parallel.shards import Parameter


class QuantizedRows(NamedTuple):
    """Rows of tokens in 8 bits: values [m, features], and the scales of blocks of them."""

    values: Tensor
    scales: Tensor


Operand = Tensor | QuantizedRows
"""What a Matmul multiplies of activations, or of their gradients: [..., features] as stored, or scaled."""


def operand_tensors(operand: Operand) -> tuple[Tensor, ...]:
    """What autograd is to save of one."""
    return tuple(operand) if isinstance(operand, QuantizedRows) else (operand,)


def operand_from(tensors: Sequence[Tensor]) -> Operand:
    """What `operand_tensors` made these of."""
    return QuantizedRows(*tensors) if len(tensors) > 1 else tensors[0]


class Matmul:
    """Y = X W^T with fused weights W [n, k], which lie behind each other in one Bucket, multiplied as stored,
    by the kernels of its groups.

    One for each layer, so that what a format needs to remember of its matrix has a place; it is made with
    the first of the weights. What it sees in the passes of a step goes into the `noted` of its groups.
    """

    def __init__(self, weights: Sequence[Parameter], groups: LayerContext) -> None:
        self.weights, self.groups = weights, groups
        self._converted: Tensor | None = None
        self._converted_for: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return sum(weight.shard.local[0] for weight in self.weights), self.weights[0].shard.local[1]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Those (n, k) of the matrices that kernels multiply with."""
        return [self.shape]

    def weight(self) -> Tensor:
        """All weights as one matrix [n, k]."""
        return join_neighbors([parameter.detach() for parameter in self.weights])

    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., k] -> [..., n], with a bias [n] added."""
        kernel = self._kernel("forward")
        return kernel.forward(inputs, self._matrix(kernel), bias)

    def logits(self, inputs: Tensor) -> Tensor:
        """As `forward`, of [r, k] and a table of many rows."""
        kernel = self._kernel("logits")
        return kernel.logits(inputs, self._matrix(kernel))

    def input_gradient(self, output_gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """[..., n] -> [..., k], into `out` where there is one."""
        kernel = self._kernel("input_gradient")
        return kernel.input_gradient(output_gradient, self._matrix(kernel), out)

    def forward_and_save(
        self,
        inputs: Tensor,
        bias: Tensor | None,
        pieces: Group | None,
        compact: bool,  # noqa: ARG002
    ) -> tuple[Tensor, Operand]:
        """`forward` of the inputs, and what is to be kept of them for the weight's gradient.

        With `pieces` the inputs are a piece of the tokens of these ranks, which the product is of
        (collective), and so is what is kept. Where it is not to be `compact`, that is the inputs themselves.
        """
        whole = inputs if pieces is None else pieces.all_gather(inputs)
        return self.forward(whole, bias), inputs

    def kept(self, rows: int, at: ActivationSizes, pieces: Group | None) -> list[SavedStorage]:  # noqa: ARG002
        """What that is, compact, of so many rows of inputs: in a step of the run where it is most."""
        return [SavedStorage(rows * self.weights[0].shard.local[1] * at.itemsize, at.itemsize)]

    def start_gather_saved(
        self, kept: Operand, pieces: Group, blocking: bool = False
    ) -> Callable[[], Operand]:
        """Have what is kept of all `pieces` come (collective); what waits for it."""
        assert isinstance(kept, Tensor)
        return pieces.start_all_gather(kept, blocking=blocking).wait

    def gather_gradient(self, output_gradient: Tensor, pieces: Group | None) -> Operand:
        """The gradient of the output, of the tokens of all `pieces` (collective), as both other products
        take it.
        """
        return output_gradient if pieces is None else pieces.all_gather(output_gradient)

    def gradient_bytes(self, rows: int, at: ActivationSizes) -> int:
        """Bytes of that, of so many rows, in a step where they are most."""
        return rows * sum(weight.shard.local[0] for weight in self.weights) * at.itemsize

    def input_gradient_of(self, output_gradient: Operand) -> Tensor:
        """As `input_gradient`."""
        assert isinstance(output_gradient, Tensor)
        return self.input_gradient(output_gradient)

    def add_weight_gradient_of(self, output_gradient: Operand, kept: Operand) -> None:
        """As `add_weight_gradient`, of what was kept of whole inputs."""
        assert isinstance(output_gradient, Tensor) and isinstance(kept, Tensor)
        self.add_weight_gradient(output_gradient, kept)

    def passing(self, rows: int, at: ActivationSizes) -> int:
        """Bytes that a product of so many rows takes in passing beside operands and results as stored."""
        return self.groups.kernels.passing(rows, *self.shape, at)

    def gradient(self) -> tuple[Tensor, bool]:
        """The buffer [n, k] of all weights' gradients, and whether it is to be overwritten."""
        first = [buffer for weight in self.weights if (buffer := weight.gradient_to_overwrite()) is not None]
        assert len(first) in {0, len(self.weights)}, "fused weights have their gradients added together"
        return join_neighbors(first or [gradient_of(weight) for weight in self.weights]), bool(first)

    def add_weight_gradient(self, output_gradient: Tensor, inputs: Tensor) -> None:
        """[n, k] += output_gradient [..., n]^T inputs [..., k]; not yet told as added."""
        rows, right = (each.reshape(-1, each.shape[-1]) for each in (output_gradient, inputs))
        gradient, first = self.gradient()
        self._kernel("weight_gradient").add_weight_gradient(gradient, rows, right, first)

    def _kernel(self, kind: Pass) -> MatmulKernel:
        kernel, audit = self.groups.kernels.of(kind, *self.shape), self.groups.audit
        return WatchedKernel(kernel, audit, self.weights) if audit is not None and audit.active else kernel

    def _matrix(self, kernel: MatmulKernel) -> Tensor:
        """All weights as this kernel takes them: converted, if they are, once for as long as they stay."""
        stays, whole = self.groups.kernels.stays, self.weight()
        if stays is None or not kernel.converts:
            return whole
        if self._converted is None:
            self._converted = torch.empty(whole.shape, dtype=torch.float32)
        if self._converted_for != stays:
            self._converted.copy_(whole)
            self._converted_for = stays
        return self._converted

    @property
    def converted_bytes(self) -> int:
        """Bytes of the converted weights, which stay from their first use on."""
        return 0 if self._converted is None else self._converted.nbytes

    @property
    def planned_converted_bytes(self) -> int:
        """What those are in a run."""
        outputs, inputs = self.shape
        return 4 * outputs * inputs if self.groups.kernels.copies(outputs, inputs) else 0


def join_neighbors(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor over `tensors` that lie behind each other in one Bucket, join_neighbors along dim 0."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    end = first.storage_offset()
    for tensor in tensors:
        assert tensor.storage_offset() == end, "fused parameters must be neighbours in their bucket"
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def gradient_of(parameter: Parameter) -> Tensor:
    """The buffer of a parameter's gradient, which must be there."""
    assert parameter.gradient is not None, f"{parameter.shard.name} has no gradient buffer"
    return parameter.gradient
