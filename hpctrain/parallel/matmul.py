"""Matrix products of a layer: the output, the gradient of its input, and the gradient of its weights.

A linear layer with weights W [n, k] and input X [m, k] computes three products:

    forward          Y  = X W^T      [m, n]
    input gradient   dX = dY W       [m, k]
    weight gradient  dW += dY^T X    [n, k], added to the gradient buffer of the weights

The classes of products, with what each adds:

    Matmul                in the dtype of the weights, by the kernels of a `KernelTable`
    ├── QuantizedMatmul   in 8 bits, by scales of current maxima     (fp8/quantized_matmul.py)
    │   └── DelayedMatmul    by scales of maxima of earlier steps    (fp8/delayed_matmul.py)
    └── TransposedMatmul  of weights [k, n]                          (model/modules/)

`make_matmul` (matmul_choice.py) chooses the class for a layer. A kernel is a library that computes one
product (kernels/matmul_kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.parallel.kernels.matmul_kernels import MatmulKernel, Pass
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter, gradients_to_update

if TYPE_CHECKING:
    from hpctrain.parallel.fp8.quantize import QuantizedTensor

Operand: TypeAlias = "Tensor | QuantizedTensor"
"""Activations, or their gradients, as a Matmul multiplies them.

They are [..., features] in the dtype of the weights, or [m, features] in 8 bits, with m tokens.
"""


class Matmul:
    """Products of activations with fused weights W [n, k], in the dtype of the weights.

    Each layer has one of its own, so a subclass can keep state of its weights. What it records of a step goes
    to the statistics of its context.

    Args:
        weights: Weights [n_i, k] that are neighbours in one bucket.
        layer_context: Context of the layer.

    Attributes:
        output_sizes: Local output features n_i of each weight.
        shape: Local sizes (n, k) of all weights together.
    """

    def __init__(self, weights: Sequence[Parameter], layer_context: LayerContext) -> None:
        self.weights, self.layer_context = weights, layer_context
        self.output_sizes = [weight.shard.local[0] for weight in weights]
        self.shape = sum(self.output_sizes), weights[0].shard.local[1]
        self._converted: Tensor | None = None
        self._converted_period: int | None = None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Sizes (n, k) of the matrices that kernels multiply."""
        return [self.shape]

    def weight(self) -> Tensor:
        """Return all weights as one matrix [n, k], which shares their memory."""
        return join_neighbors([parameter.detach() for parameter in self.weights])

    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product [..., n] of inputs [..., k], with a bias [n] added."""
        kernel = self._kernel("forward")
        return kernel.forward(inputs, self._matrix(kernel), bias)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits [r, n] of inputs [r, k]: the product with a table of many rows n, no bias."""
        kernel = self._kernel("logits")
        return kernel.logits(inputs, self._matrix(kernel))

    def input_gradient(self, output_gradient: Operand, out: Tensor | None = None) -> Tensor:
        """Return the gradient [..., k] of the input for an output gradient [..., n], in `out` if given."""
        assert isinstance(output_gradient, Tensor)
        kernel = self._kernel("input_gradient")
        return kernel.input_gradient(output_gradient, self._matrix(kernel), out)

    def add_weight_gradient(self, output_gradient: Operand, inputs: Operand) -> None:
        """Add dY^T X to the gradient of the weights.

        The caller reports the addition (`Parameter.mark_gradient_added`).

        Args:
            output_gradient: Gradient of the output, dY, [..., n].
            inputs: Input of the layer, X, [..., k].
        """
        assert isinstance(output_gradient, Tensor) and isinstance(inputs, Tensor)
        left, right = (each.reshape(-1, each.shape[-1]) for each in (output_gradient, inputs))
        gradient, overwrite = self.gradient_buffer()
        self._kernel("weight_gradient").add_weight_gradient(gradient, left, right, overwrite)

    # What a linear layer calls. Subclasses save and send operands in other formats.

    def forward_and_save(
        self,
        inputs: Tensor,
        bias: Tensor | None,
        sequence_group: Group | None,
        compact: bool,  # noqa: ARG002
    ) -> tuple[Tensor, Operand]:
        """Return the product [..., n] with all tokens, and what the backward pass needs of the inputs.

        Args:
            inputs: Inputs [..., k], with a `sequence_group` this rank's piece of the tokens.
            bias: Bias [n], or None.
            sequence_group: Ranks that have the other pieces (collective over it), or None.
            compact: True if the inputs may be saved in another format. Otherwise they are saved themselves.
        """
        gathered = inputs if sequence_group is None else sequence_group.all_gather(inputs)
        return self.forward(gathered, bias), inputs

    def saved_operand(self, tensors: Sequence[Tensor]) -> Operand:
        """Return the result of `forward_and_save` for the backward pass, from its `operand_tensors`."""
        (saved,) = tensors
        return saved

    def gather_gradient(self, output_gradient: Tensor, sequence_group: Group | None) -> Operand:
        """Return the output gradient of all tokens, as `input_gradient` and `add_weight_gradient` take it.

        Collective over `sequence_group`.

        Args:
            output_gradient: Gradient of the output [..., n], with a `sequence_group` this rank's piece of the
                tokens.
            sequence_group: Ranks that have the other pieces, or None.
        """
        return output_gradient if sequence_group is None else sequence_group.all_gather(output_gradient)

    # Buffers and kernels

    def gradient_buffer(self) -> tuple[Tensor, bool]:
        """Return the buffer [n, k] of all weights' gradients, and whether it must be overwritten."""
        gradients, overwrite = gradients_to_update(self.weights)
        return join_neighbors(gradients), overwrite

    def _kernel(self, kind: Pass) -> MatmulKernel:
        products = self.layer_context.products
        kernel, audit = products.kernels.kernel_for(kind, *self.shape), products.active_audit
        return kernel if audit is None else audit.checked_kernel(kernel, self.weights)

    def _matrix(self, kernel: MatmulKernel) -> Tensor:
        """Return the weights as a kernel takes them, converted at most once while they are constant."""
        period, weight = self.layer_context.products.kernels.constant_period, self.weight()
        if period is None or not kernel.converts:
            return weight
        if self._converted is None:
            self._converted = torch.empty(weight.shape, dtype=torch.float32)
        if self._converted_period != period:
            self._converted.copy_(weight)
            self._converted_period = period
        return self._converted

    @property
    def converted_bytes(self) -> int:
        """Bytes of the converted weights, which remain allocated after their first use."""
        return 0 if self._converted is None else self._converted.nbytes


def operand_tensors(operand: Operand) -> tuple[Tensor, ...]:
    """Return the tensors of an operand, as autograd saves them."""
    return (operand,) if isinstance(operand, Tensor) else operand.tensors


def start_gather_saved(
    saved: Operand, sequence_group: Group, blocking: bool = False
) -> Callable[[], Operand]:
    """Start to gather the inputs that ranks saved, and return a function that waits for all tokens.

    Collective.

    Args:
        saved: Result of `Matmul.forward_and_save` of this rank's piece of the tokens.
        sequence_group: Ranks that have the other pieces.
        blocking: True if the caller waits at once.
    """
    if isinstance(saved, Tensor):
        return sequence_group.start_all_gather(saved, blocking=blocking).wait
    return saved.start_gather(sequence_group, blocking)


def join_neighbors(tensors: Sequence[Tensor]) -> Tensor:
    """Return a view of tensors that are neighbours in memory, joined along dim 0."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    end = first.storage_offset()
    for tensor in tensors:
        assert tensor.storage_offset() == end, "fused parameters must be neighbours in their bucket"
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
