"""Which parameters of a model are not trained, and of which of its blocks autograd therefore sees nothing."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hpctrain.model.part import ModelPart, blocks_of, parameter_list
from hpctrain.parallel.adapter import LayerAdapters
from hpctrain.parallel.scalar_head import ScalarHead


def freeze_parameters(parts: Sequence[ModelPart], patterns: Sequence[str]) -> None:
    """Freeze what the patterns name: no gradient, no weight decay."""
    for parameter in (parameter for part in parts for parameter in parameter_list(part)):
        if any(fnmatchcase(parameter.shard.name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
            parameter.decayed = False


def freeze_all_but_adapters(part: ModelPart) -> None:
    """Freeze what is neither an adapter nor a head of scores, which begins anew."""
    modules = [module for layer in part.layers for module in layer.modules()]
    kept = {parameter for each in modules if isinstance(each, LayerAdapters) for parameter in each.weights}
    kept |= {each.table for each in modules if isinstance(each, ScalarHead)}
    for parameter in parameter_list(part):
        if parameter not in kept:
            parameter.requires_grad_(False)
            parameter.decayed = False


def embedding_trained(part: ModelPart) -> bool:
    """Whether what a part passes to its first block depends on parameters that are trained: its own, or
    those of the parts before.
    """
    return not part.span.embeds or any(p.requires_grad for p in part.layers[0].parameters())


def silent_blocks(part: ModelPart) -> int:
    """Leading blocks that neither are trained nor follow anything that is."""
    if embedding_trained(part):
        return 0
    trained = [any(p.requires_grad for p in block.parameters()) for block in blocks_of(part)]
    return trained.index(True) if True in trained else len(trained)
