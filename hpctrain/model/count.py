"""Parameters and FLOPs of a model, derived from its layers."""

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
    """Parameters and FLOPs of a model.

    Attributes:
        parameters: Number of elements of all parameters, without padding.
        active_parameters: The same without experts that a token is not routed to.
        flops_per_token: FLOPs of forward and backward pass for one token.
        block_forward: FLOPs of the forward pass of all blocks for one token.
        core_forward: The part of `block_forward` that is products of queries, keys and values.
        terms: Names of the auxiliary losses of all layers.
    """

    parameters: int
    active_parameters: int
    flops_per_token: float
    block_forward: float
    core_forward: float
    terms: tuple[str, ...]

    def recomputed_flops_per_token(self, recompute: Recomputed) -> float:
        """Return the FLOPs that recomputation adds for one token.

        They are the forward pass of all blocks, or of the products of queries, keys and values for
        "selective".
        """
        return {"none": 0.0, "selective": self.core_forward}.get(str(recompute), self.block_forward)


@lru_cache
def count(shape: Architecture) -> ModelCount:
    """Count parameters and FLOPs of a model, as in arXiv 2104.04473 without recomputation.

    There are 6 FLOPs for each matrix element that a token is multiplied with, including the output layer, and
    12 l h s for the products of queries, keys and values. The causal mask is not subtracted, as in the paper.
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
