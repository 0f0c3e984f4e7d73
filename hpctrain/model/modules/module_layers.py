"""The layers of a module that users bring: its blocks, and what is outside of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.errors import HpctrainError
from hpctrain.model.modules.module_architecture import kept_buffers
from hpctrain.model.modules.module_trace import LayerTrace
from hpctrain.model.modules.nested_tensors import tensors_of
from hpctrain.model.modules.tensor_parallel.parallel_layers import LateParameter
from hpctrain.model.part import Layer
from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import MatrixSize
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.tensor import MatmulLayer, SplitLinear
from hpctrain.parallel.vocabulary import VocabularyHead


class ModuleLayer(Layer):
    """Some of a module's parameters, which are there together; `modules` are those that it computes, and
    `multipliers` what has a Product of these, or in the place of these.

    What the module has besides is in what one of them `keeps`. What they save and compute is what `traced`
    found, for a micro-batch (None: what a token computes), or why nothing was found. Backward adds to
    `borrowed` parameters of another layer, too.
    """

    traced: Callable[[ActivationSizes | None], LayerTrace | str]

    def __init__(
        self,
        kind: str,
        parameters: Sequence[Parameter],
        modules: Sequence[nn.Module],
        multipliers: Sequence[SplitLinear],
        sequence: int,
        borrowed: Sequence[Parameter] = (),
    ) -> None:
        super().__init__()
        self.borrowed, self.sequence = tuple(borrowed), sequence
        self.kind, self._matrices = kind, matrices_in(modules)
        self._multipliers = [*multipliers]  # no parts by themselves
        self.keeps: object = None
        for number, parameter in enumerate(parameters):
            self.register_parameter(str(number), parameter)

    def units(self) -> Iterator[list[list[Parameter]]]:
        """See Layer: each parameter is by itself in memory, but for the parts of one that is packed."""
        if self.own:
            yield [list(each) for _, each in groupby(self.own, lambda parameter: parameter.shard.name)]

    @cached_property
    @override
    def held(self) -> list[Parameter]:
        return [*self.own[:1], *self.borrowed]

    @override
    def backward_order(self) -> Iterator[tuple[Parameter | None, list[Parameter]]]:
        yield None if self.is_block or not self.own else self.own[0], self.own[::-1]
        if self.borrowed:
            yield self.borrowed[0], list(self.borrowed)

    @property
    @override
    def late(self) -> set[Parameter]:
        return {parameter for parameter in self.own if isinstance(parameter, LateParameter)}

    @property
    @override
    def multipliers(self) -> list[SplitLinear | VocabularyHead]:
        return [*self._multipliers]

    def rows(self, multiplier: SplitLinear | VocabularyHead, tokens: int) -> int:
        """See Layer: as many as were found."""
        found = self.traced(None)
        known = {} if isinstance(found, str) else found.rows
        per_sample = known.get(multiplier.product.weights[0].shard.name)
        return tokens if per_sample is None else tokens // self.sequence * per_sample

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        return self._matrices

    @property
    @override
    def matrix_elements(self) -> int:
        found = self.traced(None)
        return super().matrix_elements if isinstance(found, str) else found.products

    @property
    @override
    def core_flops(self) -> int:
        found = self.traced(None)
        return 0 if isinstance(found, str) else found.core

    def saved(self, at: ActivationSizes) -> list[SavedStorage]:
        """See Layer: nothing where it is unknown."""
        found = self.traced(at)
        if isinstance(found, str):
            return []
        return list(found.kept if at.again and not self.is_block else found.saved)

    @override
    def unknown(self, at: ActivationSizes) -> str | None:
        found = self.traced(at)
        return found if isinstance(found, str) else None

    @override
    def computed_again(self, at: ActivationSizes) -> tuple[list[SavedStorage], int] | None:
        found = self.traced(at)
        return ([], 0) if isinstance(found, str) else (list(found.kept), found.again)


class OutsideOfBlocks(ModuleLayer):
    """What belongs to no block, or to several; it is used before, between and after them."""

    lasting = True


class ModuleBlock(ModuleLayer):
    """One of the submodules that follow each other."""

    is_block = True


def matrices_in(modules: Sequence[nn.Module]) -> list[MatrixSize]:
    """The matrices of linear layers among modules: all weights of two dims but those that are looked up."""
    split = [matrix for each in modules if isinstance(each, MatmulLayer) for matrix in each.matrices]
    plain = (each for each in modules if not isinstance(each, nn.Embedding | MatmulLayer))
    weights = (each._parameters.get("weight") for each in plain)  # what is made of others may fail
    found = [weight for weight in weights if isinstance(weight, nn.Parameter) and weight.dim() == 2]
    return [*split, *(MatrixSize(weight.shape[0], weight.shape[1], "whole") for weight in found)]


class RunningBlock:
    """Runs in the place of a block's forward method, whose parameters are those of a layer.

    HpctrainError where the block changes what it was given, and that is needed as it was.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        layer: ModuleLayer,
        groups: LayerContext,
        residency: Callable[[], ParameterResidency],
    ) -> None:
        self.name, self.block, self.layer, self.groups = name, block, layer, groups
        self.residency, self.forward = residency, block.forward
        self.buffers = [*kept_buffers(block)] if groups.saved_policy.repeats else []

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the block gives."""
        inputs, policy = list(tensors_of((given, named))), self.groups.saved_policy
        once = changed_once(self.block, self.buffers, self.forward)
        compute = partial(policy.call, partial(self._apart, once), *given, **named)
        residency = self.residency()
        needed = torch.is_grad_enabled() and (policy.repeats or residency.gathers)
        versions = _versions(inputs) if needed else []
        if self.layer.own:
            result = residency.surround(self.layer.own[0], compute, inputs, tensors_of)
        else:
            result = compute()
        if needed and _versions(inputs) != versions:
            why = 'memory.recompute = "full"' if policy.repeats else "layout.zero = 3"
            raise HpctrainError(
                f"{self.name}: changes its input in place, which conflicts with {why} (use x = x + y "
                "instead of x += y)"
            )
        return result

    def _apart(self, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What it gives, perhaps in the midst of a backward pass."""
        with self.groups.weight_gradients.apart():
            return forward(*given, **named)


def _versions(tensors: list[Tensor]) -> list[int]:
    """How many times each was changed in place."""
    return [tensor._version for tensor in tensors]


def changed_once(block: nn.Module, names: Collection[str], forward: Callable[..., Any]) -> Callable[..., Any]:
    """One pass of a block, which may be computed again: then it finds in these buffers what it found at
    first, and does not change them any more.
    """
    found: list[Tensor] = []

    def compute(*given: Any, **named: Any) -> Any:
        buffers = [block.get_buffer(name) for name in names]
        if not found:
            found.extend(buffer.clone() for buffer in buffers)
            return forward(*given, **named)
        now = [buffer.clone() for buffer in buffers]
        _put(found, buffers)
        try:
            return forward(*given, **named)
        finally:
            _put(now, buffers)

    return compute if names else forward


def _put(values: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)  # a backward pass may have saved it, and does not use its values
