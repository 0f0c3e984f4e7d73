"""Rollbacks of a run after spikes, derived from the spikes in its checkpoints and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpctrain.fault_checks.spikes import Spike, recorded_spikes


def rollback_steps(spikes: Iterable[Spike]) -> list[int]:
    """Return the steps to which a run returned by rollbacks that later ones did not undo, in ascending order.

    A step drops out if the run later returned to that step or an earlier one.

    Args:
        spikes: All spikes of the run, in their order.
    """
    steps: list[int] = []
    for spike in spikes:
        if spike.back_to is not None:
            steps = [*(step for step in steps if step < spike.back_to), spike.back_to]
    return steps


def find_rollback(state: Mapping[str, Any], known: Iterable[Spike]) -> int | None:
    """Return the earliest step of a rollback that makes a stored state invalid, or None.

    Args:
        state: State of a checkpoint.
        known: All known spikes of the run.

    Returns:
        The step, which is at most the state's; None if the run continued from this state.
    """
    recorded, step = recorded_spikes(state), state.get("step", 0)
    later = [each.back_to for each in known if each.back_to is not None and each not in recorded]
    return min((back for back in later if back <= step), default=None)
