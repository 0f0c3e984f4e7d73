"""Construction of a model from a deck: its architecture, its parts, and their initial values.

This is the only module that knows all classes of architectures and parts.
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
from hpctrain.model.modules.initial_values import initialize_module
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_part import build_module_parts
from hpctrain.model.modules.pipeline.stage_split import module_split_problems, require_call_order
from hpctrain.model.parameters.frozen import freeze_all_but_adapters
from hpctrain.model.parameters.initialize import initialize
from hpctrain.model.part import LayerKind, LayerRange, ModelPart
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter

Targets = Iterable[tuple[Parameter, Tensor, int]]
"""Parameters, flat fp32 tensors to fill, and the offset of these in the parameter's local piece."""


class ModelFamily(NamedTuple):
    """Functions that build models of one class of architectures.

    Attributes:
        parts: Implementation of `build_parts`.
        initialize: Implementation of `initialize_parts`.
        problems: Implementation of `split_problems`.
    """

    parts: Callable[[Any, LayerContext, Sequence[LayerRange]], list[ModelPart]]
    initialize: Callable[[Any, Sequence[ModelPart], Targets, int, float], None]
    problems: Callable[[Any, Sequence[int]], Iterable[str]] = lambda *_: ()


def _transformers(
    shape: ModelShape, layer_context: LayerContext, spans: Sequence[LayerRange]
) -> list[ModelPart]:
    """Build parts of a transformer. Tied embeddings of two parts on this rank are one parameter."""
    parts: list[ModelPart] = []
    table: Parameter | None = None
    for span in spans:
        part = Transformer(shape, layer_context, span, table)
        if shape.adapters is not None:
            freeze_all_but_adapters(part)
        table = part.table if span.has_embedding else table
        parts.append(part)
    return parts


def _initialize_transformers(
    shape: ModelShape, _: Sequence[ModelPart], targets: Targets, seed: int, noise_std: float
) -> None:
    initialize(targets, shape, seed, noise_std)


MODEL_FAMILIES: Mapping[type[Architecture], ModelFamily] = {
    ModelShape: ModelFamily(_transformers, _initialize_transformers),
    ModuleArchitecture: ModelFamily(build_module_parts, initialize_module, module_split_problems),
}


def architecture_of(deck: Deck, vocabulary: int) -> Architecture:
    """Return the architecture that a deck asks for.

    Args:
        deck: The deck.
        vocabulary: Size of the vocabulary, which the data may have decided.

    Raises:
        HpctrainError: A user's module cannot be trained as the deck says.
    """
    if deck.model.module is None:
        return ModelShape.of(deck, vocabulary)
    architecture = ModuleArchitecture.of(deck)
    require_call_order(deck, architecture)
    return architecture


def build_parts(
    architecture: Architecture, layer_context: LayerContext, spans: Sequence[LayerRange]
) -> list[ModelPart]:
    """Build the parts of a model that this rank holds, one for each range of blocks.

    Parameters have no memory before they are in buckets.
    """
    return MODEL_FAMILIES[type(architecture)].parts(architecture, layer_context, spans)


def initialize_parts(
    architecture: Architecture,
    parts: Sequence[ModelPart],
    targets: Targets,
    seed: int,
    noise_std: float = 0.0,
) -> None:
    """Fill targets with initial values, which depend on the seed and are equal on every layout.

    Args:
        architecture: Architecture of the model.
        parts: This rank's parts. What they hold besides parameters is initialized as well.
        targets: Flat fp32 tensors, each for the elements of a parameter's local piece from an offset on.
        seed: Seed of the run.
        noise_std: Standard deviation of noise that is added to biases and norm weights. Checks use it, so
            that no two tensors are alike and a mix-up shows.
    """
    MODEL_FAMILIES[type(architecture)].initialize(architecture, parts, targets, seed, noise_std)


def split_problems(architecture: Architecture, split: Sequence[int]) -> Iterable[str]:
    """Return the problems of dividing a model into stages of so many blocks, as ends of sentences."""
    return MODEL_FAMILIES[type(architecture)].problems(architecture, split)


def build_model(architecture: Architecture, layer_context: LayerContext) -> ModelPart:
    """Build a model in one part."""
    (model,) = build_parts(architecture, layer_context, [LayerRange.all_of(architecture.block_count)])
    return model


def bare_model(architecture: Architecture) -> ModelPart:
    """Build the model as a single rank has it, without memory."""
    ledger = Ledger()
    tensor, context = (planned_group((axis,), 0, 1, ledger) for axis in ("tensor", "context"))
    return build_model(architecture, LayerContext(tensor, context))


@lru_cache(maxsize=64)
def layer_kinds(architecture: Architecture) -> tuple[LayerKind, ...]:
    """Return the kind of each layer: the embedding, all blocks, and the output layer."""
    return tuple(layer.kind for layer in bare_model(architecture).layers)
