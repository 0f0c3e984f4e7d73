"""Inputs of a model for one micro-batch, and what its layers add: auxiliary losses and routing choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.data.row_lengths import RowLengths
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.random import DropoutSource


class RoutingChoices:
    """Experts that routers choose in one micro-batch.

    No method waits for the device.

    Attributes:
        records: True if `recorded_experts` is filled.
        prescribed: Experts that tokens must be routed to, int64 [samples, s, k] on the device, by router. A
            router chooses itself where the value is -1.
        recorded_experts: Rows (sample of the micro-batch, position, experts), int64 [n, 2 + k], by router.
            Recomputation records the same rows again.
    """

    def __init__(self, records: bool, prescribed: Mapping[str, Tensor]) -> None:
        self.records, self.prescribed = records, prescribed
        self.recorded_experts: dict[str, Tensor] = {}

    def override(self, router: str, chosen: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """Return the experts [n, k] that tokens are routed to, and record them if `records`.

        They are the prescribed ones, and those that the router chose where none are prescribed.

        Args:
            router: Name of the router.
            chosen: Experts that the router chose, [n, k].
            samples: Sample of each token, int64 [n].
            positions: Position of each token, int64 [n].
        """
        prescribed = self.prescribed.get(router)
        if prescribed is not None:
            known = prescribed[samples, positions]
            chosen = torch.where(known < 0, chosen, known)
        if self.records:
            self.recorded_experts[router] = torch.cat(
                (samples.unsqueeze(1), positions.unsqueeze(1), chosen), dim=1
            )
        return chosen


class AuxiliaryLosses:
    """Losses that layers add in one micro-batch, such as the load balancing of a mixture of experts.

    All parts of a model on this rank share one object. A recomputed layer adds its loss again, which counts
    once in the metrics.

    Args:
        scale: Factor of the losses in the gradient; None if there is no backward pass.
    """

    def __init__(self, scale: Tensor | None = None) -> None:
        self._scale = scale
        self._values: dict[tuple[str, str], Tensor] = {}

    def add(
        self, x: Tensor, name: str, layer: str, value: Tensor, counted: bool = True, weight: float = 1.0
    ) -> Tensor:
        """Return `x` with a backward pass that also adds `weight` times the gradient of `value`.

        Args:
            x: Any tensor on the path of the loss.
            name: Name of the loss in metrics.
            layer: Name of the layer, which tells apart losses of one name.
            value: This rank's part of a sum over the micro-batch's tokens, 0-dim.
            counted: False if another rank counts the same value.
            weight: Weight of the loss.
        """
        self._values[name, layer] = value.detach() * counted
        if self._scale is None or not value.requires_grad:
            return x
        result: Tensor = _WithAuxiliaryLoss.apply(x, value, self._scale * weight)
        return result

    def add_to(self, sums: Tensor, names: Sequence[str]) -> None:
        """Add to `sums`, fp64 [names], what layers have added so far."""
        for (name, _), value in self._values.items():
            sums[names.index(name)] += value


class _WithAuxiliaryLoss(torch.autograd.Function):
    """Identity whose backward pass also sends a scale as the gradient of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale.to(value.dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.scale, None


def field_ahead(name: str, depth: int) -> str:
    """Return the name of the field whose values are those of another one `depth` positions further ahead.

    Modules of multi-token prediction need the tokens and the targets that follow. Such fields are made of
    whole sequences, since a context rank does not have the tokens after its pieces.
    """
    return f"{name}+{depth}"


class Cache(Protocol):
    """Cache of keys and values of growing texts. A pass adds the keys and values of its rows."""

    def attend(self, block: int, inputs: AttentionInputs, rule: AttentionRule) -> Tensor:
        """Return the result of attention in a block of the model, with the keys and values in the cache.

        Each row attends to all earlier tokens of its own text.

        Args:
            block: Number of the block.
            inputs: Queries, keys and values [n, 1, heads, d] of n rows before rotation, and sinks. The cache
                has the tables of a Rotary.
            rule: Scale, window and soft cap.
        """


@dataclass(frozen=True)
class ModelInputs:
    """One micro-batch as this rank's model sees it.

    Attributes:
        fields: Fields by name that the objective takes from the micro-batch, each [b, ...]; of sequences this
            rank's piece [b, s].
        positions: Global positions of the local piece of the sequence, int64 [s]. With a `cache`, those of
            each row in its own text.
        dropout: Source of dropout masks. None if nothing is dropped.
        auxiliary_losses: Collects the losses that layers add.
        samples: Number of rows that are samples; the other rows follow them. None if all rows are samples.
        choices: Prescribes the experts of routers, or records those that they choose.
        documents: Documents of whole sequences. Attention stays within one, and learned positions count
            from its beginning. None if each sequence is one document.
        cache: Keys and values of texts that are continued. Then b is 1, and the s rows may belong to any
            texts.
        lengths: Numbers of real tokens of whole sequences. None if there is no padding.
        text_length: Number of tokens of each text, on which scaled rotary positions may depend. None for the
            length of the model's sequences, as in training.
    """

    fields: Mapping[str, Tensor]
    positions: Tensor
    dropout: DropoutSource | None = None
    auxiliary_losses: AuxiliaryLosses = field(default_factory=AuxiliaryLosses)
    samples: int | None = None
    choices: RoutingChoices | None = None
    documents: Documents | None = None
    cache: Cache | None = None
    lengths: RowLengths | None = None
    text_length: int | None = None
    _real_rows: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of_tokens(
        tokens: Tensor,
        positions: Tensor,
        dropout: DropoutSource | None = None,
        auxiliary_losses: AuxiliaryLosses | None = None,
    ) -> ModelInputs:
        """Return inputs that are only tokens [s, b], with all rows being samples."""
        return ModelInputs(
            {"tokens": tokens.t()},
            positions,
            dropout,
            AuxiliaryLosses() if auxiliary_losses is None else auxiliary_losses,
        )

    @staticmethod
    def of_texts(tokens: Tensor) -> ModelInputs:
        """Return inputs of complete texts [b, s] of the same length, outside of training."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return ModelInputs({"tokens": tokens.t().contiguous().t()}, positions, text_length=len(positions))

    @property
    def tokens(self) -> Tensor:
        """Token ids, sequence first: int64 [s, b], contiguous."""
        return self.fields["tokens"].t()

    @property
    def rows(self) -> int:
        """Number b of rows."""
        return len(next(iter(self.fields.values())))

    @property
    def present(self) -> int:
        """Number of rows that are samples."""
        return self.rows if self.samples is None else self.samples

    @cached_property
    def padding(self) -> Tensor | None:
        """Positions of the local piece that hold no real token, bool [s, b]; None if there are none."""
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
