"""Dynamic loss scale for fp16 (arXiv 1710.03740); it is 1 for all other formats.

Losses are multiplied by it before the backward pass, so that small gradients do not vanish in fp16.
"""

from __future__ import annotations

from hpctrain.deck.sections.precision import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE


class LossScale:
    """Factor that is halved after a non-finite gradient and doubled after `window` finite ones in a row.

    Attributes:
        value: Current factor.
        window: Number of steps after which it is doubled. With 0 it is constant.
        good_steps: Steps with finite gradients since the last change.
    """

    def __init__(self, initial: float, window: int) -> None:
        self.value, self.window = initial, window
        self.good_steps = 0

    @property
    def can_fall(self) -> bool:
        """True if a lower scale may still make gradients finite that are not."""
        return self.window > 0 and self.value > SMALLEST_LOSS_SCALE

    def update(self, finite: bool) -> None:
        """Adapt the factor to a step, whose gradients were all finite on all ranks or not. Local."""
        if not self.window:
            return
        if not finite:
            self.value = max(SMALLEST_LOSS_SCALE, self.value / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.value = min(LARGEST_LOSS_SCALE, self.value * 2)
            self.good_steps = 0
