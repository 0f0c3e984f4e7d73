"""What the routers of a step noted, as figures of each mixture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.model.router import noted_name, router_name
from hpctrain.model.shape import ModelShape


@dataclass(frozen=True)
class ExpertLoad:
    """Of the mixtures of a model, by block: fp64 on the host.

    `tokens` [mixtures, experts] went to each expert, before any was dropped; `dropped` [mixtures] of these
    choices; `entropy` [mixtures] is the mean over the tokens, in nats.
    """

    blocks: tuple[int, ...]
    tokens: Tensor
    dropped: Tensor
    entropy: Tensor

    @staticmethod
    def of(statistics: Mapping[str, Tensor], shape: ModelShape) -> ExpertLoad | None:
        """That of a step in which all ranks `noted` this; None of a dense model."""
        blocks = tuple(filter(shape.is_mixture, range(shape.layers)))
        if not blocks:
            return None
        values = torch.stack([statistics[noted_name(router_name(block))] for block in blocks])
        tokens, others = values.cpu().split((shape.experts, 2), dim=1)
        choices = tokens.sum(1).clamp_min(1)
        return ExpertLoad(
            blocks, tokens, others[:, 0] / choices, others[:, 1] * shape.experts_per_token / choices
        )

    def row(self) -> dict[str, list[float]]:
        """For a line of metrics, a value a mixture: `load` is the most tokens of an expert over the mean,
        `unused` the experts without a token, `dropped` a share of the choices, `entropy` in nats.
        """
        mean = self.tokens.mean(1).clamp_min(1e-300)
        return {
            "blocks": list(self.blocks),
            "load": (self.tokens.amax(1) / mean).tolist(),
            "unused": (self.tokens == 0).sum(1).tolist(),
            "dropped": self.dropped.tolist(),
            "entropy": self.entropy.tolist(),
        }
