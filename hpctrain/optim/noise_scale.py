"""Gradient noise scale (arXiv 1812.06162, appendix A.1), from gradient norms at two batch sizes of a step.

A mean gradient over B sequences has E |G_B|^2 = |G|^2 + S / B, where G is the true gradient and S is the
trace of the covariance of one sequence's gradient. Norms at two batch sizes give unbiased estimates of |G|^2
and S. Both are averaged over steps before they are divided, because the ratio of two estimates is biased.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NoiseScale:
    """Exponential averages of the estimates of |G|^2 and S, and the noise scale S / |G|^2.

    Attributes:
        steps: Number of updates over which the averages extend. With 0 nothing is measured.
        signal: Weighted sum of estimates of |G|^2.
        noise: Weighted sum of estimates of S.
        weight: Sum of the weights, which approaches 1. Sums are divided by it.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.signal = self.noise = self.weight = 0.0

    def update(self, small: float, big: float, batch: float, ratio: float) -> None:
        """Add the estimates of one update to the averages. Local; called after each update if `steps` > 0.

        Args:
            small: Square norm of the mean gradient over `batch / ratio` sequences.
            big: Square norm of the mean gradient over `batch` sequences.
            batch: Number of sequences of the step.
            ratio: Ratio of the two batch sizes, above 1.
        """
        signal = (ratio * big - small) / (ratio - 1)
        noise = (small - big) * batch / (ratio - 1)
        new = 1 / self.steps
        self.signal += new * (signal - self.signal)
        self.noise += new * (noise - self.noise)
        self.weight += new * (1 - self.weight)

    def metrics(self, tokens: float) -> dict[str, float]:
        """Return the averages and the noise scale by name; nothing before the first update.

        Args:
            tokens: Number of tokens of a sequence.

        Returns:
            "gradient_signal" is |G|^2, and "gradient_noise" is S. If both are positive, "noise_scale" is
            S / |G|^2 in sequences, and "noise_scale_tokens" is the same in tokens.
        """
        if not self.weight:
            return {}
        averages = {"gradient_signal": self.signal / self.weight, "gradient_noise": self.noise / self.weight}
        if self.signal > 0 and self.noise > 0:
            scale = self.noise / self.signal
            return {"noise_scale": scale, "noise_scale_tokens": scale * tokens, **averages}
        return averages

    def state(self) -> dict[str, dict[str, float]]:
        """Return the state for a checkpoint, as JSON; empty if nothing is measured."""
        averages = {"signal": self.signal, "noise": self.noise, "weight": self.weight}
        return {"noise_scale": averages} if self.steps else {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the averages from the state of a checkpoint, if it has any."""
        averages = state.get("noise_scale")
        if self.steps and averages:
            self.signal, self.noise, self.weight = (float(averages[k]) for k in ("signal", "noise", "weight"))
