"""Bytes of feed-forward layers."""

from __future__ import annotations

from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, SavedStorage, total
from hpctrain.costs.layer_bytes.byte_functions import saved_storages, workspace_bytes
from hpctrain.costs.layer_bytes.linear_bytes import saved_by_adapter, saved_input
from hpctrain.costs.layer_bytes.matmul_bytes import product_workspace
from hpctrain.model.block import FeedForward


@saved_storages.register
def _saved_by_feed_forward(layer: FeedForward, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return input and output of the activation.

    Of a gated activation these are gate and up, which are one tensor, their product, and the functions of
    gate and up if torch computes them.
    """
    gate_and_up = [sizes.features(sum(layer.up.split_sizes))] if layer.activation.gated else []
    return [
        *saved_by_adapter(layer.up, sizes),
        *gate_and_up,
        *_activation_factors(layer, sizes),
        *saved_input(layer.down, sizes),
        *saved_by_adapter(layer.down, sizes),
    ]


def _activation_factors(layer: FeedForward, sizes: ActivationSizes) -> list[SavedStorage]:
    one = layer.activation.gated and layer.functions.compiles(layer.activation)
    functions = 1 if layer.activation.up_function is None else 2
    return [] if one else [sizes.features(layer.up.split_sizes[-1])] * functions


@workspace_bytes.register
def _feed_forward_workspace(layer: FeedForward, sizes: ActivationSizes) -> int:
    """Return the temporary bytes of the backward pass, beside all that is saved.

    The peak is in the products of the down projection, in the activation, or in the products of the up
    projection, when what the layer saves is freed. Gradients of the hidden states (input and output) and of
    the inner features are added.
    """
    hidden, expanded = (
        sizes.features(count).bytes for count in (2 * _hidden(layer), sum(layer.up.split_sizes))
    )
    down, up = (product_workspace(each.product, sizes.tokens, sizes) for each in (layer.down, layer.up))
    activated = sizes.features(layer.up.split_sizes[-1]).bytes
    freed = total(saved_storages(layer, sizes))
    return hidden + max(activated + down, expanded, expanded + up - freed)


def transient_bytes(layer: FeedForward, sizes: ActivationSizes) -> tuple[int, int]:
    """Return the bytes beside what is saved if weight gradients are deferred.

    The first number is the peak during the layer's own backward pass, the second one what remains after it.
    """
    hidden = sizes.features(_hidden(layer)).bytes
    return hidden, hidden - (total(_activation_factors(layer, sizes)) if layer.activation.gated else 0)


def _hidden(layer: FeedForward) -> int:
    return layer.down.weights[0].shard.shape[0]
