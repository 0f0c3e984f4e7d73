"""Parameters and auxiliary losses of a model, derived from its layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import bare_model
from hpctrain.model.part import parameter_list


@dataclass(frozen=True)
class ModelCount:
    """Parameters and auxiliary losses of a model.

    Attributes:
        parameters: Number of elements of all parameters, without padding.
        active_parameters: The same without experts that a token is not routed to.
        auxiliary_loss_names: Names of the auxiliary losses of all layers.
    """

    parameters: int
    active_parameters: int
    auxiliary_loss_names: tuple[str, ...]


@lru_cache
def count(architecture: Architecture) -> ModelCount:
    """Count the parameters of a model."""
    model = bare_model(architecture)
    parameters = sum(prod(parameter.shard.shape) for parameter in parameter_list(model))
    idle = sum(matrix.idle_elements for layer in model.layers for matrix in layer.matrices)
    names = dict.fromkeys(name for layer in model.layers for name in layer.auxiliary_loss_names)
    return ModelCount(parameters, parameters - idle, tuple(names))
