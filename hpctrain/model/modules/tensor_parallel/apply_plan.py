"""Application of a tensor-parallel plan: parallel layers replace parts of a module on "meta", in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from hpctrain.errors import HpctrainError
from hpctrain.model.modules.module_call import set_forward
from hpctrain.model.modules.tensor_parallel.parallel_layers import (
    LayerGradientParameter,
    has_gradient_hooks,
    replacement,
)
from hpctrain.model.modules.tensor_parallel.split_plan import SplitPlan
from hpctrain.model.modules.tensor_parallel.split_styles import GatheredInput
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter, Partition, Shard, split_shard
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


def apply_plan(
    module: nn.Module, plan: SplitPlan, layer_context: LayerContext, gather_logits: bool
) -> ModuleSplit:
    """Split a module over the tensor ranks of `layer_context`, in place. With one rank it stays unchanged.

    Args:
        module: The module on "meta".
        plan: A plan without problems.
        layer_context: Process groups of this rank's layers.
        gather_logits: True if the head gathers its logits.
    """
    assert not plan.problems
    split = ModuleSplit(module, plan, layer_context, gather_logits)
    if layer_context.tensor.size > 1:
        for name, style in plan.styles.items():
            style.apply(split, name)
    return split


class ModuleSplit:
    """State of splitting one module: the module, its plan, and what styles record and share.

    `apply_plan` creates it, passes it to the styles, and returns it.

    Attributes:
        names: First name of each parameter that the module had.
        partial: Parameters that are complete but have partial gradients on tensor ranks.
        head: Output layer whose logits are split; None if there is none.
    """

    def __init__(
        self, module: nn.Module, plan: SplitPlan, layer_context: LayerContext, gather_logits: bool
    ) -> None:
        self.module, self.plan, self.layer_context = module, plan, layer_context
        self.gather_logits = gather_logits
        self.names = {each: name for name, each in module.named_parameters()}
        self.partial: set[nn.Parameter] = set()
        self.head: SplitHead | None = None
        self._gathered = tuple(f"{name}." for name in plan.names_with_style(GatheredInput))
        self._unsplit_context = layer_context.unsplit()
        self._tables: dict[nn.Parameter, LayerGradientParameter] = {}

    def context_of(self, name: str) -> LayerContext:
        """Return the context of a layer.

        Layers inside a submodule whose input is gathered leave the sum of gradients to that submodule.
        """
        return self._unsplit_context if name.startswith(self._gathered) else self.layer_context

    def change_input(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Make later calls of a submodule change its first tensor argument by a function."""
        part = self.module.get_submodule(name)
        set_forward(part, partial(_call_with_changed_input, change, part.forward))

    def change_output(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Make later calls of a submodule change the tensor that it returns by a function."""
        part = self.module.get_submodule(name)
        part.register_forward_hook(lambda _module, _arguments, output: change(output))

    def replace(self, old: nn.Module, by: nn.Module) -> None:
        """Replace a submodule under all names that it has."""
        for parent in list(self.module.modules()):
            for child, each in list(parent._modules.items()):
                if each is old:
                    setattr(parent, child, by)

    def parameter_name(self, old: nn.Module, attribute: str) -> str:
        """Return the name of a parameter of a submodule in the module."""
        return self.names[old.get_parameter(attribute)]

    def parameter(
        self, old: nn.Module, attribute: str, shard: Shard, transposed: bool = False
    ) -> LayerGradientParameter:
        """Return the parameter that replaces one of a submodule.

        Args:
            old: The submodule.
            attribute: Name of its parameter.
            shard: This rank's piece.
            transposed: True if the parameter is the transpose of the matrix that the shard describes.
        """
        original = old.get_parameter(attribute)
        self._require_no_hooks(original, shard.name)
        if transposed:
            shape, start, local = shard.shape[::-1], shard.start[::-1], shard.local[::-1]
            shard = replace(shard, shape=shape, start=start, local=local)
        return replacement(LayerGradientParameter, original, shard)

    def replace_parameter(self, name: str, shard: Shard) -> None:
        """Replace a parameter, by its only name, by this rank's piece, which its submodule computes with."""
        original = self.module.get_parameter(name)
        self._require_no_hooks(original, name)
        parent, _, attribute = name.rpartition(".")
        setattr(self.module.get_submodule(parent), attribute, replacement(Parameter, original, shard))

    def _require_no_hooks(self, original: nn.Parameter, name: str) -> None:
        """Raise HpctrainError if a parameter has gradient hooks, which split parameters cannot have."""
        if has_gradient_hooks(original):
            raise HpctrainError(
                f"model.plan: {name}: has gradient hooks, which are unsupported for split parameters "
                "(leave it out of the plan)"
            )

    def replace_biases(self, old: nn.Module, rows: Partition | None = None) -> list[LayerGradientParameter]:
        """Create the parameter that replaces a layer's bias on this rank.

        Args:
            old: The layer.
            rows: Elements of the bias that this rank holds; None for all, whose gradients are partial sums
                under sequence parallelism.

        Returns:
            A list of the new parameter, or [] if the layer has no bias.
        """
        bias = old._parameters.get("bias")
        if bias is None:
            return []
        name, partial_axes = self.parameter_name(old, "bias"), self.layer_context.sequence_partial
        unsplit = Shard.replicated(name, tuple(bias.shape), partial_axes)
        return [self.parameter(old, "bias", unsplit if rows is None else split_shard(name, rows))]

    def set_head(self, table: LayerGradientParameter) -> None:
        """Set the output layer whose logits are split, by its table."""
        self.head = SplitHead(self.layer_context, table, table.shard.extent[0])

    def table(self, old: nn.Module) -> LayerGradientParameter:
        """Return this rank's rows of the matrix of an embedding or a head; tied ones get the same."""
        weight = old.get_parameter("weight")
        if weight not in self._tables:
            rows, width = weight.shape
            shard = vocabulary_shard(self.names[weight], rows, width, self.layer_context)
            self._tables[weight] = self.parameter(old, "weight", shard)
        return self._tables[weight]


def _call_with_changed_input(
    change: Callable[[Tensor], Tensor], forward: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Call `forward` with a function applied to its first floating-point tensor."""
    values: dict[Any, Any] = {**dict(enumerate(arguments)), **named}
    for key, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            values[key] = change(value)
            break
    positional = [values.pop(place) for place in range(len(arguments))]
    return forward(*positional, **values)
