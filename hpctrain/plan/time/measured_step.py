"""Seconds of a step as a rank measured them, by the causes of a plan as far as these can be told apart.

The ledger tells how long each phase was, how much of it this rank spent inside calls of groups, along which
axis, and what it computed again. What is left of forward and backward is computing: products, attention and
what is done by element are one there. Waiting for other stages and for their messages is one, too, unless a
trace tells how much of it came after the other stage was done.
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
"""Causes that are measured as one, by its name."""

_PASSES = frozenset({"forward", "backward"})
_SUMS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_DATA = frozenset({"data", "expert_data", "replicas", "world"})
_EXPERTS = frozenset({"expert", "expert_tensor"})


@dataclass(frozen=True)
class StepRecord:
    """A step of one rank: its seconds, those of its phases, and of each those spent in calls; those spent
    in calls by axis, operation and the phase in which they were started; and of what was computed again.
    """

    step: int
    seconds: float
    phases: Mapping[str, float]
    inside: Mapping[str, float]
    calls: Mapping[tuple[str, str, str], float]
    again: float

    def by_cause(self, stages: int, zero: int) -> dict[str, float]:
        """Its seconds by cause, on a pipeline of so many stages, by that stage of ZeRO. They add up to it."""
        joined = {cause for causes in TOGETHER.values() for cause in causes}
        causes = {cause: 0.0 for cause in (*TOGETHER, *CAUSES) if cause not in joined}
        for (axis, operation, phase), seconds in self.calls.items():
            causes[_cause(frozenset(axis.split(" x ")), operation, phase, stages, zero)] += seconds
        causes["recompute"] = self.again
        causes["computing"] = self._outside("forward") + self._outside("backward") - self.again
        causes["update"] += self._outside("synchronize") + self._outside("step")
        causes["fixed"] += self.seconds - fsum(causes.values())
        return causes

    def _outside(self, phase: str) -> float:
        """What a phase took outside of calls."""
        return self.phases.get(phase, 0.0) - self.inside.get(phase, 0.0)


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds of a step, the mean of `steps` steps over the `ranks` of a stage; by cause, where the host's
    clock tells that: not where a GPU computes, whose work was only handed over.
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
    """The steps without the quickest and the slowest quarter: those that nothing disturbed, in any order."""
    ordered, cut = sorted(records, key=lambda each: each.seconds), len(records) // 4
    return ordered[cut : len(ordered) - cut]


def mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """That of each cause."""
    return {cause: fsum(causes[cause] for causes in each) / len(each) for cause in each[0]}


def told_apart(causes: Mapping[str, float], bubble: float, messages: float) -> dict[str, float]:
    """Seconds by cause, those of `stages` shared out as a trace has seconds of `bubble` and `messages`."""
    share = messages / (bubble + messages) if bubble + messages else 0.0
    others = {cause: seconds for cause, seconds in causes.items() if cause != "stages"}
    seconds = causes["stages"]
    return others | {"messages": seconds * share, "bubble": seconds * (1 - share)}


def side_by_side(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> list[tuple[str, float, float]]:
    """Cause, or causes together, with both seconds, in the order of CAUSES.

    Where messages are planned to overlap, the bubble that is planned has in it what stages wait for them.
    """
    joined = {name: name in measured for name in TOGETHER}
    joined["stages"] |= not predicted["messages"]
    pairs: dict[str, tuple[float, float]] = {}
    for cause in CAUSES:
        name = next((name for name, causes in TOGETHER.items() if cause in causes and joined[name]), cause)
        causes = TOGETHER.get(name, (cause,))
        here = measured[name] if name in measured else fsum(measured[each] for each in causes)
        pairs.setdefault(name, (fsum(predicted[each] for each in causes), here))
    return [(name, *both) for name, both in pairs.items()]


def _cause(axes: frozenset[str], operation: str, phase: str, stages: int, zero: int) -> str:
    """What a call is a part of."""
    if "pipeline" in axes and phase != "synchronize":
        return "stages"  # what is received is waited for before the passes, too
    if phase in _PASSES:
        if axes & _DATA:
            return "parameters" if zero == 3 and operation not in _SUMS else "gradients"
        if axes & _EXPERTS:
            return "expert"
        return "context" if axes == {"context"} else "tensor"
    if phase == "synchronize":
        if axes != {"world"}:
            return "gradients"
        # Who has done all its actions waits here for the other stages.
        return "stages" if stages > 1 else "fixed"
    if phase == "step":
        return "parameters" if axes & _DATA and axes != {"world"} else "update"
    return "fixed"
