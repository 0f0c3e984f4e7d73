"""Spikes: steps whose loss or gradient norm is far above those of the steps before.

A value is compared with the median of recent steps. The unit is 1.4826 times the median absolute deviation,
which single outliers do not change; for normal values it is the standard deviation (Rousseeuw and Croux,
JASA 1993). A run may skip the update of such a step, or return to an earlier state and skip the batches since
then, as was done by hand for PaLM (arXiv 2204.02311, section 5.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf, isfinite
from statistics import median
from typing import Any, Literal

from hpctrain.files import finite

SpikeAction = Literal["off", "skip", "rollback"]

LEAST_DEVIATION = 0.01
"""Smallest deviation as a fraction of the median, for runs whose values hardly change."""

MOST_RECORDED_SPIKES = 1000
"""Largest number of spikes that a run records. It keeps the newest ones."""

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class Spike:
    """Step with a spike, whose update was skipped or after which the run returned to an earlier state.

    Checkpoints and `metrics.jsonl` store it.

    Attributes:
        step: Number of the step.
        loss: Loss of the step, or None if it is not finite.
        grad_norm: Gradient norm of the step, or None if it is not finite.
        why: Reason, as text.
        first_sample: Number of samples of the run before the skipped ones.
        samples: Number of skipped samples.
        back_to: Step to whose state the run returned, or None. Then all samples since that step are skipped.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    why: str
    first_sample: int
    samples: int
    back_to: int | None = None

    @staticmethod
    def of(row: object) -> Spike | None:
        """Return the spike of a stored JSON object, or None if the object is no spike."""
        if not isinstance(row, dict) or {field.name for field in fields(Spike)} - set(row):
            return None
        return Spike(**{field.name: row[field.name] for field in fields(Spike)})


class SpikeDetector:
    """Finds spikes and records them. All ranks have the same state, because they receive the same values.

    Attributes:
        action: Reaction of the run to a spike.
        factor: Number of deviations above the median from which a value is a spike.
        limit: Number of spikes after which the run stops at the next one.
        warmup: Number of steps at the start in which only values that are not finite are spikes.
        enabled: False if the action is "off".
        window: Number of recent steps with an update that a step is compared with.
        has_loss_scale: True if there is a loss scale, which handles gradient norms that are not finite.
        count: Number of spikes of the run.
        recorded: The newest spikes, the oldest first.
    """

    def __init__(
        self,
        action: SpikeAction,
        window: int,
        factor: float,
        limit: int,
        warmup: int,
        has_loss_scale: bool = False,
    ) -> None:
        self.action, self.factor, self.limit, self.warmup = action, factor, limit, warmup
        self.enabled = action != "off"
        self.window, self.has_loss_scale = window, has_loss_scale
        self.count = 0
        self.recorded: deque[Spike] = deque(maxlen=MOST_RECORDED_SPIKES)
        self._last: deque[tuple[float, float]] = deque(maxlen=window)

    def find_spike(
        self, step: int, loss: float, norm: float, first_sample: int, samples: int
    ) -> Spike | None:
        """Return a spike if the loss or the gradient norm of a step is one, else None. Changes no state.

        It is called only if `enabled`. Afterwards, the caller calls `record_spike` with the spike, or
        `add_step` if there is none and the step makes its update.

        Args:
            step: Number of the step, from 1.
            loss: Its loss.
            norm: Its gradient norm before clipping.
            first_sample: Number of samples of the run before this step.
            samples: Number of samples of this step.
        """
        why = self._reason(step, loss, norm)
        if not why:
            return None
        return Spike(step, finite(loss), finite(norm), why, first_sample, samples)

    def add_step(self, loss: float, norm: float) -> None:
        """Add a step that made its update to the window. It is called only if `enabled`."""
        self._last.append((loss, norm))

    def record_spike(self, spike: Spike) -> None:
        """Count and record a spike."""
        self.count += 1
        self.recorded.append(spike)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON; empty if it is off and there were no spikes."""
        if not self.enabled and not self.count:
            return {}
        found = [asdict(spike) for spike in self.recorded]
        return {"spikes": {"count": self.count, "window": list(map(list, self._last)), "found": found}}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. Without one, start empty."""
        stored = state.get("spikes") or {}
        self.count = int(stored.get("count", 0))
        self._last = deque(((float(a), float(b)) for a, b in stored.get("window", ())), maxlen=self.window)
        self.recorded = deque(recorded_spikes(state), maxlen=MOST_RECORDED_SPIKES)

    @property
    def record(self) -> tuple[int, tuple[Spike, ...]]:
        """Number of spikes, and the newest of them."""
        return self.count, tuple(self.recorded)

    def restore_record(self, record: tuple[int, tuple[Spike, ...]], spike: Spike) -> None:
        """Restore the record after the run has returned to an earlier state, and add the spike."""
        self.count, self.recorded = record[0], deque(record[1], maxlen=MOST_RECORDED_SPIKES)
        self.record_spike(spike)

    def _reason(self, step: int, loss: float, norm: float) -> str:
        values = {"loss": loss, "gradient norm": norm}
        problems = [
            f"{name} {value:g} is not finite" for name, value in values.items() if not isfinite(value)
        ]
        if problems:
            return "" if self.has_loss_scale and isfinite(loss) else " and ".join(problems)
        if step <= self.warmup or len(self._last) < self.window:
            return ""
        columns = zip(values.items(), zip(*self._last, strict=True), strict=True)
        reasons = (self._distance(name, value, column) for (name, value), column in columns)
        return " and ".join(filter(None, reasons))

    def _distance(self, name: str, value: float, column: Sequence[float]) -> str:
        middle = median(column)
        deviation = _NORMAL * median(abs(each - middle) for each in column)
        deviation = max(deviation, LEAST_DEVIATION * abs(middle))
        above = value - middle
        if above <= self.factor * deviation:
            return ""
        times = above / deviation if deviation else inf
        distance = f"{times:.3g} deviations above {middle:.4g}"
        return f"{name} {value:.4g} is {distance}, the median of {len(column)} steps"


def recorded_spikes(state: Mapping[str, Any]) -> list[Spike]:
    """Return the spikes that the state of a checkpoint contains, the oldest first."""
    stored = state.get("spikes")
    rows = stored.get("found") if isinstance(stored, dict) else None
    return [spike for row in rows or () if (spike := Spike.of(row)) is not None]
