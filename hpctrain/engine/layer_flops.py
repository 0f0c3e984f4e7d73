"""FLOPs of the layers of a deck, which are the same on every machine."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from hpctrain.deck.schema import Deck
from hpctrain.engine.layer_times import PassTimes
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import bare_model
from hpctrain.model.frozen import freeze_parameters, silent_blocks
from hpctrain.model.part import Layer
from hpctrain.model.shape import Recomputed


def layer_flops(deck: Deck, architecture: Architecture) -> tuple[PassTimes, ...]:
    """Return the FLOPs of one token in each layer, from the embedding to the output layer.

    A matrix has 2 FLOPs per element in the forward pass, in the input gradient and in the weight gradient.
    Products of queries, keys and values have two input gradients. Frozen matrices have no weight gradient,
    and blocks that the backward pass does not reach have no gradients. Recomputation counts as input
    gradient. All passes of the output layer count as forward, where they are computed. An embedding has 0
    FLOPs.
    """
    return _of_model(architecture, deck.memory.recompute, tuple(deck.model.frozen))


@lru_cache
def _of_model(
    architecture: Architecture, recompute: Recomputed, frozen: tuple[str, ...]
) -> tuple[PassTimes, ...]:
    flops = []
    for is_block, silent, products, core, weight in _count_flops(architecture, frozen):
        forward, gradient = products + core, products + 2 * core
        if not is_block:
            flops.append(PassTimes(forward + gradient + weight, 0, 0))
        elif silent:
            flops.append(PassTimes(forward, 0, 0))
        else:
            again = {"none": 0, "selective": core}.get(str(recompute), forward)
            flops.append(PassTimes(forward, gradient + again, weight))
    return tuple(flops)


@lru_cache
def _count_flops(
    architecture: Architecture, frozen: tuple[str, ...]
) -> tuple[tuple[bool, bool, int, int, int], ...]:
    """Return for each layer: is it a block, does no gradient reach it, and three numbers of FLOPs of a token.

    These are the FLOPs of the products with its matrices, of its attention, and of its weight gradients.
    """
    model = bare_model(architecture)
    freeze_parameters([model], frozen)
    silent = silent_blocks(model)
    return tuple(
        (
            layer.is_block,
            number <= silent,
            2 * layer.matrix_elements,
            layer.core_flops,
            _weight_gradient(layer),
        )
        for number, layer in enumerate(model.layers)
    )


def _weight_gradient(layer: Layer) -> int:
    """Return the FLOPs of one token in a layer's weight gradients, by the share of trained elements.

    Matrices that belong to another layer count as trained.
    """
    matrices = [p for p in {*layer.all_parameters, *layer.added_in_forward} if p.dim() > 1]
    sizes = [(prod(p.shard.shape), p.requires_grad) for p in matrices]
    if not sizes:
        return 2 * layer.matrix_elements
    trained = sum(size for size, is_trained in sizes if is_trained)
    return 2 * layer.matrix_elements * trained // sum(size for size, _ in sizes)
