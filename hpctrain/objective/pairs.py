"""Base class of objectives for preference pairs: two answers of which one was preferred."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.objective.objective import Objective


class PairObjective(Objective):
    """Count and metrics of preference pairs.

    A pair is two neighbouring rows of a micro-batch, the chosen answer first. Losses and metrics are means
    over pairs. Only the forward passes find out which pairs have an empty answer and do not count. So the
    step first divides by the number of tokens, and `normalize` corrects that afterwards.
    """

    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin", "chosen", "rejected", "pairs")

    @override
    def normalize(self, metrics: dict[str, float]) -> float:
        """Turn metrics per token into means over pairs, in place, and remove the entry "pairs".

        Args:
            metrics: Sums over all ranks, divided by the number of tokens. "pairs" is the number of pairs
                divided by that number.

        Returns:
            Value of "pairs", by which gradients must still be divided; 1 if there was no pair.
        """
        pairs = metrics.pop("pairs") or 1.0
        metrics |= {name: value / pairs for name, value in metrics.items() if name in self.metrics}
        return pairs


def pair_sums(
    present: Tensor, losses: Tensor, margin: Tensor, chosen: Tensor, rejected: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of pairs, which has a gradient, and the sums of the metrics, fp64.

    The sums of metrics have no gradient. They are in the order of `metrics` and end with the number of pairs.

    Args:
        present: For each pair [pairs], whether it counts.
        losses: Loss of each pair.
        margin: Margins of the chosen answers. The accuracy is the share of positive ones; a tie counts half.
        chosen: Rewards of the chosen answers.
        rejected: Rewards of the rejected answers.
    """
    right = (margin > 0).double() + 0.5 * (margin == 0)
    metrics = (losses, right, margin, chosen, rejected, torch.ones_like(margin))
    sums = torch.stack([each.detach().masked_fill(~present, 0.0).sum() for each in metrics])
    return losses.masked_fill(~present, 0.0).sum(), sums
