"""Delayed scaling: scales from the maxima of steps before, which are known before a tensor is there."""

from __future__ import annotations

import torch
from torch import Tensor

HISTORY_KIND = "fp8"
"""Kinds of State that begin so, "fp8/...", are Histories. A run may leave those that it does not ask for, as
of layers that it multiplies in another format, and goes on with as many maxima as there is room for.
"""


class History:
    """The largest magnitudes of one tensor in the last steps in which it was not zero, as all ranks have
    agreed on them.

    `maxima`, fp32 [steps], is State: the newest first, zero where there was none yet. It changes once a step,
    and not with micro-batches, with what is computed again or with what is computed later: all of a step has
    the same scale.
    """

    def __init__(self, maxima: Tensor) -> None:
        self.maxima = maxima

    @property
    def largest(self) -> Tensor:
        """Of all, [1, 1]; zero as long as nothing is known, when there is no scale to be had."""
        return self.maxima.amax().reshape(1, 1)

    def remember(self, maximum: Tensor) -> None:
        """Add that of a step, a number, finite and of all ranks, and forget the oldest.

        Zeros need no scale, and tell nothing of the numbers to come: theirs is not added, so that what is
        known once stays known.
        """
        newest = maximum.to(self.maxima).reshape(1)
        self.maxima.copy_(torch.where(newest > 0, torch.cat((newest, self.maxima[:-1])), self.maxima))
