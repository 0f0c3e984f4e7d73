"""FLOPs of a model and of the layers of a deck, which are the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from hpctrain.costs.layer_bytes.module_trace import trace_layer
from hpctrain.costs.pass_times import PassTimes
from hpctrain.deck.schema import Deck
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import bare_model
from hpctrain.model.modules.module_layers import ModuleLayer
from hpctrain.model.parameters.frozen import blocks_without_backward, freeze_parameters
from hpctrain.model.part import Layer
from hpctrain.model.prediction_module import PredictionModule
from hpctrain.model.shape import Recomputed
from hpctrain.model.transformer import Predictor


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model for one token.

    There are 6 FLOPs for each matrix element that a token is multiplied with, including the output layer, and
    12 l h s for the products of queries, keys and values. The causal mask is not subtracted, as in arXiv
    2104.04473.

    Attributes:
        flops_per_token: FLOPs of forward and backward pass, without recomputation.
        block_forward: FLOPs of the forward pass of all blocks.
        core_forward: The part of `block_forward` that is products of queries, keys and values.
    """

    flops_per_token: float
    block_forward: float
    core_forward: float

    def recomputed_flops_per_token(self, recompute: Recomputed) -> float:
        """Return the FLOPs that recomputation adds.

        They are the forward pass of all blocks, or of the products of queries, keys and values for
        "selective".
        """
        return {"none": 0.0, "selective": self.core_forward}.get(str(recompute), self.block_forward)


@lru_cache
def model_flops(architecture: Architecture) -> ModelFlops:
    """Return the FLOPs of a model."""
    layers = _count_flops(architecture, ())
    forward = sum(layer.products + layer.core for layer in layers)
    of_blocks = [(layer.products, layer.core) for layer in layers if layer.is_block]
    core_forward = sum(core for _, core in of_blocks)
    return ModelFlops(3.0 * forward, float(sum(map(sum, of_blocks))), float(core_forward))


def layer_flops(deck: Deck, architecture: Architecture) -> tuple[PassTimes, ...]:
    """Return the FLOPs of one token in each layer, from the embedding to the output layer.

    A matrix has 2 FLOPs per element in the forward pass, in the input gradient and in the weight gradient.
    Products of queries, keys and values have two input gradients. Frozen matrices have no weight gradient,
    and blocks that the backward pass does not reach have no gradients. Recomputation counts as input
    gradient. All passes of the output layer count as forward, since the forward pass computes them. Those of
    MTP modules count like those of blocks. An embedding has 0 FLOPs.
    """
    return _cached_layer_flops(architecture, deck.memory.recompute, tuple(deck.model.frozen))


@lru_cache
def _cached_layer_flops(
    architecture: Architecture, recompute: Recomputed, frozen: tuple[str, ...]
) -> tuple[PassTimes, ...]:
    flops = []
    for layer in _count_flops(architecture, frozen):
        core, modules = layer.core, layer.mtp_modules
        forward, gradient = layer.products + core, layer.products + 2 * core
        total = forward + gradient + layer.weight_gradient
        if modules:
            in_backward, recomputed = modules + 2 * core, core if recompute == "selective" else 0
            flops.append(PassTimes(total - in_backward - modules, in_backward + recomputed, modules))
        elif not layer.is_block:
            flops.append(PassTimes(total, 0, 0))
        elif layer.is_without_backward:
            flops.append(PassTimes(forward, 0, 0))
        else:
            recomputed = {"none": 0, "selective": core}.get(str(recompute), forward)
            flops.append(PassTimes(forward, gradient + recomputed, layer.weight_gradient))
    return tuple(flops)


class _LayerFlops(NamedTuple):
    """FLOPs of one token in a layer.

    Attributes:
        is_block: True for a block.
        is_without_backward: True if no gradient reaches the layer.
        products: FLOPs of the products with the layer's matrices in the forward pass.
        core: FLOPs of attention in the forward pass.
        weight_gradient: FLOPs of the weight gradients.
        mtp_modules: Part of `products` in MTP modules, without the output layer.
    """

    is_block: bool
    is_without_backward: bool
    products: int
    core: int
    weight_gradient: int
    mtp_modules: int


@lru_cache
def _count_flops(architecture: Architecture, frozen: tuple[str, ...]) -> tuple[_LayerFlops, ...]:
    """Return the FLOPs of each layer of a model whose parameters of these patterns are frozen."""
    model = bare_model(architecture)
    freeze_parameters([model], frozen)
    without_backward = blocks_without_backward(model)
    flops = []
    for number, layer in enumerate(model.layers):
        elements, core = _products(layer)
        of_modules = sum(matrix.elements for module in _modules_of(layer) for matrix in module.matrices)
        weight_gradient = _weight_gradient(layer, elements)
        flops.append(
            _LayerFlops(
                layer.is_block,
                number <= without_backward,
                2 * elements,
                core,
                weight_gradient,
                2 * of_modules,
            )
        )
    return tuple(flops)


def _modules_of(layer: Layer) -> Sequence[PredictionModule]:
    """Return the modules of multi-token prediction of a layer."""
    return layer.prediction_modules if isinstance(layer, Predictor) else []


def _products(layer: Layer) -> tuple[int, int]:
    """Return the elements of matrices that a token is multiplied with, and the FLOPs of other products."""
    trace = trace_layer(layer, None) if isinstance(layer, ModuleLayer) else ""
    if not isinstance(trace, str):
        return trace.matrix_elements, trace.core_flops
    core = 0 if layer.core is None else layer.core.flops
    return sum(matrix.elements for matrix in layer.matrices), core


def _weight_gradient(layer: Layer, elements: int) -> int:
    """Return the FLOPs of one token in a layer's weight gradients, by the share of trained elements.

    Matrices that belong to another layer count as trained.
    """
    matrices = [p for p in {*layer.all_parameters, *layer.added_in_forward} if p.dim() > 1]
    sizes = [(prod(p.shard.shape), p.requires_grad) for p in matrices]
    if not sizes:
        return 2 * elements
    trained = sum(size for size, is_trained in sizes if is_trained)
    return 2 * elements * trained // sum(size for size, _ in sizes)
