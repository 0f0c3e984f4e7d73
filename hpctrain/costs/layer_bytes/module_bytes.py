"""Bytes of layers of modules that users bring: those of their trace."""

from __future__ import annotations

from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, SavedStorage
from hpctrain.costs.layer_bytes.byte_functions import recomputed_bytes, saved_storages, unknown_reason
from hpctrain.costs.layer_bytes.module_trace import trace_layer
from hpctrain.model.modules.module_layers import ModuleLayer


@saved_storages.register
def _saved_by_module_layer(layer: ModuleLayer, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what autograd saves, or nothing if that is unknown."""
    trace = trace_layer(layer, sizes)
    if isinstance(trace, str):
        return []
    return list(trace.saved_recomputed if sizes.recomputes_blocks and not layer.is_block else trace.saved)


@unknown_reason.register
def _unknown_of_module_layer(layer: ModuleLayer, sizes: ActivationSizes) -> str | None:
    trace = trace_layer(layer, sizes)
    return trace if isinstance(trace, str) else None


@recomputed_bytes.register
def _recomputed_by_module_layer(layer: ModuleLayer, sizes: ActivationSizes) -> tuple[list[SavedStorage], int]:
    trace = trace_layer(layer, sizes)
    return ([], 0) if isinstance(trace, str) else (list(trace.saved_recomputed), trace.recompute_bytes)
