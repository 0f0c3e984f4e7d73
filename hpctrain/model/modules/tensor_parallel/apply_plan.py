"""A plan carried out: parts of a module, which has no memory yet, are replaced in place by parallel ones."""

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
from hpctrain.model.modules.tensor_parallel.activation_collectives import cut, entered, joined
from hpctrain.model.modules.tensor_parallel.parallel_layers import (
    BatchFirstColumnLinear,
    BatchFirstRowLinear,
    LateParameter,
    Linear,
    is_hooked,
    split_lookup,
    spread_experts,
)
from hpctrain.model.modules.tensor_parallel.split_plan import (
    LINEAR,
    SplitPlan,
    SplitRule,
    attribute_of,
    divisor,
    part_sizes,
)
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Shard
from hpctrain.parallel.tensor import RowPartition, rows_shard
from hpctrain.parallel.vocabulary import vocabulary_shard


@dataclass(frozen=True)
class SplitHead:
    """A head whose logits are split over the vocabulary: the first `rows` of a rank's `table` are any."""

    groups: LayerContext
    table: LateParameter
    rows: int


@dataclass(frozen=True)
class SplitOutputs:
    """What a module gives, with logits [b, s, V/t] of a head."""

    outputs: Any
    head: SplitHead


@dataclass
class Split:
    """What of a module was split: parameters that are whole but have partial gradients, and its head."""

    partial: set[nn.Parameter] = field(default_factory=set)
    head: SplitHead | None = None


def split_module(module: nn.Module, plan: SplitPlan, groups: LayerContext, whole_logits: bool) -> Split:
    """Split a module by a plan without problems over the tensor ranks of `groups`; with one rank it stays.

    With `whole_logits` its head gathers them.
    """
    assert not plan.problems
    if groups.tensor.size == 1:
        return Split()
    return _Splitting(module, plan, groups, whole_logits).done


class _Splitting:
    """Replaces all that is planned when it is made."""

    def __init__(self, module: nn.Module, plan: SplitPlan, groups: LayerContext, whole_logits: bool) -> None:
        self.module, self.plan, self.groups = module, plan, groups
        self.whole_logits = whole_logits
        # What lies in a part whose input is gathered, or copied, leaves the sum of gradients to that.
        alone = planned_group(("tensor",), 0, 1, Ledger())
        self.inside = replace(groups, tensor=alone, sequence_parallel=False)
        self.gathered = tuple(f"{name}." for name in plan.of_style("gather"))
        self.tables: dict[nn.Parameter, LateParameter] = {}
        self.names = {each: name for name, each in module.named_parameters()}
        self.done = Split()
        for name, wish in plan.wishes.items():
            self._carry_out(name, wish)

    def _carry_out(self, name: str, wish: SplitRule) -> None:
        if wish.style == "divided":
            self._divide(name, wish)
        elif wish.style in {"partial", "sequence"}:
            if wish.style == "partial" or self.groups.sequence_parallel:
                self.done.partial |= set(self._parameters(name))
        elif wish.style == "gather":
            self._surround(name, partial(entered, self.groups))
        elif wish.style in {"cut", "join"}:
            if self.groups.sequence_parallel:
                change = cut if wish.style == "cut" else joined
                self._surround(name, partial(change, self.groups.tensor))
        elif wish.style in LINEAR:
            self._replace(name, self._linear(name, wish))
        elif wish.style == "expert":
            part = self.module.get_submodule(name)
            spread_experts(part, self.names, self._groups_of(name), self.groups.tensor)
        else:
            self._vocabulary(name)

    def _parameters(self, name: str) -> list[nn.Parameter]:
        try:
            return list(self.module.get_submodule(name).parameters())
        except AttributeError:
            return [self.module.get_parameter(name)]

    def _surround(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Have the first tensor that a part is called with changed."""
        part = self.module.get_submodule(name)
        # Who looks for its forward method finds this one first.
        vars(part)["forward"] = partial(_with_first, change, part.forward)

    def _divide(self, name: str, wish: SplitRule) -> None:
        found, by = attribute_of(self.module, name), divisor(wish, self.groups.tensor.size)
        assert found is not None and by is not None
        holder, attribute, within = found
        if within:
            # What parts have in common is whole for the others: this one gets its own.
            home = self.module.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
            holder = copy(holder)
            setattr(home, within, holder)
        setattr(holder, attribute, getattr(holder, attribute) // by)

    def _replace(self, name: str, by: nn.Module) -> None:
        """Put a module in the place of another, under all names that this has."""
        old = self.module.get_submodule(name)
        for home in list(self.module.modules()):
            for child, each in list(home._modules.items()):
                if each is old:
                    setattr(home, child, by)

    def _groups_of(self, name: str) -> LayerContext:
        return self.inside if name.startswith(self.gathered) else self.groups

    def _linear(self, name: str, wish: SplitRule) -> nn.Module:
        old = self.module.get_submodule(name)
        linear, tensor = Linear.of(old), self.groups.tensor
        assert linear is not None
        if wish.style in {"row", "row of whole input"}:
            columns = RowPartition.split(linear.inputs, tensor)
            shard = rows_shard(self._name(old, "weight"), columns, (linear.outputs,))
            weight = self._parameter(old, "weight", shard if linear.transposed else _turned(shard))
            whole = (linear.outputs,), self.groups.sequence_partial
            bias = None
            if old.bias is not None:
                bias = self._parameter(old, "bias", Shard.whole(self._name(old, "bias"), *whole))
            return BatchFirstRowLinear(weight, bias, self.groups, linear, wish.style == "row of whole input")
        sizes = part_sizes(linear.outputs, wish.parts)
        assert sizes is not None
        weights, biases, start = [], [], 0
        for size in sizes:
            part = RowPartition.split(size, tensor, wish.unit or 1)
            rows = replace(part, size=linear.outputs, start=start + part.start)
            shard = rows_shard(self._name(old, "weight"), rows, (linear.inputs,))
            weights.append(self._parameter(old, "weight", _turned(shard) if linear.transposed else shard))
            if old.bias is not None:
                of_bias = rows_shard(self._name(old, "bias"), rows, ())
                biases.append(self._parameter(old, "bias", of_bias))
            start += size
        whole_of = linear.outputs if wish.style == "gathered column" else 0
        return BatchFirstColumnLinear(weights, biases, self._groups_of(name), tensor, linear, whole_of)

    def _vocabulary(self, name: str) -> None:
        old = self.module.get_submodule(name)
        table, linear = self._table(old), Linear.of(old)
        groups = self.groups if linear is None else self._groups_of(name)
        if self.plan.of_style("cut" if linear is None else "join"):
            groups = replace(groups, sequence_parallel=False)  # there are whole sequences
        if linear is None:
            assert isinstance(old, nn.Embedding)
            split_lookup(old, table, groups)
            return
        biases = []
        if old.bias is not None:
            shard = table.shard
            rows = RowPartition(shard.shape[0], shard.start[0], shard.local[0])
            biases = [self._parameter(old, "bias", rows_shard(self._name(old, "bias"), rows, ()))]
            for home in self.module.modules():  # one around the head may have it, too
                home._parameters |= {n: biases[0] for n, p in home._parameters.items() if p is old.bias}
        whole_of = linear.outputs if self.whole_logits else 0
        self._replace(
            name, BatchFirstColumnLinear([table], biases, groups, self.groups.tensor, linear, whole_of)
        )
        if not self.whole_logits:
            self.done.head = SplitHead(self.groups, table, table.shard.extent[0])

    def _table(self, old: nn.Module) -> LateParameter:
        """Our rows of the matrix of an embedding or a head, one where these are tied."""
        theirs = old.get_parameter("weight")
        if theirs not in self.tables:
            rows, width = theirs.shape
            shard = vocabulary_shard(self._name(old, "weight"), rows, width, self.groups)
            self.tables[theirs] = self._parameter(old, "weight", shard)
        return self.tables[theirs]

    def _name(self, old: nn.Module, attribute: str) -> str:
        return self.names[old.get_parameter(attribute)]

    def _parameter(self, old: nn.Module, attribute: str, shard: Shard) -> LateParameter:
        if is_hooked(old.get_parameter(attribute)):
            raise HpctrainError(
                f"model.plan: {shard.name}: has gradient hooks, which are unsupported for split parameters "
                "(leave it out of the plan)"
            )
        trained = old.get_parameter(attribute).requires_grad
        own = LateParameter(shard, decayed=len(shard.shape) > 1 and trained)
        own.requires_grad_(trained)
        return own


def _turned(shard: Shard) -> Shard:
    """That of a transposed matrix."""
    shape, start, local = shard.shape[::-1], shard.start[::-1], shard.local[::-1]
    return replace(shard, shape=shape, start=start, local=local)


def _with_first(
    change: Callable[[Tensor], Tensor], forward: Callable[..., Any], *given: Any, **named: Any
) -> Any:
    """What a part gives, whose first tensor of fractions is changed."""
    values = [*given]
    for place, value in enumerate(values):
        if isinstance(value, Tensor) and value.is_floating_point():
            values[place] = change(value)
            return forward(*values, **named)
    for name, value in named.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            return forward(*values, **{**named, name: change(value)})
    return forward(*values, **named)
