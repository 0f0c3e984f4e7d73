"""Frozen parameters of a model, and leading blocks that need no backward pass because of them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hpctrain.model.part import ModelPart, blocks_of, parameter_list
from hpctrain.parallel.adapter import LayerAdapters
from hpctrain.parallel.scalar_head import ScalarHead


def freeze_parameters(parts: Sequence[ModelPart], patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern: they have no gradient and no weight decay.

    Patterns are those of `fnmatch` for the full name, so `*` also matches dots.
    """
    for parameter in (parameter for part in parts for parameter in parameter_list(part)):
        if any(fnmatchcase(parameter.shard.name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
            parameter.has_weight_decay = False


def freeze_all_but_adapters(part: ModelPart) -> None:
    """Freeze all parameters except adapters and a scalar head, which has no pretrained values."""
    modules = [module for layer in part.layers for module in layer.modules()]
    trained = {parameter for each in modules if isinstance(each, LayerAdapters) for parameter in each.weights}
    trained |= {each.table for each in modules if isinstance(each, ScalarHead)}
    for parameter in parameter_list(part):
        if parameter not in trained:
            parameter.requires_grad_(False)
            parameter.has_weight_decay = False


def embedding_trained(part: ModelPart) -> bool:
    """Return True if the input of a part's first block depends on trained parameters of any part."""
    return not part.span.has_embedding or any(p.requires_grad for p in part.layers[0].parameters())


def blocks_without_backward(part: ModelPart) -> int:
    """Return the number of leading blocks without trained parameters in themselves or before them."""
    if embedding_trained(part):
        return 0
    trained = [any(p.requires_grad for p in block.parameters()) for block in blocks_of(part)]
    return trained.index(True) if True in trained else len(trained)
