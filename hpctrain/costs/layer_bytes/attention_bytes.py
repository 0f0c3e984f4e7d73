"""Bytes of attention and of norms."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, SavedStorage, total
from hpctrain.costs.layer_bytes.byte_functions import core_recompute_bytes, saved_storages, workspace_bytes
from hpctrain.costs.layer_bytes.linear_bytes import saved_by_adapter, saved_input
from hpctrain.model.attention.query_key_norm import QueryKeyNorm
from hpctrain.model.attention.self_attention import Attention
from hpctrain.model.norm import Norm
from hpctrain.parallel.kernels.attention_tiles import CAPPED_MATRICES, CAPPED_TILE
from hpctrain.parallel.kernels.functions.function_library import workspace_floats


@saved_storages.register
def _saved_by_norm(norm: Norm, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return input and statistics.

    torch's RMSNorm on the CPU saves the input in fp32 and, for the weight's gradient, the normalized input.
    """
    (hidden,), exact = norm.size, sizes.gpu or norm.functions.compiled
    if not norm.has_fast_function:
        statistics = 2 if norm.kind == "layer" else 1
        return [sizes.row_features(hidden), *[SavedStorage(4 * sizes.rows, 4, features=False)] * statistics]
    if norm.bias is not None:
        statistic = 4 if exact else sizes.itemsize
        return [
            sizes.row_features(hidden),
            *[SavedStorage(statistic * sizes.rows, statistic, features=False)] * 2,
        ]
    inputs = (
        [sizes.itemsize]
        if exact
        else [4, 4]
        if norm.weight is not None and norm.weight.requires_grad
        else [4]
    )
    return [
        *(sizes.row_features(hidden, each) for each in inputs),
        SavedStorage(4 * sizes.rows, 4, features=False),
    ]


@saved_storages.register
def _saved_by_query_key_norm(norm: QueryKeyNorm, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what is saved beside the inputs: fp32 statistics of each head, or one of all heads."""
    heads = [1 if norm.joint else rows.local // norm.head_size for rows in norm.rows]
    return [
        SavedStorage(4 * sizes.tokens * count, 4, features=False)
        for count in (heads * 2 if norm.centered else heads)
    ]


@saved_storages.register
def _saved_by_attention(attention: Attention, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return the input, what the core saves, and its output if the core does not save it."""
    saves_output = sizes.recomputes_core or attention.sends_heads
    # The result of the clamp, unless the core or the norm saves it.
    clipped = attention.clip is not None and attention.norm is None
    clipped = clipped and attention.sends_heads and not sizes.recomputes_core
    return [
        *saved_input(attention.inner, sizes),
        *saved_by_adapter(attention.inner, sizes),
        *([sizes.features(sum(attention.inner.split_sizes))] if clipped else []),
        *_saved_by_core(attention, sizes),
        *(saved_input(attention.output, sizes) if saves_output else []),
        *saved_by_adapter(attention.output, sizes),
    ]


def _saved_by_core(attention: Attention, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what the core saves: its inputs, and unless it is recomputed its output and log-sum-exp."""
    queries, keys, _ = attention.inner.split_sizes
    norm, size = attention.norm, attention.head_size
    projected, output, shared = (sizes.features(count) for count in (queries + 2 * keys, queries, keys))
    statistics = [] if norm is None else saved_storages(norm, sizes)
    if sizes.recomputes_core:
        normed = [] if norm is None else [output, shared]
        return [projected, *statistics, *normed]
    log_sum = replace(sizes.features(queries // size, 4), features=False)
    if attention.sends_heads:
        # The queries, keys, values and output after the exchange.
        exchanged = sizes.features(max(keys, attention.layer_context.context.size * size))
        normed = [] if norm is None else [projected, *statistics]
        return [*normed, output, exchanged, exchanged, output, log_sum]
    # The core saves other queries and keys than the projected ones if they are rotated before it.
    copied = attention.uses_rotary and (norm is not None or not attention.has_compiled_core)
    rotated = [output, shared] if copied else []
    return [projected, *statistics, *rotated, output, log_sum]


@workspace_bytes.register
def _attention_workspace(attention: Attention, sizes: ActivationSizes) -> int:
    """Return the temporary bytes of the backward pass of a compiled core, or of torch's with a soft cap.

    Those of a compiled core are the gradients of the output and of the projections, and the kernel's
    workspace. torch has matrices of a tile's scores and their gradients, and sums of gradients in fp32. Other
    cores have too little to count.
    """
    queries, keys, _ = attention.inner.split_sizes
    length = sizes.tokens // sizes.micro_size
    if not attention.has_compiled_core:
        side = min(length, CAPPED_TILE)
        scores = sizes.micro_size * queries // attention.head_size * side * side
        gradients = sizes.features(queries + 2 * keys, 4).bytes
        return 4 * CAPPED_MATRICES * scores + gradients if attention.rule.cap else 0
    floats = workspace_floats(length, attention.head_size)
    return sizes.features(2 * queries + 2 * keys).bytes + 4 * floats


@core_recompute_bytes.register
def _recomputed_by_core(attention: Attention, sizes: ActivationSizes) -> int:
    queries, keys, _ = attention.inner.split_sizes
    known = total(_saved_by_core(attention, replace(sizes, recomputes_core=True)))
    known -= sizes.features(queries).bytes if attention.sends_heads else 0
    if attention.norm is not None and not attention.has_compiled_core:
        # The first ones are normalized queries and keys, the others rotated ones.
        known -= sizes.features(queries + keys).bytes
    return total(_saved_by_core(attention, replace(sizes, recomputes_core=False))) - known
