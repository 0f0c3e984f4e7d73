"""Load of experts in one step, from the statistics that routers record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.model.mixtures.router import router_name, statistic_name
from hpctrain.model.shape import ModelShape


@dataclass(frozen=True)
class ExpertLoad:
    """Load of each mixture of experts, as fp64 tensors on the host.

    Attributes:
        blocks: Blocks that are mixtures.
        tokens: Tokens routed to each expert before any is dropped, [mixtures, experts].
        dropped: Share of choices that are dropped, [mixtures].
        entropy: Mean entropy of the router's probabilities in nats, [mixtures].
    """

    blocks: tuple[int, ...]
    tokens: Tensor
    dropped: Tensor
    entropy: Tensor

    @staticmethod
    def of(statistics: Mapping[str, Tensor], shape: ModelShape) -> ExpertLoad | None:
        """Return the load of a step from the statistics of all ranks, or None for a model without experts."""
        blocks = shape.mixture_blocks
        if shape.experts is None or not blocks:
            return None
        values = torch.stack([statistics[statistic_name(router_name(block))] for block in blocks])
        tokens, others = values.cpu().split((shape.experts.count, 2), dim=1)
        choices = tokens.sum(1).clamp_min(1)
        return ExpertLoad(
            blocks, tokens, others[:, 0] / choices, others[:, 1] * shape.experts.per_token / choices
        )

    def row(self) -> dict[str, list[float]]:
        """Return a row of metrics with a list of values per mixture.

        `load` is the most tokens of an expert divided by the mean, `unused` the number of experts without
        tokens, `dropped` a share of choices, and `entropy` is in nats.
        """
        mean = self.tokens.mean(1).clamp_min(1e-300)
        return {
            "blocks": list(self.blocks),
            "load": (self.tokens.amax(1) / mean).tolist(),
            "unused": (self.tokens == 0).sum(1).tolist(),
            "dropped": self.dropped.tolist(),
            "entropy": self.entropy.tolist(),
        }
