"""Context of a deck's layers: their groups, formats, kernels and functions."""

from __future__ import annotations

import torch

from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.deck_kernels import kernels_of
from hpctrain.engine.choices.function_choice import functions_of
from hpctrain.host.device import on_host
from hpctrain.model.precision import Precision
from hpctrain.parallel.backward.saved_policy import SavedPolicy
from hpctrain.parallel.layer_context import LayerContext, ProductSettings
from hpctrain.parallel.vocabulary import TABLE_ROWS
from hpctrain.sharding.replication import MeshQueries


def make_layer_context(
    deck: Deck, mesh: MeshQueries, saved_policy: SavedPolicy, device: torch.device
) -> LayerContext:
    """Return the context of a deck's layers: their groups, formats, kernels and functions.

    Args:
        deck: The deck.
        mesh: Arrangement of the ranks, or a planned one.
        saved_policy: Decides what layers save for the backward pass.
        device: Device of the run.
    """
    return LayerContext(
        tensor=mesh.group("tensor"),
        context=mesh.group("context"),
        sequence_parallel=deck.layout.sequence_parallel,
        context_form=deck.layout.context_form,
        saved_policy=saved_policy,
        products=ProductSettings(kernels_of(deck, device, mesh.group("data").size), Precision.of(deck).fp8),
        functions=functions_of(deck, device),
        table_rows=1 if on_host(device) else TABLE_ROWS,
        expert=mesh.group("expert"),
        expert_tensor=mesh.group("expert_tensor"),
        micro_batch=mesh.group("context", "tensor"),
        data=mesh.group("data"),
        pipeline=mesh.group("pipeline"),
    )
