"""Application of a tensor-parallel plan: parallel layers replace parts of a module on "meta", in place."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from hpctrain.errors import HpctrainError
from hpctrain.model.modules.module_call import set_forward
from hpctrain.model.modules.tensor_parallel.activation_collectives import (
    enter_split,
    gather_sequence,
    scatter_sequence,
)
from hpctrain.model.modules.tensor_parallel.parallel_layers import (
    BatchFirstColumnLinear,
    BatchFirstRowLinear,
    LayerGradientParameter,
    LinearSizes,
    has_gradient_hooks,
    split_embedding,
    split_experts,
)
from hpctrain.model.modules.tensor_parallel.split_plan import (
    LINEAR,
    ROW_STYLES,
    SplitPlan,
    SplitRule,
    attribute_divisor,
    find_attribute,
    part_sizes,
)
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Shard
from hpctrain.parallel.tensor import Partition, rows_shard
from hpctrain.parallel.vocabulary import vocabulary_shard


@dataclass(frozen=True)
class SplitHead:
    """Output layer whose logits are split over the vocabulary.

    Attributes:
        layer_context: Process groups of this rank's layers.
        table: This rank's rows of the matrix.
        rows: Number of rows of `table` that are tokens; the others are padding.
    """

    layer_context: LayerContext
    table: LayerGradientParameter
    rows: int


@dataclass(frozen=True)
class SplitOutputs:
    """Result of a module whose logits [b, s, V/t] are split, and its output layer."""

    outputs: Any
    head: SplitHead


@dataclass
class SplitResult:
    """Results of splitting a module.

    Attributes:
        partial: Parameters that are complete but have partial gradients on tensor ranks.
        head: Output layer whose logits are split; None if there is none.
    """

    partial: set[nn.Parameter] = field(default_factory=set)
    head: SplitHead | None = None


def apply_plan(
    module: nn.Module, plan: SplitPlan, layer_context: LayerContext, gather_logits: bool
) -> SplitResult:
    """Split a module over the tensor ranks of `layer_context`, in place. With one rank it stays unchanged.

    Args:
        module: The module on "meta".
        plan: A plan without problems.
        layer_context: Process groups of this rank's layers.
        gather_logits: True if the head gathers its logits.
    """
    assert not plan.problems
    if layer_context.tensor.size == 1:
        return SplitResult()
    return _PlanApplication(module, plan, layer_context, gather_logits).result


class _PlanApplication:
    """Application of a plan, which happens when an instance is made."""

    def __init__(
        self, module: nn.Module, plan: SplitPlan, layer_context: LayerContext, gather_logits: bool
    ) -> None:
        self.module, self.plan, self.layer_context = module, plan, layer_context
        self.gather_logits = gather_logits
        # Layers inside a submodule whose input is gathered leave the sum of gradients to that submodule.
        self.inner_context = layer_context.unsplit()
        self.gathered = tuple(f"{name}." for name in plan.names_with_style("gather"))
        self.tables: dict[nn.Parameter, LayerGradientParameter] = {}
        self.names = {each: name for name, each in module.named_parameters()}
        self.result = SplitResult()
        for name, rule in plan.rules.items():
            self._apply(name, rule)

    def _apply(self, name: str, rule: SplitRule) -> None:
        if rule.style == "divided":
            self._divide_attribute(name, rule)
        elif rule.style in {"partial", "sequence"}:
            if rule.style == "partial" or self.layer_context.sequence_parallel:
                self.result.partial |= set(self._parameters(name))
        elif rule.style == "gather":
            self._change_input(name, partial(enter_split, self.layer_context))
        elif rule.style in {"cut", "join"}:
            if self.layer_context.sequence_parallel:
                change = scatter_sequence if rule.style == "cut" else gather_sequence
                self._change_input(name, partial(change, self.layer_context.tensor))
        elif rule.style in LINEAR:
            make = self._row_linear if rule.style in ROW_STYLES else self._column_linear
            self._replace(name, make(name, rule))
        elif rule.style == "expert":
            part = self.module.get_submodule(name)
            split_experts(part, self.names, self._context_of(name), self.layer_context.tensor)
        else:
            self._vocabulary(name)

    def _parameters(self, name: str) -> list[nn.Parameter]:
        try:
            return list(self.module.get_submodule(name).parameters())
        except AttributeError:
            return [self.module.get_parameter(name)]

    def _change_input(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the first tensor that a submodule is called with."""
        part = self.module.get_submodule(name)
        set_forward(part, partial(_call_with_changed_input, change, part.forward))

    def _divide_attribute(self, name: str, rule: SplitRule) -> None:
        place = find_attribute(self.module, name)
        by = attribute_divisor(rule, self.layer_context.tensor.size)
        assert place is not None and by is not None
        owner = place.owner
        if place.object_name:
            # Other modules share this object and need its value unchanged: this module gets a copy.
            owner = copy(owner)
            setattr(place.module, place.object_name, owner)
        setattr(owner, place.attribute, place.value // by)

    def _replace(self, name: str, by: nn.Module) -> None:
        """Replace a submodule under all names that it has."""
        old = self.module.get_submodule(name)
        for parent in list(self.module.modules()):
            for child, each in list(parent._modules.items()):
                if each is old:
                    setattr(parent, child, by)

    def _context_of(self, name: str) -> LayerContext:
        return self.inner_context if name.startswith(self.gathered) else self.layer_context

    def _row_linear(self, name: str, rule: SplitRule) -> nn.Module:
        old = self.module.get_submodule(name)
        linear, layer_context = _sizes_of(old), self.layer_context
        columns = Partition.split(linear.inputs, layer_context.tensor)
        shard = rows_shard(self._name(old, "weight"), columns, (linear.outputs,))
        weight = self._parameter(old, "weight", shard if linear.transposed else _transpose_shard(shard))
        bias = None
        if old.bias is not None:
            partial_axes = layer_context.sequence_partial
            replicated = Shard.replicated(self._name(old, "bias"), (linear.outputs,), partial_axes)
            bias = self._parameter(old, "bias", replicated)
        return BatchFirstRowLinear(layer_context, weight, bias, linear, rule.style == "row of whole input")

    def _column_linear(self, name: str, rule: SplitRule) -> nn.Module:
        old = self.module.get_submodule(name)
        linear, tensor = _sizes_of(old), self.layer_context.tensor
        sizes = part_sizes(linear.outputs, rule.parts)
        assert sizes is not None
        weights, biases, start = [], [], 0
        for size in sizes:
            part = Partition.split(size, tensor, rule.unit or 1)
            rows = replace(part, size=linear.outputs, start=start + part.start)
            shard = rows_shard(self._name(old, "weight"), rows, (linear.inputs,))
            shard = _transpose_shard(shard) if linear.transposed else shard
            weights.append(self._parameter(old, "weight", shard))
            biases += self._biases(old, rows)
            start += size
        gathers = rule.style == "gathered column"
        return BatchFirstColumnLinear(self._context_of(name), weights, biases, linear, tensor, gathers)

    def _biases(self, old: nn.Module, rows: Partition) -> list[LayerGradientParameter]:
        """Return this rank's rows of a layer's bias, or nothing if it has none."""
        if old._parameters.get("bias") is None:
            return []
        return [self._parameter(old, "bias", rows_shard(self._name(old, "bias"), rows, ()))]

    def _vocabulary(self, name: str) -> None:
        old = self.module.get_submodule(name)
        table, linear, tensor = self._table(old), LinearSizes.of(old), self.layer_context.tensor
        layer_context = self.layer_context if linear is None else self._context_of(name)
        if self.plan.names_with_style("cut" if linear is None else "join"):
            # Sequences are complete here: they are cut behind the embedding, or joined before the head.
            layer_context = replace(layer_context, sequence_parallel=False)
        if linear is None:
            assert isinstance(old, nn.Embedding)
            split_embedding(old, table, layer_context)
            return
        shard = table.shard
        biases = self._biases(old, Partition(shard.shape[0], shard.start[0], shard.local[0]))
        for bias in biases:
            for parent in self.module.modules():  # a module around the head may have the bias, too
                parent._parameters |= {n: bias for n, p in parent._parameters.items() if p is old.bias}
        head = BatchFirstColumnLinear(layer_context, [table], biases, linear, tensor, self.gather_logits)
        self._replace(name, head)
        if not self.gather_logits:
            self.result.head = SplitHead(self.layer_context, table, shard.extent[0])

    def _table(self, old: nn.Module) -> LayerGradientParameter:
        """Return this rank's rows of the matrix of an embedding or a head; tied ones get the same."""
        weight = old.get_parameter("weight")
        if weight not in self.tables:
            rows, width = weight.shape
            shard = vocabulary_shard(self._name(old, "weight"), rows, width, self.layer_context)
            self.tables[weight] = self._parameter(old, "weight", shard)
        return self.tables[weight]

    def _name(self, old: nn.Module, attribute: str) -> str:
        return self.names[old.get_parameter(attribute)]

    def _parameter(self, old: nn.Module, attribute: str, shard: Shard) -> LayerGradientParameter:
        if has_gradient_hooks(old.get_parameter(attribute)):
            raise HpctrainError(
                f"model.plan: {shard.name}: has gradient hooks, which are unsupported for split parameters "
                "(leave it out of the plan)"
            )
        trained = old.get_parameter(attribute).requires_grad
        own = LayerGradientParameter(shard, has_weight_decay=len(shard.shape) > 1 and trained)
        own.requires_grad_(trained)
        return own


def _sizes_of(linear_layer: nn.Module) -> LinearSizes:
    sizes = LinearSizes.of(linear_layer)
    assert sizes is not None
    return sizes


def _transpose_shard(shard: Shard) -> Shard:
    """Return the shard of a transposed matrix."""
    shape, start, local = shard.shape[::-1], shard.start[::-1], shard.local[::-1]
    return replace(shard, shape=shape, start=start, local=local)


def _call_with_changed_input(
    change: Callable[[Tensor], Tensor], forward: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Call `forward` with a function applied to its first floating-point tensor."""
    values = [*arguments]
    for place, value in enumerate(values):
        if isinstance(value, Tensor) and value.is_floating_point():
            values[place] = change(value)
            return forward(*values, **named)
    for name, value in named.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            return forward(*values, **{**named, name: change(value)})
    return forward(*values, **named)
