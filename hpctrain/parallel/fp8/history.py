"""Histories of the maxima from which delayed scales follow."""

from __future__ import annotations

import torch
from torch import Tensor

HISTORY_KIND = "fp8"
"""Beginning of the kinds of state that are histories, "fp8/...".

A run may ignore histories that it does not need, such as those of layers that it multiplies in another
format, and uses as many maxima as its own histories have room for.
"""


class MaximaHistory:
    """Largest magnitudes of a tensor in the last steps in which it was not zero, over all ranks.

    They change once a step, so all micro-batches of a step, and what is recomputed or deferred, use the same
    scale.

    Attributes:
        maxima: fp32 [steps], the newest first, zero for steps that are missing.
    """

    def __init__(self, maxima: Tensor) -> None:
        self.maxima = maxima

    @property
    def largest(self) -> Tensor:
        """Largest maximum, [1, 1]. It is zero as long as none is known; then there is no scale."""
        return self.maxima.amax().reshape(1, 1)

    def append(self, maximum: Tensor) -> None:
        """Add the maximum of a step and drop the oldest one.

        A maximum of zero is not added: zeros need no scale and tell nothing about later steps.

        Args:
            maximum: Finite number, the same on all ranks.
        """
        newest = maximum.to(self.maxima).reshape(1)
        self.maxima.copy_(torch.where(newest > 0, torch.cat((newest, self.maxima[:-1])), self.maxima))
