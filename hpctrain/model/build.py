"""From the shape of a model to its parts: the one place that knows which classes they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.model.part import Part, Span
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.shard import Parameter


def build_parts(shape: ModelShape, groups: LayerGroups, spans: Sequence[Span]) -> list[Part]:
    """The parts of a model that one rank holds; tied embeddings of two of them are one table."""
    parts: list[Part] = []
    table: Parameter | None = None
    for span in spans:
        part = Transformer(shape, groups, span, table)
        table = part.table if span.embeds else table
        parts.append(part)
    return parts


def build_model(shape: ModelShape, groups: LayerGroups) -> Part:
    """All of a model in one part."""
    (model,) = build_parts(shape, groups, [Span.all_of(shape.layers)])
    return model


def bare_model(shape: ModelShape) -> Part:
    """The whole model as a single rank has it, without memory."""
    ledger = Ledger()
    tensor, context = (planned_group((axis,), 0, 1, ledger) for axis in ("tensor", "context"))
    return build_model(shape, LayerGroups(tensor, context))


@lru_cache(maxsize=64)
def layer_kinds(shape: ModelShape) -> tuple[str, ...]:
    """The kind of each of its layers: of what embeds, of all blocks, and of what predicts."""
    return tuple(layer.kind for layer in bare_model(shape).layers)
