"""Parallel layers that replace a module's own: linear layers, embeddings and experts.

Activations are batch first, and weights have the module's own form. A module may call a layer several times
in a pass. So autograd reports when a gradient is complete, and not each call of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.tensor_parallel.activation_collectives import (
    enter_split_pair,
    gather_features,
    split_features,
    sum_results,
    transpose_sequence,
)
from hpctrain.parallel.fp8.matmul_choice import make_matmul
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.operations import MatrixSize
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.tensor import ColumnLinear, Partition, RowLinear, SplitLinear, rows_shard
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


class TransposedMatmul(Matmul):
    """Product Y = X W with weights [k, n], each in memory of its own, as of transformers' Conv1D."""

    def __init__(self, weights: Sequence[Parameter], layer_context: LayerContext) -> None:
        super().__init__(weights, layer_context)
        self._products = [Matmul([weight], layer_context) for weight in weights]
        self._sizes = [weight.shard.local[1] for weight in weights]

    @property
    @override
    def shape(self) -> tuple[int, int]:
        return sum(self._sizes), self.weights[0].shard.local[0]

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
        made = [each.input_gradient(inputs) for each in self._products]
        output = made[0] if len(made) == 1 else torch.cat(made, -1)
        return output if bias is None else output.add_(bias)

    @override
    def input_gradient(self, output_gradient: Tensor, out: Tensor | None = None) -> Tensor:
        pieces = output_gradient.split(self._sizes, -1)
        first, *others = (each.forward(g) for each, g in zip(self._products, pieces, strict=True))
        for other in others:
            first += other
        return first if out is None else out.copy_(first)

    @override
    def add_weight_gradient(self, output_gradient: Tensor, inputs: Tensor) -> None:
        pieces = output_gradient.split(self._sizes, -1)
        for each, piece in zip(self._products, pieces, strict=True):
            each.add_weight_gradient(inputs, piece)


class ReplacementLinear(SplitLinear):
    """Split linear layer that replaces one of a module."""

    linear: LinearSizes

    @property
    def weight(self) -> Parameter:
        """The first weight, whose dtype a module may ask for."""
        return self.weights[0]

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        return [MatrixSize(self.linear.outputs, self.linear.inputs, self.cut)]

    def run_batch_first(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `forward(x)`, with the sequence as first dimension if ranks have slices of it."""
        return (
            forward(x) if self.sequence_group is None else transpose_sequence(forward(transpose_sequence(x)))
        )

    def on_backward(self) -> None:
        """Raise HpctrainError in a backward pass inside the module, which would add to gradients, too."""
        if not self.layer_context.weight_gradients.running or torch.is_grad_enabled():
            raise HpctrainError(
                f"model.plan: {self.weights[0].shard.name}: split parameters have no gradient inside the "
                "module or its loss, such as by torch.autograd.grad (leave it out of the plan)"
            )

    def mark_gradient_added(self, parameters: Sequence[Parameter]) -> None:
        """Do nothing, because autograd reports complete gradients."""


class BatchFirstColumnLinear(ReplacementLinear, ColumnLinear):
    """ColumnLinear for activations [b, s or s/t, k]. Each part of a packed weight is a weight of its own.

    If `outputs` is above 0, so many features are gathered over the group `tensor`.
    """

    def __init__(
        self,
        weights: Sequence[LayerGradientParameter],
        biases: Sequence[LayerGradientParameter],
        layer_context: LayerContext,
        tensor: Group,
        linear: LinearSizes,
        outputs: int = 0,
    ) -> None:
        SplitLinear.__init__(self, layer_context, shared_input=False)
        set_parameters(self, weights, biases, linear)
        self.split_sizes = [weight.shard.local[linear.transposed] for weight in weights]
        self.tensor, self.outputs, self.linear = tensor, outputs, linear

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, s, sum of split_sizes, or outputs] for x [b, s or s/t, k]."""
        _require_features(self, x, self.linear.inputs, "column", 'use "row" for split features')
        y = self.run_batch_first(super().forward, x)
        return gather_features(self.tensor, y, self.outputs) if self.outputs else y


class BatchFirstRowLinear(ReplacementLinear, RowLinear):
    """RowLinear for activations [b, s, k/t], or [b, s, k] if it splits its input."""

    def __init__(
        self,
        weight: LayerGradientParameter,
        bias: LayerGradientParameter | None,
        layer_context: LayerContext,
        linear: LinearSizes,
        splits_input: bool,
    ) -> None:
        SplitLinear.__init__(self, layer_context, shared_input=False)
        set_parameters(self, [weight], [] if bias is None else [bias], linear)
        self.splits_input, self.linear = splits_input, linear

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, s or s/t, n] for x [b, s, k/t or k]."""
        features = self.weights[0].shard.local[not self.linear.transposed]
        hint = 'use "row of whole input" for all features, or "column" for the layer before it'
        if self.splits_input:
            features, hint = self.linear.inputs, 'use "row" for split features'
        _require_features(self, x, features, "row", hint)
        local = split_features(self.layer_context.tensor, x) if self.splits_input else x
        return self.run_batch_first(super().forward, local)


def _require_features(layer: SplitLinear, x: Tensor, features: int, style: str, hint: str) -> None:
    """Raise HpctrainError if a layer's input has another number of features than its style takes."""
    if x.shape[-1] != features:
        name = layer.weights[0].shard.name.removesuffix(".weight")
        raise HpctrainError(
            f'model.plan: {name} = "{style}": expected {features} features on each tensor rank, '
            f"got {x.shape[-1]} ({hint})"
        )


def set_parameters(
    layer: SplitLinear,
    weights: Sequence[LayerGradientParameter],
    biases: Sequence[LayerGradientParameter],
    linear: LinearSizes,
) -> None:
    """Register the parameters of a layer and make its product."""
    layer.weights, layer.biases = [*weights], [*biases]
    for kind, parameters in (("weight", weights), ("bias", biases)):
        for number, parameter in enumerate(parameters):
            layer.register_parameter(f"{kind}{number}", parameter)
    make = TransposedMatmul if linear.transposed else make_matmul
    layer.product = make(layer.weights, layer.layer_context)


class _BatchFirstEmbedding(VocabularyEmbedding):
    """Embedding of tokens [b, s] in rows [b, s or s/t, h]. The row of the token `padding` is not trained."""

    def __init__(
        self, table: LayerGradientParameter, layer_context: LayerContext, padding: int | None
    ) -> None:
        super().__init__(table, layer_context)
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows [b, s or s/t, h] of tokens [b, s]."""
        pieces = self.layer_context.sequence_parallel
        rows = super().forward(tokens.t().contiguous() if pieces else tokens)
        rows = transpose_sequence(rows) if pieces else rows
        if self.padding is None:
            return rows
        there = (
            tokens.chunk(self.layer_context.tensor.size, 1)[self.layer_context.tensor.rank]
            if pieces
            else tokens
        )
        return torch.where((there == self.padding).unsqueeze(-1), rows.detach(), rows)

    def mark_gradient_added(self) -> None:
        """Do nothing, because autograd reports complete gradients."""


class SplitEmbedding(nn.Embedding):
    """Base class that precedes nn.Embedding in a class whose rows are split."""

    lookup: Any

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return the rows of token ids, as nn.Embedding does."""
        rows: Tensor = self.lookup(input)
        return rows


def split_embedding(
    embedding: nn.Embedding, table: LayerGradientParameter, layer_context: LayerContext
) -> None:
    """Let an embedding look up in a split table, in place. What its subclass does with the rows stays."""
    kind = type(embedding)
    split = SplitEmbedding if kind is nn.Embedding else type(kind.__name__, (kind, SplitEmbedding), {})
    embedding.__class__ = split
    vars(embedding)["lookup"] = _BatchFirstEmbedding(
        table, layer_context, embedding.padding_idx
    )  # not as a submodule
    embedding.weight = table


_COUNT, _IS_SPLIT = "num_experts", "_is_expert_parallel"


def expert_count(module: nn.Module) -> int | None:
    """Return the number of experts in a module that can be split over ranks, or None for other modules.

    With `_is_expert_parallel`, a module of `transformers` skips tokens whose expert has an index above its
    own.
    """
    count, local = getattr(module, _COUNT, None), list(module.parameters())
    if (
        not hasattr(module, _IS_SPLIT)
        or not isinstance(count, int)
        or not all(each.shape[0] == count for each in local)
    ):
        return None
    return count


def split_experts(
    module: nn.Module, names: Mapping[nn.Parameter, str], layer_context: LayerContext, tensor: Group
) -> None:
    """Let a rank of `tensor` hold only its experts, in place.

    Args:
        module: Experts of `transformers`.
        names: Names of the module's parameters.
        layer_context: Group whose tensor ranks sum the gradients of the inputs.
        tensor: Group that shares the experts and sums their results.
    """
    count = expert_count(module)
    assert count is not None
    rows = Partition.split(count, tensor)
    for attribute, original in list(module.named_parameters(recurse=False)):
        local = Parameter(
            rows_shard(names[original], rows, tuple(original.shape[1:])), has_weight_decay=original.dim() > 1
        )
        local.requires_grad_(original.requires_grad)
        setattr(module, attribute, local)
    setattr(module, _COUNT, rows.local)
    setattr(module, _IS_SPLIT, True)
    # An instance attribute hides the method of the class.
    vars(module)["forward"] = _LocalExperts(module, module.forward, rows, layer_context, tensor)


@dataclass(frozen=True)
class _LocalExperts:
    """Forward method of experts of which this rank holds some."""

    module: nn.Module
    forward: Callable[..., Tensor]
    rows: Partition
    layer_context: LayerContext
    tensor: Group

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum of all ranks' experts for tokens [n, h], with experts and weights [n, k]."""
        hidden, weights = enter_split_pair(self.layer_context, hidden_states, top_k_weights)
        local = top_k_index - self.rows.start
        remote = (local < 0) | (local >= self.rows.local)
        number = self.rows.local
        result = self.forward(hidden, local.masked_fill(remote, number), weights.masked_fill(remote, 0.0))
        # Backward reaches all of these on ranks without a token, too, so that all sum in one order.
        return sum_results(self.tensor, result, hidden, weights, *self.module.parameters())


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return True if a module has registered a hook on the gradient, which autograd must compute then."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
