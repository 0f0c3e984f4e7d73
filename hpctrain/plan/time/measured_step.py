"""Measured seconds of a step of a rank, by the causes of a plan as far as they can be separated.

The ledger has the seconds of each phase, of calls of groups by axis, and of recomputation. The rest of the
forward and backward passes is computation: products, attention and elementwise operations are not separated.
Neither are the waiting for other stages and for their messages, unless the run has a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from hpctrain.plan.time.step_plan import CAUSES

TOGETHER: Mapping[str, tuple[str, ...]] = {
    "computing": ("products", "attention", "elementwise"),
    "stages": ("messages", "bubble"),
    "update": ("optimizer", "offload"),
}
"""Causes that are measured together, by the name of their sum."""

_PASSES = frozenset({"forward", "backward"})
_SUMS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_DATA = frozenset({"data", "expert_data", "replicas", "world"})
_EXPERTS = frozenset({"expert", "expert_tensor"})


@dataclass(frozen=True)
class StepRecord:
    """Measured times of a step of one rank.

    Attributes:
        step: Number of the step.
        seconds: Seconds of the step.
        phases: Seconds of each phase.
        inside: Seconds of each phase that were spent in calls of groups.
        calls: Seconds of calls by axis, operation, and phase in which they were started.
        recompute: Seconds of recomputation.
    """

    step: int
    seconds: float
    phases: Mapping[str, float]
    inside: Mapping[str, float]
    calls: Mapping[tuple[str, str, str], float]
    recompute: float

    def by_cause(self, stages: int, zero: int) -> dict[str, float]:
        """Return the seconds by cause, whose sum is `seconds`.

        Args:
            stages: Number of pipeline stages.
            zero: Stage of ZeRO.
        """
        joined_causes = {cause for causes in TOGETHER.values() for cause in causes}
        causes = {cause: 0.0 for cause in (*TOGETHER, *CAUSES) if cause not in joined_causes}
        for (axis, operation, phase), seconds in self.calls.items():
            causes[_cause(frozenset(axis.split(" x ")), operation, phase, stages, zero)] += seconds
        causes["recompute"] = self.recompute
        causes["computing"] = self._outside("forward") + self._outside("backward") - self.recompute
        causes["update"] += self._outside("synchronize") + self._outside("step")
        causes["fixed"] += self.seconds - fsum(causes.values())
        return causes

    def _outside(self, phase: str) -> float:
        """Return the seconds of a phase outside of calls."""
        return self.phases.get(phase, 0.0) - self.inside.get(phase, 0.0)


@dataclass(frozen=True)
class MeasuredStep:
    """Measured time of a step, as a mean.

    Attributes:
        seconds: Seconds of a step.
        seconds_by_cause: Seconds by cause; None on GPUs, where the host only starts the work.
        steps: Number of steps.
        ranks: Number of ranks, those of one stage.
    """

    seconds: float
    seconds_by_cause: Mapping[str, float] | None
    steps: int
    ranks: int

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        by_cause = {} if self.seconds_by_cause is None else {"seconds_by_cause": dict(self.seconds_by_cause)}
        return {"seconds": self.seconds, **by_cause, "steps": self.steps, "ranks": self.ranks}


def middle(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steps without the fastest and the slowest quarter, in any order."""
    ordered, cut = sorted(records, key=lambda each: each.seconds), len(records) // 4
    return ordered[cut : len(ordered) - cut]


def mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each cause."""
    return {cause: fsum(causes[cause] for causes in each) / len(each) for cause in each[0]}


def separate_stage_waits(causes: Mapping[str, float], bubble: float, messages: float) -> dict[str, float]:
    """Return seconds by cause, with `stages` divided into bubble and messages as in a trace."""
    share = messages / (bubble + messages) if bubble + messages else 0.0
    other_causes = {cause: seconds for cause, seconds in causes.items() if cause != "stages"}
    seconds = causes["stages"]
    return other_causes | {"messages": seconds * share, "bubble": seconds * (1 - share)}


def side_by_side(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> list[tuple[str, float, float]]:
    """Return causes with their predicted and measured seconds, in the order of CAUSES.

    If messages overlap in the plan, the predicted bubble includes the waiting for them.
    """
    joined_names = {name for name in TOGETHER if name in measured}
    if not predicted["messages"]:
        joined_names.add("stages")
    pairs: dict[str, tuple[float, float]] = {}
    for cause in CAUSES:
        name = next((name for name in TOGETHER if cause in TOGETHER[name] and name in joined_names), cause)
        causes = TOGETHER.get(name, (cause,))
        measured_seconds = measured[name] if name in measured else fsum(measured[each] for each in causes)
        pairs.setdefault(name, (fsum(predicted[each] for each in causes), measured_seconds))
    return [(name, *both) for name, both in pairs.items()]


def _cause(axes: frozenset[str], operation: str, phase: str, stages: int, zero: int) -> str:
    """Return the cause to which a call belongs."""
    if "pipeline" in axes and phase != "synchronize":
        return "stages"  # ranks also wait for messages before a pass begins
    if phase in _PASSES:
        if axes & _DATA:
            return "parameters" if zero == 3 and operation not in _SUMS else "gradients"
        if axes & _EXPERTS:
            return "expert"
        return "context" if axes == {"context"} else "tensor"
    if phase == "synchronize":
        if axes != {"world"}:
            return "gradients"
        # A rank that has completed all its actions waits here for other stages.
        return "stages" if stages > 1 else "fixed"
    if phase == "step":
        return "parameters" if axes & _DATA and axes != {"world"} else "update"
    return "fixed"
