"""Parallel layers that replace a module's own linear layers and embeddings.

Activations are batch first, and weights have the module's own form. A module may call a layer several times
in a pass. So autograd reports when a gradient is complete, and not each call of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.tensor_parallel.activation_collectives import (
    gather_features,
    split_features,
    transpose_sequence,
)
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul, Operand
from hpctrain.parallel.operations import MatrixSize
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.parallel.tensor import ColumnAutograd, RowAutograd, SplitLinear
from hpctrain.parallel.vocabulary import VocabularyEmbedding


@dataclass(frozen=True)
class LinearSizes:
    """Sizes of a linear layer.

    Attributes:
        inputs: Number of input features.
        outputs: Number of output features.
        transposed: True if the weight is [inputs, outputs].
    """

    inputs: int
    outputs: int
    transposed: bool

    @staticmethod
    def of(module: nn.Module) -> LinearSizes | None:
        """Return the sizes of nn.Linear or transformers' Conv1D, or None for others and for subclasses."""
        if type(module) is nn.Linear:
            return LinearSizes(module.in_features, module.out_features, False)
        kind = type(module)
        if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
            inputs, outputs = module.get_parameter("weight").shape
            return LinearSizes(inputs, outputs, True)
        return None


class LayerGradientParameter(Parameter):
    """Parameter whose gradient its layer adds to the buffer, perhaps several times in a pass or after it."""


_Replacement = TypeVar("_Replacement", bound=Parameter)


def replacement(kind: type[_Replacement], original: nn.Parameter, shard: Shard) -> _Replacement:
    """Return the Parameter of a kind that replaces a module's own parameter.

    It has weight decay if it is trained and not a vector.
    """
    new = kind(shard, has_weight_decay=len(shard.shape) > 1 and original.requires_grad)
    new.requires_grad_(original.requires_grad)
    return new


class TransposedMatmul(Matmul):
    """Product Y = X W with weights [k, n] of transformers' Conv1D, where Matmul takes weights [n, k].

    Several weights [k, n_i] are not neighbors in memory, unlike those of a Matmul. So each of them has a
    Matmul of its own, whose matrix is W transposed: its input gradient is this product's output.
    """

    def __init__(self, weights: Sequence[Parameter], layer_context: LayerContext) -> None:
        super().__init__(weights, layer_context)
        self._products = [Matmul([weight], layer_context) for weight in weights]
        self.output_sizes = [weight.shard.local[1] for weight in weights]
        self.shape = sum(self.output_sizes), weights[0].shard.local[0]

    @property
    @override
    def shapes(self) -> list[tuple[int, int]]:
        return [each.shape for each in self._products]

    @property
    @override
    def converted_bytes(self) -> int:
        return sum(each.converted_bytes for each in self._products)

    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return X W, computed as the input gradient of the transposed matrices."""
        outputs = [each.input_gradient(inputs) for each in self._products]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return output if bias is None else output.add_(bias)

    @override
    def input_gradient(self, output_gradient: Operand, out: Tensor | None = None) -> Tensor:
        assert isinstance(output_gradient, Tensor)
        pieces = output_gradient.split(self.output_sizes, -1)
        first, *others = (each.forward(g) for each, g in zip(self._products, pieces, strict=True))
        for other in others:
            first += other
        return first if out is None else out.copy_(first)

    @override
    def add_weight_gradient(self, output_gradient: Operand, inputs: Operand) -> None:
        assert isinstance(output_gradient, Tensor)
        pieces = output_gradient.split(self.output_sizes, -1)
        for each, piece in zip(self._products, pieces, strict=True):
            each.add_weight_gradient(inputs, piece)


class ReplacementLinear(SplitLinear):
    """Base class of linear layers that replace one of a module and have its parameters.

    Args:
        layer_context: Context of the layer.
        weights: This rank's piece of each weight: [n/t, k] or [n, k/t], or transposed as the module's own.
        biases: Bias of each weight, or none.
        linear: Sizes of the module's layer.
    """

    def __init__(
        self,
        layer_context: LayerContext,
        weights: Sequence[LayerGradientParameter],
        biases: Sequence[LayerGradientParameter],
        linear: LinearSizes,
    ) -> None:
        product = TransposedMatmul(weights, layer_context) if linear.transposed else None
        super().__init__(layer_context, weights, biases, product=product)
        self.linear = linear

    @property
    def weight(self) -> Parameter:
        """The first weight, whose dtype a module may ask for."""
        return self.weights[0]

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        return [MatrixSize(self.linear.outputs, self.linear.inputs, self.split)]

    def run_batch_first(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `forward(x)`, with the sequence as first dimension if ranks have slices of it."""
        return (
            forward(x) if self.sequence_group is None else transpose_sequence(forward(transpose_sequence(x)))
        )

    @override
    def _multiply(
        self, x: Tensor, bias: Tensor | None, sequence_group: Group | None, training: bool
    ) -> tuple[Tensor, Operand, tuple[Tensor, ...]]:
        output, saved, inner = super()._multiply(x, bias, sequence_group, training)
        if output._is_view():  # torch refuses to change views of autograd functions in place
            output = torch.ops.aten._unsafe_view(output, output.shape)
        return output, saved, inner

    def on_backward(self) -> None:
        """Raise HpctrainError in a backward pass inside the module, which would add to gradients, too."""
        if not self.layer_context.weight_gradients.running or torch.is_grad_enabled():
            raise HpctrainError(
                f"model.plan: {self.weights[0].shard.name}: split parameters have no gradient inside the "
                "module or its loss, such as by torch.autograd.grad (leave it out of the plan)"
            )

    def mark_gradient_added(self, parameters: Sequence[Parameter]) -> None:
        """Do nothing, because autograd reports complete gradients."""


class BatchFirstColumnLinear(ReplacementLinear):
    """Linear layer split by output features, as ColumnLinear, for activations [b, s, k].

    Under sequence parallelism they are this rank's piece, [b, s/t, k].

    Each matrix that is packed into the module's weight is a weight of its own.

    Args:
        layer_context: Context of the layer. It has one tensor rank if an outer module sums the gradients of
            inputs.
        weights: This rank's rows of each packed matrix.
        biases: Bias of each weight, or none.
        linear: Sizes of the module's layer.
        tensor: Ranks that split the layer.
        gathers_outputs: True if all ranks get the features of all ranks.
    """

    split = "outputs"
    autograd = ColumnAutograd

    def __init__(
        self,
        layer_context: LayerContext,
        weights: Sequence[LayerGradientParameter],
        biases: Sequence[LayerGradientParameter],
        linear: LinearSizes,
        tensor: Group,
        gathers_outputs: bool,
    ) -> None:
        super().__init__(layer_context, weights, biases, linear)
        self.tensor, self.gathers_outputs = tensor, gathers_outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features [b, s, sum of split_sizes] of X A^T + b, or all of them, [b, s, n].

        Args:
            x: Input [b, s, k], or [b, s/t, k] under sequence parallelism.
        """
        _require_features(self, x, self.linear.inputs, "column", 'use "row" for split features')
        y = self.run_batch_first(super().forward, x)
        return gather_features(self.tensor, y, self.linear.outputs) if self.gathers_outputs else y


class BatchFirstRowLinear(ReplacementLinear):
    """Linear layer split by input features, as RowLinear, for activations [b, s, k/t].

    They are [b, s, k] if the layer itself takes this rank's features.

    Args:
        layer_context: Context of the layer.
        weights: This rank's columns of the matrix.
        biases: The complete bias, or none.
        linear: Sizes of the module's layer.
        splits_input: True if inputs have all features.
        splits_output: True if the layer returns this rank's features alone.
    """

    split = "inputs"
    autograd = RowAutograd

    def __init__(
        self,
        layer_context: LayerContext,
        weights: Sequence[LayerGradientParameter],
        biases: Sequence[LayerGradientParameter],
        linear: LinearSizes,
        splits_input: bool,
        splits_output: bool,
    ) -> None:
        super().__init__(layer_context, weights, biases, linear)
        self.splits_input, self.splits_output = splits_input, splits_output

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' products, [b, s, n], or [b, s/t, n] under sequence parallelism.

        With `splits_output` it is [b, s, n/t].

        Args:
            x: Input [b, s, k/t], or [b, s, k] with `splits_input`.
        """
        features = self.weights[0].shard.local[not self.linear.transposed]
        hint = 'use "row of whole input" for all features, or "column" for the layer before it'
        if self.splits_input:
            features, hint = self.linear.inputs, 'use "row" for split features'
        _require_features(self, x, features, "row", hint)
        tensor = self.layer_context.tensor
        y = self.run_batch_first(super().forward, split_features(tensor, x) if self.splits_input else x)
        return split_features(tensor, y) if self.splits_output else y


def _require_features(layer: SplitLinear, x: Tensor, features: int, style: str, hint: str) -> None:
    """Raise HpctrainError if a layer's input has another number of features than its style takes."""
    if x.shape[-1] != features:
        name = layer.weights[0].shard.name.removesuffix(".weight")
        raise HpctrainError(
            f'model.plan: {name} = "{style}": expected {features} features on each tensor rank, '
            f"got {x.shape[-1]} ({hint})"
        )


class _BatchFirstEmbedding(VocabularyEmbedding):
    """Embedding of tokens [b, s] in rows [b, s or s/t, h]. The row of the token `padding` is not trained."""

    def __init__(
        self, table: LayerGradientParameter, layer_context: LayerContext, padding: int | None
    ) -> None:
        super().__init__(table, layer_context)
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows [b, s or s/t, h] of tokens [b, s]."""
        tensor = self.layer_context.tensor
        if self.layer_context.sequence_parallel:
            rows = transpose_sequence(super().forward(tokens.t().contiguous()))
            tokens = tokens.chunk(tensor.size, 1)[tensor.rank]
        else:
            rows = super().forward(tokens)
        if self.padding is None:
            return rows
        return torch.where((tokens == self.padding).unsqueeze(-1), rows.detach(), rows)

    def mark_gradient_added(self) -> None:
        """Do nothing, because autograd reports complete gradients."""


class SplitEmbedding(nn.Embedding):
    """Embedding whose table is split by rows. `split_embedding` puts it between a class and nn.Embedding.

    Attributes:
        lookup: Function from token ids to rows, which is called in place of nn.Embedding's own.
    """

    lookup: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return the complete rows [b, s or s/t, h] of token ids [b, s]. Collective over tensor ranks."""
        return self.lookup(input)


def split_embedding(
    embedding: nn.Embedding, table: LayerGradientParameter, layer_context: LayerContext
) -> None:
    """Let an embedding take its rows from a table that tensor ranks split, in place.

    The class of the embedding changes to SplitEmbedding. If it is a subclass of nn.Embedding, it becomes a
    class with the same forward method, which gets rows from SplitEmbedding and may scale them, for example.

    Args:
        embedding: The embedding, on "meta".
        table: This rank's rows of its table.
        layer_context: Context of the layer.
    """
    kind = type(embedding)
    split = SplitEmbedding if kind is nn.Embedding else type(kind.__name__, (kind, SplitEmbedding), {})
    embedding.__class__ = split
    lookup = _BatchFirstEmbedding(table, layer_context, embedding.padding_idx)
    vars(embedding)["lookup"] = lookup  # not as a submodule, or the module would have its parameters, too
    embedding.weight = table


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return True if a module has registered a hook on the gradient, which autograd must compute then."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
