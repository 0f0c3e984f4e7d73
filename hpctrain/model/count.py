"""Parameters and FLOPs of a whole model, told by its layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import bare_model
from hpctrain.model.part import blocks_of, parameter_list
from hpctrain.model.shape import Recomputed


@dataclass(frozen=True)
class ModelCount:
    """`parameters`: elements of all, without padding; `active_parameters` without those of experts that a
    token does not go to. FLOPs are those of one token. `terms` names what layers add to the losses.

    `block_forward` is the forward pass of all blocks, `core_forward` the part of it that is not products with
    their matrices: of queries, keys and values.
    """

    parameters: int
    active_parameters: int
    flops_per_token: float
    block_forward: float
    core_forward: float
    terms: tuple[str, ...]

    def recomputed_flops_per_token(self, recompute: Recomputed) -> float:
        """FLOPs that recomputation adds to one token's backward pass: the forward pass again.

        Of all blocks, or of the products of queries, keys and values alone ("selective").
        """
        return {"none": 0.0, "selective": self.core_forward}.get(str(recompute), self.block_forward)


@lru_cache
def count(shape: Architecture) -> ModelCount:
    """The count of a model: forward and backward pass (arXiv 2104.04473, without recomputation).

    6 FLOPs for every matrix element that a token is multiplied with, the head's included, and 12 l h s for
    the products of queries, keys and values; the causal mask is not subtracted, as in the paper.
    """
    model = bare_model(shape)
    forward = sum(2 * layer.matrix_elements + layer.core_flops for layer in model.layers)
    blocks = blocks_of(model)
    parameters = sum(prod(parameter.shard.shape) for parameter in parameter_list(model))
    return ModelCount(
        parameters,
        parameters - sum(layer.idle_elements for layer in model.layers),
        3.0 * forward,
        float(sum(2 * block.matrix_elements + block.core_flops for block in blocks)),
        float(sum(block.core_flops for block in blocks)),
        tuple(dict.fromkeys(name for layer in model.layers for name in layer.terms)),
    )
