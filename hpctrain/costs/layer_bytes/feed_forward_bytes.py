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
    widest = [sizes.features(sum(layer.up.split_sizes))] if layer.activation.gated else []
    kept = [*_factor(layer, sizes), *saved_input(layer.down, sizes), *saved_by_adapter(layer.down, sizes)]
    return [*saved_by_adapter(layer.up, sizes), *widest, *kept]


def _factor(layer: FeedForward, sizes: ActivationSizes) -> list[SavedStorage]:
    one = layer.activation.gated and layer.functions.compiles(layer.activation)
    functions = 1 if layer.activation.up_function is None else 2
    return [] if one else [sizes.features(layer.up.split_sizes[-1])] * functions


@workspace_bytes.register
def _feed_forward_workspace(layer: FeedForward, sizes: ActivationSizes) -> int:
    """Return the temporary bytes of the backward pass.

    They are gradients of the hidden states, before and after, and of the widest features between, and what
    the matrix products need.
    """
    passing = max(product_workspace(each.product, sizes.tokens, sizes) for each in (layer.up, layer.down))
    return sizes.features(sum(layer.up.split_sizes) + 2 * _hidden(layer)).bytes + passing


def transient_bytes(layer: FeedForward, sizes: ActivationSizes) -> tuple[int, int]:
    """Return the bytes beside what is saved if weight gradients are deferred.

    The first number is the peak during the layer's own backward pass, the second one what remains after it.
    """
    hidden = sizes.features(_hidden(layer)).bytes
    return hidden, hidden - (total(_factor(layer, sizes)) if layer.activation.gated else 0)


def _hidden(layer: FeedForward) -> int:
    return layer.down.weights[0].shard.shape[0]
