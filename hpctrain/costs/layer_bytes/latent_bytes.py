"""Bytes of latent attention."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, SavedStorage, total
from hpctrain.costs.layer_bytes.byte_functions import core_recompute_bytes, saved_storages, workspace_bytes
from hpctrain.costs.layer_bytes.linear_bytes import saved_input
from hpctrain.model.attention.latent_attention import LatentAttention
from hpctrain.parallel.kernels.functions.function_library import workspace_floats


@saved_storages.register
def _saved_by_latent_attention(attention: LatentAttention, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return the input, what norms and the core save, and the output if the core does not save it."""
    saves_output = sizes.recomputes_core or attention.sends_heads or attention.pads
    queries: list[SavedStorage] = []
    if attention.query_norm is not None:
        queries = [*saved_storages(attention.query_norm, sizes), *saved_input(attention.query, sizes)]
    return [
        *saved_input(attention.compress, sizes),
        *queries,
        *saved_storages(attention.latent_norm, sizes),
        *saved_input(attention.expand, sizes),
        *_saved_by_core(attention, sizes),
        *(saved_input(attention.output, sizes) if saves_output else []),
    ]


def _saved_by_core(attention: LatentAttention, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what the core saves: its inputs or, unless it is recomputed, what its kernel saves."""
    heads = sizes.features(attention.heads * attention.head_size)
    expanded = sizes.features(sum(attention.expand.split_sizes))
    if sizes.recomputes_core:
        return [heads, expanded, sizes.features(attention.rotary_size)]
    log_sum = replace(sizes.features(attention.heads, 4), features=False)
    values = heads if attention.pads or attention.sends_heads else expanded
    return [heads, heads, values, heads, log_sum]


@core_recompute_bytes.register
def _recomputed_by_core(attention: LatentAttention, sizes: ActivationSizes) -> int:
    # Queries are saved again if they are rotated or exchanged, and values if they are padded or exchanged.
    queries, _, values, *_ = saved = _saved_by_core(attention, replace(sizes, recomputes_core=False))
    copies_queries = attention.sends_heads or (attention.uses_rotary and not attention.has_compiled_core)
    known = 0 if copies_queries else queries.bytes
    known += 0 if attention.pads or attention.sends_heads else values.bytes
    return total(saved) - known


@workspace_bytes.register
def _latent_workspace(attention: LatentAttention, sizes: ActivationSizes) -> int:
    """Return the temporary bytes of the backward pass of a compiled core; 0 for other cores."""
    if not attention.has_compiled_core:
        return 0
    floats = workspace_floats(sizes.tokens // sizes.micro_size, attention.head_size)
    return sizes.features(4 * attention.heads * attention.head_size).bytes + 4 * floats
