"""Copies of the counters of a run, by which a counter that changes in memory is found and restored."""

from __future__ import annotations

from dataclasses import asdict

from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.engine.built_engine import Engine
from hpctrain.train.step import TrainState


class Counters:
    """Counters of the run's state, of the optimizer's updates and of the loss scale, on this rank."""

    def __init__(self, engine: Engine, state: TrainState) -> None:
        self._engine, self._state = engine, state
        self._copy: dict[str, float] = {}

    @property
    def step(self) -> int:
        """Number of the next step; 0 if there is no copy."""
        return int(self._copy["step"]) + 1 if self._copy else 0

    def discard(self) -> None:
        """Discard the copy, because something other than a step changes the counters."""
        self._copy = {}

    def record(self) -> list[DetectedFault]:
        """Copy the counters after a step. Return a fault if the number of steps was wrong, and correct it."""
        following, wrong = self.step or self._state.step, []
        if self._state.step != following:
            self._state.step, wrong = following, [self._fault("step")]
        self._copy = self._current()
        return wrong

    def restore_changed(self) -> list[DetectedFault]:
        """Restore counters that have changed since `record`. Return a fault for each of them."""
        if not self._copy:
            return []
        now = self._current()
        changed = [name for name, value in self._copy.items() if now[name] != value]
        if changed:
            self._restore()
        return [self._fault(name) for name in changed]

    def _current(self) -> dict[str, float]:
        scale = self._engine.control.loss_scale
        of_engine = {
            "updates": self._engine.stage.optimizer.updates,
            "loss_scale": scale.value,
            "good_steps": scale.good_steps,
        }
        return asdict(self._state) | of_engine

    def _restore(self) -> None:
        for name in asdict(self._state):
            setattr(self._state, name, self._copy[name])
        self._engine.stage.optimizer.updates = int(self._copy["updates"])
        scale = self._engine.control.loss_scale
        scale.value, scale.good_steps = self._copy["loss_scale"], int(self._copy["good_steps"])

    def _fault(self, name: str) -> DetectedFault:
        group = self._engine.world.everyone
        return DetectedFault(
            "memory", name, "other", (group.ranks[group.rank],), "changed since the step before"
        )
