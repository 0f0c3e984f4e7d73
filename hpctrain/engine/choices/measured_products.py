"""Matrix products of a model, of which the larger ones are measured."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hpctrain.costs.layer_bytes.module_trace import trace_layer
from hpctrain.costs.single_layers import single_layers
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.deck_kernels import micro_batch_tokens
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.model.construction import architecture_of, build_parts, layer_kinds
from hpctrain.model.modules.module_layers import ModuleLayer
from hpctrain.model.part import Layer, LayerRange
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.backward.saved_policy import SavedPolicy
from hpctrain.parallel.kernels.matmul_kernels import PASSES, Pass
from hpctrain.parallel.kernels.timing import MatmulPass
from hpctrain.parallel.tensor import SplitLinear
from hpctrain.parallel.vocabulary import VocabularyHead, chunk_rows
from hpctrain.sharding.replication import MeshQueries

LEAST_FLOPS = 1 << 25
"""Fewest FLOPs of a product that is measured, which take about a millisecond."""


def products_of(deck: Deck, mesh: MeshQueries, device: torch.device) -> list[MatmulPass]:
    """Return the different matrix products of a micro-batch in the whole model, except small ones."""
    assert deck.model.vocabulary is not None
    layer_context = make_layer_context(deck, mesh, SavedPolicy(), device)
    architecture = architecture_of(deck, deck.model.vocabulary)
    spans = [LayerRange.all_of(architecture.block_count)]
    if isinstance(architecture, ModelShape):  # one layer of each kind has all products
        spans = list(single_layers(layer_kinds(architecture)).values())
    layers = (
        layer
        for span in spans
        for part in build_parts(architecture, layer_context, [span])
        for layer in part.layers
    )
    products = dict.fromkeys(each for layer in layers for each in _products(layer, micro_batch_tokens(deck)))
    return [each for each in products if each.flops >= LEAST_FLOPS]


def _products(layer: Layer, tokens: int) -> Iterator[MatmulPass]:
    """Yield the passes of a layer's matrix products."""
    for each in layer.product_layers:
        head = isinstance(each, VocabularyHead)
        other: Pass = "forward" if head else "logits"
        for outputs, inputs in each.product.shapes:
            rows = chunk_rows(tokens, outputs, gpu=False) if head else _rows(layer, each, tokens)
            for kind in PASSES:
                if kind != other:
                    yield MatmulPass(kind, rows, outputs, inputs)


def _rows(layer: Layer, multiplier: SplitLinear | VocabularyHead, tokens: int) -> int:
    """Return the number of rows that a part of a layer multiplies for a micro-batch of so many tokens.

    A layer of a user's module may have another number for each token; it is traced.
    """
    if not isinstance(layer, ModuleLayer) or isinstance(trace := trace_layer(layer, None), str):
        return tokens
    per_sample = trace.rows.get(multiplier.product.weights[0].shard.name)
    return tokens if per_sample is None else tokens // layer.sequence * per_sample
