"""Layers of a user's module: its blocks, and what is outside of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.errors import HpctrainError
from hpctrain.model.modules.module_architecture import persistent_buffers
from hpctrain.model.modules.nested_tensors import tensors_of
from hpctrain.model.modules.tensor_parallel.parallel_layers import LayerGradientParameter
from hpctrain.model.part import Layer, LayerKind, Unit
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import MatrixSize
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.tensor import MatmulLayer, SplitLinear
from hpctrain.parallel.vocabulary import VocabularyHead

if TYPE_CHECKING:
    from hpctrain.model.modules.module_part import ModulePart


class ModuleLayer(Layer):
    """A layer of a user's module: the parameters of a block, or some that belong to no block or to several.

    The latter are used before, between and after blocks, and so stay gathered until the end of a step.

    Args:
        kind: Kind of the layer.
        is_block: True for a block.
        parameters: Its parameters.
        modules: Modules that it computes.
        replaced: Layers that compute in place of linear layers, by the linear layer.
        sequence: Tokens of a sample.
        other_part_parameters: Parameters of another part to whose gradients this layer adds, too.

    Attributes:
        state_owner: Owner of further state, such as the buffers of the module; None if there is none.
        owner: The part that has the layer, and the layer's index in it.
    """

    owner: tuple[ModulePart, int]

    def __init__(
        self,
        kind: str,
        is_block: bool,
        parameters: Sequence[Parameter],
        modules: Sequence[nn.Module],
        replaced: Mapping[nn.Module, SplitLinear],
        sequence: int,
        other_part_parameters: Sequence[Parameter] = (),
    ) -> None:
        super().__init__()
        self.is_block, self.keeps_gathered = is_block, not is_block
        self.other_part_parameters, self.sequence = tuple(other_part_parameters), sequence
        self.kind, self._matrices = LayerKind(kind), matrices_in(modules)
        layers = (each if isinstance(each, SplitLinear) else replaced.get(each) for each in modules)
        self._product_layers = [each for each in layers if each is not None]  # in a list: no submodules
        self.state_owner: object = None
        for number, parameter in enumerate(parameters):
            self.register_parameter(str(number), parameter)

    def units(self) -> Iterator[Unit]:
        """Yield each parameter as a unit of its own. The parts of a packed one stay together."""
        if self.all_parameters:
            yield [
                list(each) for _, each in groupby(self.all_parameters, lambda parameter: parameter.shard.name)
            ]

    @cached_property
    @override
    def gather_keys(self) -> list[Parameter]:
        return [*self.all_parameters[:1], *self.other_part_parameters]

    @override
    def backward_order(self) -> Iterator[tuple[Parameter | None, list[Parameter]]]:
        parameters = self.all_parameters
        yield None if self.is_block or not parameters else parameters[0], parameters[::-1]
        if self.other_part_parameters:
            yield self.other_part_parameters[0], list(self.other_part_parameters)

    @property
    @override
    def deferred_parameters(self) -> set[Parameter]:
        return {
            parameter for parameter in self.all_parameters if isinstance(parameter, LayerGradientParameter)
        }

    @property
    @override
    def product_layers(self) -> list[SplitLinear | VocabularyHead]:
        return [*self._product_layers]

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        return self._matrices


def matrices_in(modules: Sequence[nn.Module]) -> list[MatrixSize]:
    """Return the matrices of linear layers among modules: 2-dim weights except those of embeddings."""
    split = [matrix for each in modules if isinstance(each, MatmulLayer) for matrix in each.matrices]
    plain = (each for each in modules if not isinstance(each, nn.Embedding | MatmulLayer))
    weights = (each._parameters.get("weight") for each in plain)  # reading a derived weight may fail
    matrices = [weight for weight in weights if isinstance(weight, nn.Parameter) and weight.dim() == 2]
    return [*split, *(MatrixSize(weight.shape[0], weight.shape[1], "whole") for weight in matrices)]


class BlockRunner:
    """Replacement of a block's forward method that gathers parameters and may recompute the block.

    It raises HpctrainError if the block changes its inputs in place and they are needed unchanged.

    Args:
        name: Name of the block.
        block: The block.
        layer: Layer with its parameters, which belongs to a part when a pass runs.
        layer_context: Context of the layer.
    """

    def __init__(self, name: str, block: nn.Module, layer: ModuleLayer, layer_context: LayerContext) -> None:
        self.name, self.block, self.layer, self.layer_context = name, block, layer, layer_context
        self.forward = block.forward
        self.buffers = [*persistent_buffers(block)] if layer_context.saved_policy.recomputes_calls else []

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the block and return its result."""
        inputs, policy = list(tensors_of((arguments, keywords))), self.layer_context.saved_policy
        forward_once = preserve_buffers(self.block, self.buffers, self.forward)
        compute = partial(policy.call, partial(self._call_alone, forward_once), *arguments, **keywords)
        part = self.layer.owner[0]
        residency = part.residency
        if residency.gathers:
            part.note_call(self.name)
        needed = torch.is_grad_enabled() and (policy.recomputes_calls or residency.gathers)
        versions = _versions(inputs) if needed else []
        if self.layer.all_parameters:
            result = residency.run_module(self.layer.all_parameters[0], compute, inputs, tensors_of)
        else:
            result = compute()
        if needed and _versions(inputs) != versions:
            why = 'memory.recompute = "full"' if policy.recomputes_calls else "layout.zero = 3"
            raise HpctrainError(
                f"{self.name}: changes its input in place, which conflicts with {why} (use x = x + y "
                "instead of x += y)"
            )
        return result

    def _call_alone(self, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run the block without deferring weight gradients, because this may be part of a backward pass."""
        with self.layer_context.weight_gradients.outside_run():
            return forward(*arguments, **keywords)


def _versions(tensors: list[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place."""
    return [tensor._version for tensor in tensors]


def preserve_buffers(
    block: nn.Module, names: Collection[str], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a forward method for one pass of a block, during which backward may call it again.

    Each further call starts with the buffers that the first call found, and leaves them unchanged. So running
    statistics, for example, are updated once.

    Args:
        block: The block.
        names: Names of its persistent buffers.
        forward: Its own forward method.
    """
    first_values: list[Tensor] = []

    def compute(*arguments: Any, **keywords: Any) -> Any:
        buffers = [block.get_buffer(name) for name in names]
        if not first_values:
            first_values.extend(buffer.clone() for buffer in buffers)
            return forward(*arguments, **keywords)
        latest_values = [buffer.clone() for buffer in buffers]
        _copy_values(first_values, buffers)
        try:
            return forward(*arguments, **keywords)
        finally:
            _copy_values(latest_values, buffers)

    return compute if names else forward


def _copy_values(values: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)  # without a new version, as autograd may have saved the tensor
