"""The gradient noise scale (arXiv 1812.06162, appendix A.1), from the norms at two batch sizes of a step.

A mean gradient over B sequences has E |G_B|^2 = |G|^2 + S / B, where G is the true gradient, and S the trace
of the covariance of a single sequence's. Two sizes give both without bias; what a step gives is rough, and is
averaged over steps before the two are divided, since their ratio is not without bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def estimates(small: float, big: float, batch: float, ratio: float) -> tuple[float, float]:
    """Estimates without bias of (|G|^2, S), of the square norms `small` and `big` of mean gradients over
    `batch` / `ratio` and over `batch` sequences. `ratio` is above 1.
    """
    signal = (ratio * big - small) / (ratio - 1)
    noise = (small - big) * batch / (ratio - 1)
    return signal, noise


class NoiseScale:
    """Exponential averages of |G|^2 and S over about the last `steps` updates; with 0 nothing is measured.

    `weight` is what the weights of all updates so far add up to, by which sums are divided: 1 in the end.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.signal = self.noise = self.weight = 0.0

    def update(self, small: float, big: float, batch: float, ratio: float) -> None:
        """Learn of an update; arguments as in `estimates`."""
        signal, noise = estimates(small, big, batch, ratio)
        new = 1 / self.steps
        self.signal += new * (signal - self.signal)
        self.noise += new * (noise - self.noise)
        self.weight += new * (1 - self.weight)

    def figures(self, tokens: float) -> dict[str, float]:
        """By name: "gradient_signal" is |G|^2, "gradient_noise" S of a sequence, "noise_scale" S / |G|^2 in
        sequences, and in tokens, of which a sequence has so many. It is there where both are above zero.
        """
        if not self.weight:
            return {}
        found = {"gradient_signal": self.signal / self.weight, "gradient_noise": self.noise / self.weight}
        if self.signal > 0 and self.noise > 0:
            scale = self.noise / self.signal
            return {"noise_scale": scale, "noise_scale_tokens": scale * tokens, **found}
        return found

    def state(self) -> dict[str, dict[str, float]]:
        """What a checkpoint stores, as JSON; nothing where nothing is measured."""
        kept = {"signal": self.signal, "noise": self.noise, "weight": self.weight}
        return {"noise_scale": kept} if self.steps else {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from the averages in the state of a checkpoint, or begin where it has none."""
        kept = state.get("noise_scale")
        if self.steps and kept:
            self.signal, self.noise, self.weight = (float(kept[k]) for k in ("signal", "noise", "weight"))
