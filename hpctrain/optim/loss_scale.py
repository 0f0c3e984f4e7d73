"""Dynamic loss scale for fp16 (arXiv 1710.03740); constant 1 for the other formats."""

from __future__ import annotations

from hpctrain.deck.sections.precision import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE


class LossScale:
    """Halves after a step with a non-finite gradient, doubles after `window` good ones in a row.

    A `window` of 0 keeps the scale constant.
    """

    def __init__(self, initial: float, window: int) -> None:
        self.value, self.window = initial, window
        self.good_steps = 0

    @property
    def can_fall(self) -> bool:
        """True if a lower scale may still make gradients finite that are not."""
        return self.window > 0 and self.value > SMALLEST_LOSS_SCALE

    def update(self, finite: bool) -> None:
        """Learn whether the step's gradients were finite."""
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
