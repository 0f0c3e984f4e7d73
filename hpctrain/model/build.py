"""From the shape of a model to its parts: the one place that knows which classes they are."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.model.part import Part, Span
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.groups import ContextForm, LayerGroups
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


def bare_model(
    shape: ModelShape,
    tensor: int = 1,
    sequence_parallel: bool = False,
    context: int = 1,
    context_form: ContextForm = "ring",
) -> Part:
    """The whole model as the first of so many ranks has it, without memory."""
    ledger = Ledger()
    groups = LayerGroups(
        planned_group(("tensor",), 0, tensor, ledger),
        planned_group(("context",), 0, context, ledger),
        sequence_parallel,
        context_form,
    )
    return build_model(shape, groups)
