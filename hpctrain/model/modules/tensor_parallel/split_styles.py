"""Styles of tensor parallelism for the submodules, parameters and attributes of a user's module.

A style is a class with all that is known about it: its name in `model.plan`, its options, what it may be
applied to (`problems`), and how it changes the module (`apply`).

| style | in `model.plan` | applies to | on each tensor rank |
|---|---|---|---|
| `Column` | column | linear layer | rows of the weight |
| `GatheredColumn` | gathered column | linear layer | rows of the weight; outputs are gathered |
| `Row` | row | linear layer | columns of the weight; outputs are summed |
| `RowOfAllFeatures` | row of whole input | linear layer | as `Row`, for complete inputs |
| `RowWithSplitOutput` | row with split output | linear layer | as `Row`; some features of the sum |
| `Vocabulary` | vocabulary | embedding, output layer | rows of the table, which both may share |
| `SplitExperts` | expert | experts of `transformers` | some of the experts; outputs are summed |
| `SplitSortedExperts` | sorted expert | experts of Llama 4 | some of the experts; outputs are gathered |
| `SplitExpertsWithIdentities` | expert with identities | experts of LongCat-Flash | as `SplitExperts` |
| `SplitParameter` | split parameter | parameter of a submodule | a slice along one dim, as of sinks |
| `SummedResult` | sum | submodule with such parameters | outputs are summed |
| `PartialGradient` | partial | unsplit parameters | all, with a part of the gradient |
| `PartialFeatures` | partial features | unsplit submodule | its last outputs have a part of the gradient |
| `SequenceGradient` | sequence | unsplit parameters | the same under sequence parallelism alone |
| `GatheredInput` | gather | submodule with split layers | its input is gathered once, its gradient summed |
| `SlicedSequence` | cut | submodule | a slice of sequences is taken before it |
| `GatheredSequence` | join | submodule | slices of sequences are gathered before it |
| `DividedAttribute` | divided | integer attribute | its share, as of a number of heads |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import nn
from typing_extensions import override

from hpctrain.model.modules.tensor_parallel.activation_collectives import (
    enter_split,
    gather_sequence,
    scatter_sequence,
    sum_gradient_of_last,
)
from hpctrain.model.modules.tensor_parallel.expert_styles import (
    SplitExperts,
    SplitExpertsWithIdentities,
    SplitSortedExperts,
    SummedResult,
)
from hpctrain.model.modules.tensor_parallel.module_names import ModuleNames, matches_pattern
from hpctrain.model.modules.tensor_parallel.parallel_layers import (
    BatchFirstColumnLinear,
    BatchFirstRowLinear,
    LinearSizes,
    split_embedding,
)
from hpctrain.model.modules.tensor_parallel.style_base import SplitStyle
from hpctrain.parallel.shards import Partition, split_shard

if TYPE_CHECKING:
    from hpctrain.model.modules.tensor_parallel.apply_plan import ModuleSplit


class LinearStyle(SplitStyle):
    """Style of a linear layer, which is replaced by a parallel one."""

    covers_parameters = splits_parameters = True

    @override
    def _module_problems(self, part: nn.Module, name: str, ranks: int) -> Iterator[str]:
        linear = LinearSizes.of(part)
        if linear is None:
            layer = f'{name} has the class {type(part).__name__}, which does not support "{self.name}"'
            yield f"{layer} (nn.Linear and Conv1D of `transformers` do)"
        else:
            yield from self._size_problems(linear, name, ranks)

    @abstractmethod
    def _size_problems(self, linear: LinearSizes, name: str, ranks: int) -> Iterator[str]:
        """Yield the reasons why ranks cannot split a linear layer of these sizes."""

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        old = split.module.get_submodule(name)
        linear = LinearSizes.of(old)
        assert linear is not None
        split.replace(old, self._layer(split, name, old, linear))

    @abstractmethod
    def _layer(self, split: ModuleSplit, name: str, old: nn.Module, linear: LinearSizes) -> nn.Module:
        """Return the layer that replaces the linear layer `old` of these sizes."""


@dataclass(frozen=True)
class Column(LinearStyle):
    """Linear layer of which each rank computes some output features.

    Attributes:
        parts: Sizes of the matrices that are packed into one weight, or the number of equal ones.
        unit: Ranks get multiples of so many rows, such as the size of an attention head.
    """

    name = "column"
    options: ClassVar[tuple[str, ...]] = ("parts", "unit")
    gathers: ClassVar[bool] = False

    parts: int | tuple[int, ...] = 1
    unit: int | None = None

    def part_sizes(self, outputs: int) -> list[int] | None:
        """Return the sizes of the matrices packed into so many outputs, or None if they do not fit."""
        if isinstance(self.parts, tuple):
            return list(self.parts) if sum(self.parts) == outputs else None
        return None if outputs % self.parts else [outputs // self.parts] * self.parts

    @override
    def _size_problems(self, linear: LinearSizes, name: str, ranks: int) -> Iterator[str]:
        sizes = self.part_sizes(linear.outputs)
        if sizes is None:
            total = f"which do not divide into {self.parts} equal parts"
            if isinstance(self.parts, tuple):
                total = f"but parts = {list(self.parts)} add up to {sum(self.parts)}"
            yield f"{name} has {linear.outputs} outputs, {total}"
            return
        for size in sizes:
            unit = self.unit or 1
            count = size // unit
            of = f"{name} has {size} outputs" + (" in a part" if len(sizes) > 1 else "")
            if size % unit:
                yield f"{of}, which must be a multiple of unit = {unit}"
            elif count % ranks and (self.unit is None or ranks % count):
                units = f" in {count} units of {unit}" if self.unit is not None else ""
                relation = "a multiple or a divisor of" if units else "a multiple of"
                yield f"{of}{units}, which must be {relation} layout.tensor = {ranks}"

    @override
    def _layer(self, split: ModuleSplit, name: str, old: nn.Module, linear: LinearSizes) -> nn.Module:
        tensor, sizes = split.layer_context.tensor, self.part_sizes(linear.outputs)
        assert sizes is not None
        weights, biases, start = [], [], 0
        for size in sizes:
            part = Partition.split(size, tensor, self.unit or 1)
            rows = replace(part, size=linear.outputs, start=start + part.start)
            shard = split_shard(split.parameter_name(old, "weight"), rows, linear.inputs)
            weights.append(split.parameter(old, "weight", shard, linear.transposed))
            biases += split.replace_biases(old, rows)
            start += size
        return BatchFirstColumnLinear(split.context_of(name), weights, biases, linear, tensor, self.gathers)


class GatheredColumn(Column):
    """Column whose outputs are gathered, so that all ranks have all features."""

    name, options, gathers = "gathered column", (), True


class Row(LinearStyle):
    """Linear layer of which each rank multiplies some input features. The ranks sum the products."""

    name = "row"
    splits_input: ClassVar[bool] = False
    splits_output: ClassVar[bool] = False

    @override
    def _size_problems(self, linear: LinearSizes, name: str, ranks: int) -> Iterator[str]:
        if linear.inputs % ranks:
            yield f"{name} has {linear.inputs} inputs, which must be a multiple of layout.tensor = {ranks}"
        if self.splits_output and linear.outputs % ranks:
            yield f"{name} has {linear.outputs} outputs, which must be a multiple of layout.tensor = {ranks}"

    @override
    def _layer(self, split: ModuleSplit, name: str, old: nn.Module, linear: LinearSizes) -> nn.Module:
        layer_context = split.layer_context
        columns = Partition.split(linear.inputs, layer_context.tensor)
        shard = split_shard(split.parameter_name(old, "weight"), columns, linear.outputs)
        weights = [split.parameter(old, "weight", shard, not linear.transposed)]
        return BatchFirstRowLinear(
            layer_context, weights, split.replace_biases(old), linear, self.splits_input, self.splits_output
        )


class RowOfAllFeatures(Row):
    """Row whose input has all features. The layer itself takes those of the rank."""

    name, splits_input = "row of whole input", True


class RowWithSplitOutput(Row):
    """Row of whose summed outputs each rank continues with some features."""

    name, splits_output, needs_whole_sequences = "row with split output", True, True


class Vocabulary(SplitStyle):
    """Embedding, or linear layer that computes logits, with some tokens of the vocabulary on each rank."""

    name = "vocabulary"
    covers_parameters = splits_parameters = True

    @override
    def _module_problems(self, part: nn.Module, name: str, ranks: int) -> Iterator[str]:
        linear = LinearSizes.of(part)
        if linear is None and (why := _lookup_problem(part)):
            yield f'{name} does not support "vocabulary": {why}'
        elif linear is not None and linear.transposed:
            yield f'{name} is a Conv1D, which does not support "vocabulary" (nn.Linear and nn.Embedding do)'

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        old = split.module.get_submodule(name)
        table, linear = split.table(old), LinearSizes.of(old)
        layer_context = split.layer_context if linear is None else split.context_of(name)
        if split.plan.names_with_style(SlicedSequence if linear is None else GatheredSequence):
            # Sequences are complete here: ranks slice them after the embedding, or gather them before the
            # head.
            layer_context = replace(layer_context, sequence_parallel=False)
        if linear is None:
            assert isinstance(old, nn.Embedding)
            split_embedding(old, table, layer_context)
            return
        shard = table.shard
        biases = split.replace_biases(old, Partition(shard.shape[0], shard.start[0], shard.local[0]))
        for bias in biases:
            for parent in split.module.modules():  # a module around the head may have the bias, too
                parent._parameters |= {n: bias for n, p in parent._parameters.items() if p is old.bias}
        gathers, tensor = split.gather_logits, split.layer_context.tensor
        split.replace(old, BatchFirstColumnLinear(layer_context, [table], biases, linear, tensor, gathers))
        if not gathers:
            split.set_head(table)


def _lookup_problem(module: nn.Module) -> str:
    """Return why a module cannot be split as an embedding, or "" if it can.

    A subclass of nn.Embedding may do anything with the rows, but must get them from nn.Embedding's forward.
    """
    if not isinstance(module, nn.Embedding):
        return f"it has the class {type(module).__name__} (nn.Embedding and nn.Linear are supported)"
    for name in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, name):
            return f"it has {name}"
    for kind in type(module).__mro__[: type(module).__mro__.index(nn.Embedding)]:
        code = getattr(vars(kind).get("forward"), "__code__", None)
        if "forward" in vars(kind) and (code is None or "super" not in code.co_names):
            return f"its class {kind.__name__} does not use the forward method of nn.Embedding"
    return ""


class PartialGradient(SplitStyle):
    """Parameters that each rank holds completely, with a part of the gradient."""

    name = "partial"
    covers_parameters = True

    @override
    def problems(self, names: ModuleNames, name: str, ranks: int) -> Iterator[str]:
        part = names.modules.get(name)
        if part is not None and not any(True for _ in part.parameters()):
            yield f'{name} has no parameters, which "{self.name}" requires'

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        try:
            split.partial.update(split.module.get_submodule(name).parameters())
        except AttributeError:
            split.partial.add(split.module.get_parameter(name))


@dataclass(frozen=True)
class PartialFeatures(SplitStyle):
    """Unsplit submodule whose last outputs enter split heads directly, not by a split layer.

    An example is the projection of compressed keys and values in latent attention: all heads share its last
    features. Each rank computes the gradient of its own heads there. The ranks sum these gradients.

    Attributes:
        features: Number of these outputs.
    """

    name = "partial features"
    options = ("features",)
    needs_whole_sequences, may_be_gathered = True, False

    features: int = 0

    @override
    def _module_problems(self, part: nn.Module, name: str, ranks: int) -> Iterator[str]:
        linear = LinearSizes.of(part)
        if not self.features:
            yield f'{name} requires the option features of "{self.name}", a number of outputs'
        elif linear is not None and self.features > linear.outputs:
            yield f"{name} has {linear.outputs} outputs, fewer than features = {self.features}"

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        split.change_output(name, partial(sum_gradient_of_last, split.layer_context, self.features))


@dataclass(frozen=True)
class SplitParameter(SplitStyle):
    """Parameter of a submodule that computes with it itself, such as a value for each head.

    Attributes:
        dim: Dim of which each rank holds a slice.
    """

    name = "split parameter"
    options = ("dim",)
    covers_parameters = splits_parameters = True

    dim: int = 0

    @override
    def problems(self, names: ModuleNames, name: str, ranks: int) -> Iterator[str]:
        parameter = names.parameters.get(name)
        if parameter is None:
            remedy = "use the name of a parameter"
            yield f'{name} is a submodule, for which "{self.name}" is unsupported ({remedy})'
        elif self.dim >= parameter.dim():
            yield f"{name} has {parameter.dim()} dims, so dim = {self.dim} does not exist"
        elif parameter.shape[self.dim] % ranks:
            size = f"size {parameter.shape[self.dim]} in dim {self.dim}"
            yield f"{name} has the {size}, which must be a multiple of layout.tensor = {ranks}"
        other = next((n for n, each in names.parameters.items() if each is parameter and n != name), None)
        if other:
            yield f'{name} and {other} are one parameter, for which "{self.name}" is unsupported'

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        shape = split.module.get_parameter(name).shape
        piece = Partition.split(shape[self.dim], split.layer_context.tensor)
        split.replace_parameter(name, split_shard(name, *shape[: self.dim], piece, *shape[self.dim + 1 :]))


class SequenceGradient(PartialGradient):
    """Parameters that, with sequence parallelism, each rank applies to its slice of sequences."""

    name = "sequence"

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        if split.layer_context.sequence_parallel:
            super().apply(split, name)


class GatheredInput(SplitStyle):
    """Submodule whose input is gathered once for all split layers inside of it."""

    name = "gather"
    may_be_gathered = False

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        split.change_input(name, partial(enter_split, split.layer_context))


class SequenceStyle(SplitStyle):
    """Style of a submodule before which, with sequence parallelism, sequences are cut or joined.

    Attributes:
        joins: True if slices of sequences are gathered, False if each rank takes its slice.
    """

    joins: ClassVar[bool]

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        if split.layer_context.sequence_parallel:
            exchange = gather_sequence if self.joins else scatter_sequence
            split.change_input(name, partial(exchange, split.layer_context.tensor))


class SlicedSequence(SequenceStyle):
    """Submodule before which, with sequence parallelism, each rank takes its slice of sequences."""

    name, joins = "cut", False


class GatheredSequence(SequenceStyle):
    """Submodule before which, with sequence parallelism, the slices of sequences are gathered."""

    name, joins = "join", True


@dataclass(frozen=True)
class DividedAttribute(SplitStyle):
    """Integer attribute, such as a number of heads, of which each rank has its share.

    Attributes:
        units: How many units the attribute counts. It is divided by the number of ranks that share one unit;
            None divides by the number of all ranks.
    """

    name = "divided"
    options = ("units",)

    units: int | None = None

    @override
    def matching(self, names: ModuleNames, pattern: str) -> list[str]:
        owner_name, _, attribute = pattern.rpartition(".")
        outer, _, object_name = owner_name.rpartition(".")
        owners = [name for name in ("", *names.modules) if matches_pattern(owner_name, name)]
        if outer:
            outside = (name for name in names.modules if matches_pattern(outer, name))
            owners += [f"{name}.{object_name}" for name in outside]
        matching = dict.fromkeys(f"{owner}.{attribute}" if owner else attribute for owner in owners)
        return [name for name in matching if _find_attribute(names.module, name)]

    @override
    def no_match_message(self, names: ModuleNames, pattern: str) -> str:
        return "matches no integer attribute of a submodule"

    @override
    def problems(self, names: ModuleNames, name: str, ranks: int) -> Iterator[str]:
        place, divisor = _find_attribute(names.module, name), self._divisor(ranks)
        assert place is not None
        if divisor is None:
            yield f"{name}: units = {self.units} must be a multiple or a divisor of layout.tensor = {ranks}"
        elif place.value % divisor:
            yield f"{name} = {place.value} must be a multiple of {divisor}"

    def _divisor(self, ranks: int) -> int | None:
        """Return the number that the attribute is divided by, or None if ranks cannot share its units."""
        if self.units is None:
            return ranks
        if self.units % ranks == 0:
            return 1
        return ranks // self.units if ranks % self.units == 0 else None

    @override
    def apply(self, split: ModuleSplit, name: str) -> None:
        place = _find_attribute(split.module, name)
        divisor = self._divisor(split.layer_context.tensor.size)
        assert place is not None and divisor is not None
        owner: object = place.module
        if place.object_name:
            # Other modules share this object and need its value unchanged: this module gets a copy.
            owner = copy(getattr(place.module, place.object_name))
            setattr(place.module, place.object_name, owner)
        setattr(owner, name.rpartition(".")[2], place.value // divisor)


class _AttributePlace(NamedTuple):
    """Place and value of an integer attribute of a submodule, or of an object, such as a config, in it.

    Attributes:
        module: The submodule.
        object_name: Name of the object in the submodule; "" if the submodule has the attribute itself.
        value: Value of the attribute.
    """

    module: nn.Module
    object_name: str
    value: int


def _find_attribute(module: nn.Module, name: str) -> _AttributePlace | None:
    """Return the place of an integer attribute, or None if there is none.

    Args:
        module: The user's module.
        name: Name of the attribute with dots, such as "blocks.0.attention.heads" or "blocks.0.config.heads".
    """
    owner_name, _, attribute = name.rpartition(".")
    outer, _, object_name = owner_name.rpartition(".")
    for path, inner in ((owner_name, ""), (outer, object_name)):
        try:
            submodule = module.get_submodule(path)
        except AttributeError:
            continue
        owner = getattr(submodule, inner, None) if inner else submodule
        value = getattr(owner, attribute, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return _AttributePlace(submodule, inner, value)
    return None


STYLES: Mapping[str, type[SplitStyle]] = {
    style.name: style
    for style in (
        *(Column, Row, GatheredColumn, RowOfAllFeatures, RowWithSplitOutput, Vocabulary),
        *(SplitParameter, PartialGradient, PartialFeatures, SequenceGradient, GatheredInput),
        *(SlicedSequence, GatheredSequence, DividedAttribute),
        *(SplitExperts, SplitSortedExperts, SplitExpertsWithIdentities, SummedResult),
    )
}
"""All styles by their name in `model.plan`."""
