"""What goes into a model, and what its layers have to say besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.data.row_lengths import RowLengths
from hpctrain.model.routing_choices import RoutingChoices
from hpctrain.parallel.random import DropoutSource


class AuxiliaryLosses:
    """What layers add to the losses of one micro-batch, as a mixture of experts does to balance its load.

    They go the way of the inputs: every part of the model meets the same record, and so does a layer that is
    computed again, whose term is in the figures once all the same. `scale` is their factor in the gradient.
    """

    def __init__(self, scale: Tensor | None = None) -> None:
        self._scale = scale
        self._values: dict[tuple[str, str], Tensor] = {}

    def add(
        self, x: Tensor, name: str, layer: str, value: Tensor, counted: bool = True, weight: float = 1.0
    ) -> Tensor:
        """`x`, whose backward pass adds `weight` times the gradient of `value` too.

        `value`, 0-dim: this rank's part of a sum over the micro-batch's tokens; where several ranks have the
        same, one of them is `counted`. `layer` tells it from those of other layers with that `name`.
        """
        self._values[name, layer] = value.detach() * counted
        if self._scale is None or not value.requires_grad:
            return x
        result: Tensor = _WithTerm.apply(x, value, self._scale * weight)
        return result

    def add_to(self, sums: Tensor, names: Sequence[str]) -> None:
        """Add to `sums`, fp64 [names], what layers have added so far."""
        for (name, _), value in self._values.items():
            sums[names.index(name)] += value


class _WithTerm(torch.autograd.Function):
    """x, beside whose gradient goes that of a term: the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale.to(value.dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.scale, None


class Cache(Protocol):
    """Cache of keys and values of growing texts. A pass adds the keys and values of its rows."""

    def attend(self, block: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return the result of attention in a block of the model, with the keys and values in the cache.

        Each row attends to all earlier tokens of its own text.

        Args:
            block: Number of the block.
            query: Queries [n, 1, heads, d] before the rotary embedding.
            key: Keys of the same rows.
            value: Values of the same rows.
            scale: Factor of the attention scores; None for the default.
        """


@dataclass(frozen=True)
class ModelInputs:
    """One micro-batch as this rank's model sees it.

    Attributes:
        fields: Fields of the micro-batch by name, each [b, ...]; of sequences this rank's piece [b, s].
        positions: Global positions of the local piece of the sequence, int64 [s]. With a `cache`, those of
            each row in its own text.
        dropout: Source of dropout masks. None if nothing is dropped.
        terms: Takes what layers add to the losses.
        samples: Number of rows that are samples; the other rows follow them. None if all rows are samples.
        choices: Gives routers their experts, or takes which ones they chose.
        documents: Documents of whole sequences. Attention stays within one, and learned positions count
            from its beginning. None if each sequence is one document.
        cache: Keys and values of texts that are continued. Then b is 1, and s is any rows of any texts.
        lengths: Numbers of real tokens of whole sequences. None if there is no padding.
    """

    fields: Mapping[str, Tensor]
    positions: Tensor
    dropout: DropoutSource | None = None
    terms: AuxiliaryLosses = field(default_factory=AuxiliaryLosses)
    samples: int | None = None
    choices: RoutingChoices | None = None
    documents: Documents | None = None
    cache: Cache | None = None
    lengths: RowLengths | None = None
    _real_rows: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of_tokens(
        tokens: Tensor,
        positions: Tensor,
        dropout: DropoutSource | None = None,
        terms: AuxiliaryLosses | None = None,
    ) -> ModelInputs:
        """Tokens [s, b] alone, all of which are of samples."""
        return ModelInputs(
            {"tokens": tokens.t()}, positions, dropout, AuxiliaryLosses() if terms is None else terms
        )

    @property
    def tokens(self) -> Tensor:
        """Of sequences, these in front: int64 [s, b], contiguous."""
        return self.fields["tokens"].t()

    @property
    def rows(self) -> int:
        """The b of them."""
        return len(next(iter(self.fields.values())))

    @property
    def present(self) -> int:
        """Rows of b that are samples."""
        return self.rows if self.samples is None else self.samples

    @cached_property
    def padding(self) -> Tensor | None:
        """Places of the local piece that hold no real token, bool [s, b]; None if there are none."""
        return None if self.lengths is None else self.lengths.padding_at(self.positions)

    def real_rows(self, rows: slice) -> Tensor | None:
        """Return the indices [n] of the real tokens among `rows` of the flat [s, b] tokens; None if all are.

        On a GPU the first call for some rows waits for the device; later calls return the same tensor.
        """
        if self.padding is None:
            return None
        key = (rows.start, rows.stop)
        if key not in self._real_rows:
            self._real_rows[key] = (~self.padding.flatten()[rows]).nonzero().flatten()
        return self._real_rows[key]
