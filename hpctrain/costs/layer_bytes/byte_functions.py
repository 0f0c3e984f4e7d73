"""Functions that return bytes of a layer. Other modules register implementations for classes of layers."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, DeferredBytes, SavedStorage
from hpctrain.costs.layer_bytes.linear_bytes import deferred_operands
from hpctrain.model.part import Layer
from hpctrain.parallel.tensor import MatmulLayer

# Functions for any layer, also for a layer within another one


@singledispatch
def saved_storages(layer: Any, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what autograd saves, in the order of the forward pass, each storage once."""
    raise NotImplementedError(f"saved_storages of {type(layer).__name__}")


@singledispatch
def workspace_bytes(layer: Any, sizes: ActivationSizes) -> int:  # noqa: ARG001
    """Return the temporary bytes of the layer's backward pass or loss."""
    return 0


@singledispatch
def core_recompute_bytes(attention: Any, sizes: ActivationSizes) -> int:
    """Return the bytes that the recomputed core of attention saves beside its inputs."""
    raise NotImplementedError(f"core_recompute_bytes of {type(attention).__name__}")


# Functions for the layers of a part


@singledispatch
def unsaved_inputs(layer: Layer, sizes: ActivationSizes) -> list[SavedStorage]:  # noqa: ARG001
    """Return the first ones of `saved_storages`, which are not saved if the input needs no gradient."""
    return []


@singledispatch
def recomputed_bytes(layer: Layer, sizes: ActivationSizes) -> tuple[list[SavedStorage], int] | None:  # noqa: ARG001
    """Return what stays saved of a recomputed block, and further bytes during its recomputation.

    None stands for the default: the input stays saved, and the recomputation needs what the block saves.
    """
    return None


@singledispatch
def deferred_bytes(layer: Layer, sizes: ActivationSizes) -> DeferredBytes:
    """Return the bytes that deferred weight gradients need."""
    linear = (each for each in layer.modules() if isinstance(each, MatmulLayer))
    return DeferredBytes(sum(deferred_operands(each, sizes) for each in linear), 0)


@singledispatch
def core_peak_bytes(layer: Layer, sizes: ActivationSizes) -> int:  # noqa: ARG001
    """Return the bytes that a layer needs beyond what it saved, while it recomputes the core of attention."""
    return 0


@singledispatch
def exchanged_bytes(layer: Layer, sizes: ActivationSizes) -> int:  # noqa: ARG001
    """Return the bytes that this rank sends to other ranks in one exchange of tokens with their experts.

    All experts are assumed to get equally many tokens. Forward and backward have two exchanges each.
    """
    return 0


@singledispatch
def unknown_reason(layer: Layer, sizes: ActivationSizes) -> str | None:  # noqa: ARG001
    """Return why it is unknown what autograd saves, or None if it is known."""
    return None


# A function for a part of a model


@singledispatch
def shared_bytes(part: Any, sizes: ActivationSizes) -> int:  # noqa: ARG001
    """Return the number of bytes that autograd saves once for all blocks."""
    return 0
