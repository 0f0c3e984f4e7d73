"""The parallel layers that stand in for a module's own: batch first, and with weights in the module's form.

A module may call a layer several times in a pass: autograd tells of the end of all additions to a gradient,
not the layer of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.tensor_parallel.activation_collectives import (
    both_entered,
    own_features,
    summed,
    turned,
    whole_features,
)
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.matmul_choice import make_matmul
from hpctrain.parallel.operations import MatrixSize
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.tensor import ColumnLinear, RowLinear, RowPartition, SplitLinear, rows_shard
from hpctrain.parallel.vocabulary import VocabularyEmbedding


@dataclass(frozen=True)
class Linear:
    """The sizes of a linear layer; the weight of one that is `transposed` is [inputs, outputs]."""

    inputs: int
    outputs: int
    transposed: bool

    @staticmethod
    def of(module: nn.Module) -> Linear | None:
        """Those of nn.Linear or transformers' Conv1D; of no other, nor of classes made of these."""
        if type(module) is nn.Linear:
            return Linear(module.in_features, module.out_features, False)
        kind = type(module)
        if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
            inputs, outputs = module.get_parameter("weight").shape
            return Linear(inputs, outputs, True)
        return None


class LateParameter(Parameter):
    """One that a layer of these adds the gradient of, perhaps several times in a pass, or after it."""


class TransposedMatmul(Matmul):
    """Y = X W, of weights [k, n] that lie in memory each by itself: those of transformers' Conv1D."""

    def __init__(self, weights: Sequence[Parameter], groups: LayerContext) -> None:
        super().__init__(weights, groups)
        self._each = [Matmul([weight], groups) for weight in weights]
        self._sizes = [weight.shard.local[1] for weight in weights]

    @property
    @override
    def shape(self) -> tuple[int, int]:
        return sum(self._sizes), self.weights[0].shard.local[0]

    @property
    @override
    def shapes(self) -> list[tuple[int, int]]:
        return [each.shape for each in self._each]

    @property
    @override
    def converted_bytes(self) -> int:
        return sum(each.converted_bytes for each in self._each)

    @property
    @override
    def planned_converted_bytes(self) -> int:
        return sum(each.planned_converted_bytes for each in self._each)

    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Matmul: by what the transposed matrices have for their input gradients."""
        made = [each.input_gradient(inputs) for each in self._each]
        output = made[0] if len(made) == 1 else torch.cat(made, -1)
        return output if bias is None else output.add_(bias)

    @override
    def input_gradient(self, output_gradient: Tensor, out: Tensor | None = None) -> Tensor:
        pieces = output_gradient.split(self._sizes, -1)
        first, *others = (each.forward(g) for each, g in zip(self._each, pieces, strict=True))
        for other in others:
            first += other
        return first if out is None else out.copy_(first)

    @override
    def add_weight_gradient(self, output_gradient: Tensor, inputs: Tensor) -> None:
        pieces = output_gradient.split(self._sizes, -1)
        for each, piece in zip(self._each, pieces, strict=True):
            each.add_weight_gradient(inputs, piece)


class Replacing(SplitLinear):
    """A layer in the place of a module's."""

    linear: Linear

    @property
    def weight(self) -> Parameter:
        """What a module may ask the format of."""
        return self.weights[0]

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        return [MatrixSize(self.linear.outputs, self.linear.inputs, self.cut)]

    def met(self) -> None:
        """HpctrainError in a backward pass that is not the run's: it would add to gradients, too."""
        if not self.groups.weight_gradients.running or torch.is_grad_enabled():
            raise HpctrainError(
                f"model.plan: {self.weights[0].shard.name}: split parameters have no gradient inside the "
                "module or its loss, such as by torch.autograd.grad (leave it out of the plan)"
            )

    def added(self, parameters: Sequence[Parameter]) -> None:
        """Autograd tells."""


class BatchFirstColumnLinear(Replacing, ColumnLinear):
    """See ColumnLinear, of activations [b, s or s/t, k], with a packed weight's parts as one each.

    Where there are `outputs`, it gathers so many features over `tensor`.
    """

    def __init__(
        self,
        weights: Sequence[LateParameter],
        biases: Sequence[LateParameter],
        groups: LayerContext,
        tensor: Group,
        linear: Linear,
        outputs: int = 0,
    ) -> None:
        SplitLinear.__init__(self, groups, shared_input=False)
        take_parameters(self, weights, biases, linear)
        self.split_sizes = [weight.shard.local[linear.transposed] for weight in weights]
        self.tensor, self.outputs, self.linear = tensor, outputs, linear

    def forward(self, x: Tensor) -> Tensor:
        """[b, s or s/t, k] -> [b, s, sum of split_sizes, or outputs]. HpctrainError for other features."""
        _require_features(self, x, self.linear.inputs, "column", 'use "row" for split features')
        y = super().forward(x) if self.pieces is None else turned(super().forward(turned(x)))
        return whole_features(self.tensor, y, self.outputs) if self.outputs else y


class BatchFirstRowLinear(Replacing, RowLinear):
    """See RowLinear, of activations [b, s, k/t], or with a `whole_input` [b, s, k]."""

    def __init__(
        self,
        weight: LateParameter,
        bias: LateParameter | None,
        groups: LayerContext,
        linear: Linear,
        whole_input: bool,
    ) -> None:
        SplitLinear.__init__(self, groups, shared_input=False)
        take_parameters(self, [weight], [] if bias is None else [bias], linear)
        self.whole_input, self.linear = whole_input, linear

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, k/t or k] -> [b, s or s/t, n]. HpctrainError for other features."""
        taken = self.weights[0].shard.local[not self.linear.transposed]
        hint = 'use "row of whole input" for all features, or "column" for the layer before it'
        if self.whole_input:
            taken, hint = self.linear.inputs, 'use "row" for split features'
        _require_features(self, x, taken, "row", hint)
        own = own_features(self.groups.tensor, x) if self.whole_input else x
        return super().forward(own) if self.pieces is None else turned(super().forward(turned(own)))


def _require_features(layer: SplitLinear, x: Tensor, taken: int, style: str, hint: str) -> None:
    """Raise HpctrainError where a layer gets more or fewer features than its style has it take."""
    if x.shape[-1] != taken:
        name = layer.weights[0].shard.name.removesuffix(".weight")
        raise HpctrainError(
            f'model.plan: {name} = "{style}": expected {taken} features on each tensor rank, '
            f"got {x.shape[-1]} ({hint})"
        )


def take_parameters(
    layer: SplitLinear,
    weights: Sequence[LateParameter],
    biases: Sequence[LateParameter],
    linear: Linear,
) -> None:
    """Have a layer compute with these."""
    layer.weights, layer.biases = [*weights], [*biases]
    for kind, parameters in (("weight", weights), ("bias", biases)):
        for number, parameter in enumerate(parameters):
            layer.register_parameter(f"{kind}{number}", parameter)
    make = TransposedMatmul if linear.transposed else make_matmul
    layer.product = make(layer.weights, layer.groups)


class _BatchFirstEmbedding(VocabularyEmbedding):
    """Of tokens [b, s] the rows [b, s or s/t, h]; those of `padding` learn nothing."""

    def __init__(self, table: LateParameter, groups: LayerContext, padding: int | None) -> None:
        super().__init__(table, groups)
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] int64 -> [b, s or s/t, h]."""
        pieces = self.groups.sequence_parallel
        rows = turned(super().forward(tokens.t().contiguous())) if pieces else super().forward(tokens)
        if self.padding is None:
            return rows
        there = tokens.chunk(self.groups.tensor.size, 1)[self.groups.tensor.rank] if pieces else tokens
        return torch.where((there == self.padding).unsqueeze(-1), rows.detach(), rows)

    def added(self) -> None:
        """Autograd tells."""


class SplitLookup(nn.Embedding):
    """Stands before nn.Embedding among the classes of one whose rows are split."""

    lookup: Any

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """What its own class's forward asks of nn.Embedding."""
        rows: Tensor = self.lookup(input)
        return rows


def split_lookup(embedding: nn.Embedding, table: LateParameter, groups: LayerContext) -> None:
    """Have an embedding, in place, look up in a table that is split; what its class makes of it stays."""
    kind = type(embedding)
    split = SplitLookup if kind is nn.Embedding else type(kind.__name__, (kind, SplitLookup), {})
    embedding.__class__ = split
    vars(embedding)["lookup"] = _BatchFirstEmbedding(
        table, groups, embedding.padding_idx
    )  # no part by itself
    embedding.weight = table


_COUNT, _SPREAD = "num_experts", "_is_expert_parallel"


def experts_in(module: nn.Module) -> int | None:
    """How many experts a module has that can be spread; None where it is no such module.

    One of transformers' that is told to be spread leaves tokens alone whose expert has a number one above.
    """
    count, own = getattr(module, _COUNT, None), list(module.parameters())
    if (
        not hasattr(module, _SPREAD)
        or not isinstance(count, int)
        or not all(each.shape[0] == count for each in own)
    ):
        return None
    return count


def spread_experts(
    module: nn.Module, names: Mapping[nn.Parameter, str], groups: LayerContext, tensor: Group
) -> None:
    """Have a rank of `tensor` keep its experts alone, in place; what all give is summed over it, and
    gradients of what they take over the tensor ranks of `groups`.
    """
    count = experts_in(module)
    assert count is not None
    rows = RowPartition.split(count, tensor)
    for attribute, theirs in list(module.named_parameters(recurse=False)):
        own = Parameter(rows_shard(names[theirs], rows, tuple(theirs.shape[1:])), decayed=theirs.dim() > 1)
        own.requires_grad_(theirs.requires_grad)
        setattr(module, attribute, own)
    setattr(module, _COUNT, rows.local)
    setattr(module, _SPREAD, True)
    # Who looks for its forward method finds this one first.
    vars(module)["forward"] = partial(_of_own, module, module.forward, rows, groups, tensor)


def _of_own(
    module: nn.Module,
    forward: Callable[..., Tensor],
    rows: RowPartition,
    groups: LayerContext,
    tensor: Group,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """What all experts give for tokens [n, h], of each of which the experts [n, k] have such weights."""
    hidden, weights = both_entered(groups, hidden_states, top_k_weights)
    own = top_k_index - rows.start
    others = (own < 0) | (own >= rows.local)
    result = forward(hidden, own.masked_fill(others, rows.local), weights.masked_fill(others, 0.0))
    # Ranks without a token come to all this in backward, too, so that sums are in one order on all.
    return summed(tensor, result, hidden, weights, *module.parameters())


def is_hooked(parameter: nn.Parameter) -> bool:
    """Whether a module has asked something to be done with its gradient, which is to come from autograd."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
