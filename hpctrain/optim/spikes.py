"""Spikes: steps whose loss or gradient norm is far above what the steps before had.

Far is told by a median and a deviation that single outliers do not move: 1.4826 times the median absolute
deviation, which of normal values is the standard deviation (Rousseeuw and Croux, JASA 1993). What is done
about spikes, PaLM did by hand (arXiv 2204.02311, section 5.1): go back and leave out the batches between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf, isfinite
from statistics import median
from typing import Any, Literal

from hpctrain.files import finite

Treatment = Literal["off", "skip", "rollback"]

LEAST_DEVIATION = 0.01
"""Of the median: below it a deviation is that of a run which hardly moves."""

RECORDED = 1000
"""Spikes of which a run keeps a record, at most: the newest."""

_NORMAL = 1.4826


@dataclass(frozen=True)
class Spike:
    """A step whose update was left out: the number it had, loss and norm (None where not finite), and `why`.

    The `samples` behind `first_sample` are left out of the training; where the run went `back_to` the state
    after an earlier step, those of all steps since.
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
        """The spike of a stored object; None where it is none."""
        if not isinstance(row, dict) or {field.name for field in fields(Spike)} - set(row):
            return None
        return Spike(**{field.name: row[field.name] for field in fields(Spike)})


class SpikeDetector:
    """What tells spikes, and remembers them. All ranks have the same, as they learn the same figures.

    A step is judged after `warmup` steps, by the last `window` steps that made an update. With `most` spikes
    found, a run is to stop at the next one. Where the loss `scales`, a norm that is not finite is its matter.
    """

    def __init__(
        self, treatment: Treatment, window: int, factor: float, most: int, warmup: int, scales: bool = False
    ) -> None:
        self.treatment, self.factor, self.most, self.warmup = treatment, factor, most, warmup
        self.enabled = treatment != "off"
        self.window, self.scales = window, scales
        self.count = 0
        self.found: deque[Spike] = deque(maxlen=RECORDED)
        self._last: deque[tuple[float, float]] = deque(maxlen=window)

    def judge(self, step: int, loss: float, norm: float, first_sample: int, samples: int) -> Spike | None:
        """Return the spike that a step is, or None if the step may make its update.

        It is called only if `enabled`.

        Args:
            step: Number of the step, from 1.
            loss: Its loss.
            norm: Its gradient norm before clipping.
            first_sample: Number of samples of the run before this step.
            samples: Number of samples of this step.
        """
        why = self._why(step, loss, norm)
        if not why:
            return None
        return Spike(step, finite(loss), finite(norm), why, first_sample, samples)

    def learn(self, loss: float, norm: float) -> None:
        """Add a step that made its update to the window. It is called only if `enabled`."""
        self._last.append((loss, norm))

    def remember(self, spike: Spike) -> None:
        """One was found."""
        self.count += 1
        self.found.append(spike)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores, as JSON; nothing where nothing is known."""
        if not self.enabled and not self.count:
            return {}
        found = [asdict(spike) for spike in self.found]
        return {"spikes": {"count": self.count, "window": list(map(list, self._last)), "found": found}}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from what the state of a checkpoint tells, or begin where it tells nothing."""
        kept = state.get("spikes") or {}
        self.count = int(kept.get("count", 0))
        self._last = deque(((float(a), float(b)) for a, b in kept.get("window", ())), maxlen=self.window)
        self.found = deque(recorded_spikes(state), maxlen=RECORDED)

    @property
    def record(self) -> tuple[int, tuple[Spike, ...]]:
        """How many there were, and the newest of them."""
        return self.count, tuple(self.found)

    def went_back(self, record: tuple[int, tuple[Spike, ...]], spike: Spike) -> None:
        """The state is again an earlier one: the record is what it was before that, and this spike."""
        self.count, self.found = record[0], deque(record[1], maxlen=RECORDED)
        self.remember(spike)

    def _why(self, step: int, loss: float, norm: float) -> str:
        values = {"loss": loss, "gradient norm": norm}
        wrong = [f"{name} {value:g} is not finite" for name, value in values.items() if not isfinite(value)]
        if wrong:
            return "" if self.scales and isfinite(loss) else " and ".join(wrong)
        if step <= self.warmup or len(self._last) < self.window:
            return ""
        columns = zip(values.items(), zip(*self._last, strict=True), strict=True)
        judged = (self._far(name, value, column) for (name, value), column in columns)
        return " and ".join(filter(None, judged))

    def _far(self, name: str, value: float, column: Sequence[float]) -> str:
        middle = median(column)
        deviation = _NORMAL * median(abs(each - middle) for each in column)
        deviation = max(deviation, LEAST_DEVIATION * abs(middle))
        above = value - middle
        if above <= self.factor * deviation:
            return ""
        times = above / deviation if deviation else inf
        far = f"{times:.3g} deviations above {middle:.4g}"
        return f"{name} {value:.4g} is {far}, the median of {len(column)} steps"


def recorded_spikes(state: Mapping[str, Any]) -> list[Spike]:
    """Those that the state of a checkpoint tells of, the oldest first."""
    kept = state.get("spikes")
    rows = kept.get("found") if isinstance(kept, dict) else None
    return [spike for row in rows or () if (spike := Spike.of(row)) is not None]


def turns(spikes: Iterable[Spike]) -> list[int]:
    """The steps to which a run went back without ever going behind them, of all its spikes in their order."""
    found: list[int] = []
    for spike in spikes:
        if spike.back_to is not None:
            found = [*(step for step in found if step < spike.back_to), spike.back_to]
    return found


def left_behind(state: Mapping[str, Any], known: Iterable[Spike]) -> int | None:
    """The step to which a run went back, behind the `state` that it had stored or to that step, after it had
    done so, by the spikes that are `known` of it; None where the run as it is now went on from there.
    """
    own, step = recorded_spikes(state), state.get("step", 0)
    later = [each.back_to for each in known if each.back_to is not None and each not in own]
    return min((back for back in later if back <= step), default=None)
