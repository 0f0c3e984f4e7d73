"""What a part of a module saves and computes, told by a twin of it that has no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.model.foreign.architecture import META, ModuleArchitecture
from hpctrain.model.foreign.trace import LayerTrace, PartTrace, trace
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.part import Computed, LayerRange
from hpctrain.parallel.activation_sizes import ActivationSizes
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter


class Traced(Protocol):
    """A part of a module, which is made of an architecture, groups and a span."""

    architecture: ModuleArchitecture
    groups: LayerContext
    span: LayerRange
    module: nn.Module

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The submodules that follow each other."""

    @property
    def names(self) -> Mapping[Parameter, list[str]]:
        """All parameters."""

    def __call__(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Any:
        """Return the hidden states [s or s/t, b, h] after this part."""

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """Return the shape of the tensors that are sent between parts."""

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors that are sent between parts."""

    def predict(self, last: Any, compute: Callable[..., Computed]) -> Computed:
        """Return the result of `compute` for the output of the last part, with its parameters gathered."""


def traced(part: Traced, number: int, at: ActivationSizes | None) -> LayerTrace | str:
    """What is found of a layer of a part, by its number, for a micro-batch; None: of one sample, with all
    that tensor ranks compute. Where nothing is found, why.
    """
    size = part.architecture.storage.itemsize
    frozen = frozenset(parameter.shard.name for parameter in part.names if not parameter.requires_grad)
    if at is None:
        sequence = part.architecture.sequence
        seen, rank = ActivationSizes(sequence, sequence, 1, size, size), (0, 1, False)
    else:
        tensor = part.groups.tensor
        seen = replace(at, selective=False, again=False)
        rank = tensor.rank, tensor.size, part.groups.sequence_parallel
    found = _trace_of(type(part), part.architecture, part.span, frozen, rank, seen)
    return found.layers[number] if found.why is None else found.why


@lru_cache(maxsize=64)
def _trace_of(
    kind: Callable[[ModuleArchitecture, LayerContext, LayerRange], Traced],
    architecture: ModuleArchitecture,
    span: LayerRange,
    frozen: frozenset[str],
    rank: tuple[int, int, bool],
    at: ActivationSizes,
) -> PartTrace:
    """The trace of such a part as a tensor rank (its number, of so many, by sequence or not) holds it."""
    place, size, by_sequence = rank
    tensor, context = (
        planned_group((axis,), *of, Ledger()) for axis, of in (("tensor", (place, size)), ("context", (0, 1)))
    )
    with META:
        groups = LayerContext(tensor, context, by_sequence, product_format=architecture.storage)
        part = kind(architecture, groups, span)
    for parameter in part.names:
        parameter.requires_grad_(parameter.requires_grad and parameter.shard.name not in frozen)
    inputs = example_of(architecture, at.micro_size)

    def loss(outputs: Any) -> Any:
        return part.predict(outputs, at.objective.losses(inputs, torch.ones(())))

    hidden = None
    if not span.embeds:
        hidden = torch.empty(part.hidden_shape(at.micro_size), dtype=part.dtype, device=META)
        hidden.requires_grad_()
    of_loss = loss if at.objective is not None and span.predicts else None
    run = partial(part, inputs, hidden)
    return trace(part.module, part.blocks, run, of_loss, at.tokens, architecture.storage, at.gpu)


def example_of(architecture: ModuleArchitecture, micro_size: int) -> ModelInputs:
    """A micro-batch of values that mean nothing special, as a zero may."""
    fields = {
        name: torch.ones(field.shape, dtype=field.dtype)
        for name, field in architecture.example(micro_size).items()
    }
    return ModelInputs(fields, torch.arange(architecture.sequence))
