"""Seconds of the passes of layers and pipeline parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.model.part import Layer, LayerKind
from hpctrain.pipeline.simulate import StageTimes


class PassTimes(NamedTuple):
    """Seconds of the passes of one micro-batch, or FLOPs of those of one token (`layer_flops`).

    The whole backward pass takes `input_gradient + weight_gradient`.
    """

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        """Seconds of the forward and the backward pass."""
        return sum(self)

    def without(self, other: PassTimes) -> PassTimes:
        """Return the times without those of another layer, at least 0."""
        return PassTimes(*(max(0.0, both - one) for both, one in zip(self, other, strict=True)))


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one micro-batch in a layer of each kind, the same on all ranks.

    Attributes:
        of_kind: Times by kind of layer. That of the head includes the final norm and the loss; its weight
            gradient counts as forward, where it is computed.
        communication: Seconds of sending hidden states from one stage to the next.
    """

    of_kind: Mapping[LayerKind, PassTimes]
    communication: float

    def of_parts(self, parts: Iterable[Sequence[Layer]]) -> StageTimes:
        """Return the times of each part of a pipeline, given the layers of each part."""
        passes = ([self.of_kind[layer.kind] for layer in part] for part in parts)
        return times_of_parts(passes, self.communication)


def times_of_parts(parts: Iterable[Sequence[PassTimes]], communication: float = 0.0) -> StageTimes:
    """Return the times of each part of a pipeline, given the times of the layers of each part."""
    sums = zip(*(map(sum, zip(*part, strict=True)) for part in parts), strict=True)
    forward, input_gradient, weight_gradient = map(list, sums)
    return StageTimes(forward, input_gradient, weight_gradient, communication)
