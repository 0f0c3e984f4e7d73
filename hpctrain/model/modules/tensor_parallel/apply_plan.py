"""Application of a tensor-parallel plan: parallel layers replace parts of a module on "meta", in place."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.errors import HpctrainError
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
    SplitPlan,
    SplitRule,
    divisor,
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
        one_rank = planned_group(("tensor",), 0, 1, Ledger())
        self.inner_context = replace(layer_context, tensor=one_rank, sequence_parallel=False)
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
            self._replace(name, self._linear(name, rule))
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
        # An instance attribute hides the method of the class.
        vars(part)["forward"] = partial(_call_with_changed_input, change, part.forward)

    def _divide_attribute(self, name: str, rule: SplitRule) -> None:
        place, by = find_attribute(self.module, name), divisor(rule, self.layer_context.tensor.size)
        assert place is not None and by is not None
        holder, attribute, shared_name = place
        if shared_name:
            # Other modules share this object and need its value unchanged: this module gets a copy.
            parent = self.module.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
            holder = copy(holder)
            setattr(parent, shared_name, holder)
        setattr(holder, attribute, getattr(holder, attribute) // by)

    def _replace(self, name: str, by: nn.Module) -> None:
        """Replace a submodule under all names that it has."""
        old = self.module.get_submodule(name)
        for parent in list(self.module.modules()):
            for child, each in list(parent._modules.items()):
                if each is old:
                    setattr(parent, child, by)

    def _context_of(self, name: str) -> LayerContext:
        return self.inner_context if name.startswith(self.gathered) else self.layer_context

    def _linear(self, name: str, rule: SplitRule) -> nn.Module:
        old = self.module.get_submodule(name)
        linear, tensor = LinearSizes.of(old), self.layer_context.tensor
        assert linear is not None
        if rule.style in {"row", "row of whole input"}:
            columns = Partition.split(linear.inputs, tensor)
            shard = rows_shard(self._name(old, "weight"), columns, (linear.outputs,))
            weight = self._parameter(old, "weight", shard if linear.transposed else _transpose_shard(shard))
            whole = (linear.outputs,), self.layer_context.sequence_partial
            bias = None
            if old.bias is not None:
                bias = self._parameter(old, "bias", Shard.replicated(self._name(old, "bias"), *whole))
            return BatchFirstRowLinear(
                weight, bias, self.layer_context, linear, rule.style == "row of whole input"
            )
        sizes = part_sizes(linear.outputs, rule.parts)
        assert sizes is not None
        weights, biases, start = [], [], 0
        for size in sizes:
            part = Partition.split(size, tensor, rule.unit or 1)
            rows = replace(part, size=linear.outputs, start=start + part.start)
            shard = rows_shard(self._name(old, "weight"), rows, (linear.inputs,))
            weights.append(
                self._parameter(old, "weight", _transpose_shard(shard) if linear.transposed else shard)
            )
            if old.bias is not None:
                of_bias = rows_shard(self._name(old, "bias"), rows, ())
                biases.append(self._parameter(old, "bias", of_bias))
            start += size
        whole_of = linear.outputs if rule.style == "gathered column" else 0
        return BatchFirstColumnLinear(weights, biases, self._context_of(name), tensor, linear, whole_of)

    def _vocabulary(self, name: str) -> None:
        old = self.module.get_submodule(name)
        table, linear = self._table(old), LinearSizes.of(old)
        layer_context = self.layer_context if linear is None else self._context_of(name)
        if self.plan.names_with_style("cut" if linear is None else "join"):
            layer_context = replace(
                layer_context, sequence_parallel=False
            )  # activations have complete sequences here
        if linear is None:
            assert isinstance(old, nn.Embedding)
            split_embedding(old, table, layer_context)
            return
        biases = []
        if old.bias is not None:
            shard = table.shard
            rows = Partition(shard.shape[0], shard.start[0], shard.local[0])
            biases = [self._parameter(old, "bias", rows_shard(self._name(old, "bias"), rows, ()))]
            for parent in self.module.modules():  # a module around the head may have the bias, too
                parent._parameters |= {n: biases[0] for n, p in parent._parameters.items() if p is old.bias}
        whole_of = linear.outputs if self.gather_logits else 0
        self._replace(
            name,
            BatchFirstColumnLinear(
                [table], biases, layer_context, self.layer_context.tensor, linear, whole_of
            ),
        )
        if not self.gather_logits:
            self.result.head = SplitHead(self.layer_context, table, table.shard.extent[0])

    def _table(self, old: nn.Module) -> LayerGradientParameter:
        """Return this rank's rows of the matrix of an embedding or a head; tied ones get the same."""
        model_plan = old.get_parameter("weight")
        if model_plan not in self.tables:
            rows, width = model_plan.shape
            shard = vocabulary_shard(self._name(old, "weight"), rows, width, self.layer_context)
            self.tables[model_plan] = self._parameter(old, "weight", shard)
        return self.tables[model_plan]

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
