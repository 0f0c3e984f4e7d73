"""From a deck to a model's architecture, its parts and their initial values: the one place that knows which
classes these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.deck.schema import Deck
from hpctrain.model.architecture import Architecture
from hpctrain.model.frozen import freeze_all_but_adapters
from hpctrain.model.initialize import initialize
from hpctrain.model.modules.initial_values import initialize_module
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_part import build_module_parts
from hpctrain.model.modules.pipeline.stage_split import module_split_problems, require_call_order
from hpctrain.model.part import LayerRange, ModelPart
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter

Targets = Iterable[tuple[Parameter, Tensor, int]]
"""Flat fp32 tensors to fill, each the elements of a parameter's local piece from an offset on."""


class Maker(NamedTuple):
    """What makes models of one class of architectures: `build_parts`, `initialize_parts` and `split_problems`
    of these.
    """

    parts: Callable[[Any, LayerContext, Sequence[LayerRange]], list[ModelPart]]
    initialize: Callable[[Any, Sequence[ModelPart], Targets, int, float], None]
    problems: Callable[[Any, Sequence[int]], Iterable[str]] = lambda *_: ()


def _transformers(shape: ModelShape, groups: LayerContext, spans: Sequence[LayerRange]) -> list[ModelPart]:
    """Tied embeddings of two of them are one table."""
    parts: list[ModelPart] = []
    table: Parameter | None = None
    for span in spans:
        part = Transformer(shape, groups, span, table)
        if shape.adapters is not None:
            freeze_all_but_adapters(part)
        table = part.table if span.embeds else table
        parts.append(part)
    return parts


def _initialize_transformers(
    shape: ModelShape, _: Sequence[ModelPart], targets: Targets, seed: int, roughness: float
) -> None:
    initialize(targets, shape, seed, roughness)


MAKERS: Mapping[type[Architecture], Maker] = {
    ModelShape: Maker(_transformers, _initialize_transformers),
    ModuleArchitecture: Maker(build_module_parts, initialize_module, module_split_problems),
}


def architecture_of(deck: Deck, vocabulary: int) -> Architecture:
    """The architecture that a deck asks for, with the vocabulary already settled. HpctrainError with all that
    keeps a module from being it.
    """
    if deck.model.module is None:
        return ModelShape.of(deck, vocabulary)
    architecture = ModuleArchitecture.of(deck)
    require_call_order(deck, architecture)
    return architecture


def build_parts(
    architecture: Architecture, groups: LayerContext, spans: Sequence[LayerRange]
) -> list[ModelPart]:
    """The parts of a model that one rank holds, without memory until bucketed."""
    return MAKERS[type(architecture)].parts(architecture, groups, spans)


def initialize_parts(
    architecture: Architecture,
    parts: Sequence[ModelPart],
    targets: Targets,
    seed: int,
    roughness: float = 0.0,
) -> None:
    """Fill the targets, and what else these parts begin with: functions of the seed, equal on every layout.

    With `roughness`, the standard deviation of what is added to biases and norm weights, no two tensors are
    alike: what mistakes one for another shows.
    """
    MAKERS[type(architecture)].initialize(architecture, parts, targets, seed, roughness)


def split_problems(architecture: Architecture, split: Sequence[int]) -> Iterable[str]:
    """What keeps a model from being cut into parts of so many blocks: ends of sentences."""
    return MAKERS[type(architecture)].problems(architecture, split)


def build_model(architecture: Architecture, groups: LayerContext) -> ModelPart:
    """All of a model in one part."""
    (model,) = build_parts(architecture, groups, [LayerRange.all_of(architecture.block_count)])
    return model


def bare_model(architecture: Architecture) -> ModelPart:
    """The whole model as a single rank has it, without memory."""
    ledger = Ledger()
    tensor, context = (planned_group((axis,), 0, 1, ledger) for axis in ("tensor", "context"))
    return build_model(architecture, LayerContext(tensor, context))


@lru_cache(maxsize=64)
def layer_kinds(architecture: Architecture) -> tuple[str, ...]:
    """The kind of each of its layers: of what embeds, of all blocks, and of what predicts."""
    return tuple(layer.kind for layer in bare_model(architecture).layers)
