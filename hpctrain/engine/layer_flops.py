"""What layers of a deck compute, by arithmetic: the same figures on every machine."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from hpctrain.deck.schema import Deck
from hpctrain.engine.layer_times import PassTimes
from hpctrain.model.architecture import Architecture
from hpctrain.model.build import bare_model
from hpctrain.model.frozen import freeze_parameters, silent_blocks
from hpctrain.model.part import Layer
from hpctrain.model.shape import Recomputed


def layer_flops(deck: Deck, architecture: Architecture) -> tuple[PassTimes, ...]:
    """FLOPs of one token in every layer of a deck's model, the first one embeds and the last one predicts.

    2 for every matrix element in the forward pass, in the input gradient and in the weight gradient each;
    products of queries, keys and values have two gradients of inputs. What is frozen has no weight gradient,
    what backward never comes to no gradient at all, and what is computed again counts as input gradient. Of
    the head all is forward, where it is computed. A lookup is none.
    """
    return _of_model(architecture, deck.memory.recompute, tuple(deck.model.frozen))


@lru_cache
def _of_model(
    architecture: Architecture, recompute: Recomputed, frozen: tuple[str, ...]
) -> tuple[PassTimes, ...]:
    flops = []
    for is_block, silent, products, core, weight in _figures(architecture, frozen):
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
def _figures(
    architecture: Architecture, frozen: tuple[str, ...]
) -> tuple[tuple[bool, bool, int, int, int], ...]:
    """Of each layer whether it is a block, and one that no gradient comes to; FLOPs of products with its
    matrices, of its core, and of its matrices' gradients.
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
    """FLOPs of one token in the gradients of a layer's matrices, by the share of them that is trained: all,
    where they belong to another layer.
    """
    matrices = [p for p in {*layer.own, *layer.added_in_forward} if p.dim() > 1]
    sizes = [(prod(p.shard.shape), p.requires_grad) for p in matrices]
    if not sizes:
        return 2 * layer.matrix_elements
    trained = sum(size for size, is_trained in sizes if is_trained)
    return 2 * layer.matrix_elements * trained // sum(size for size, _ in sizes)
