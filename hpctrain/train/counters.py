"""What a run counts: kept twice, so that a number which changed in memory is found, and put right."""

from __future__ import annotations

from dataclasses import asdict

from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.engine.built_engine import Engine
from hpctrain.train.step import TrainState


class Counters:
    """Those of the state of a run, of its optimizer's updates, and of its loss scale. Of this rank alone."""

    def __init__(self, engine: Engine, state: TrainState) -> None:
        self._engine, self._state = engine, state
        self._kept: dict[str, float] = {}

    @property
    def step(self) -> int:
        """The number of the step that follows; 0 where nothing is known."""
        return int(self._kept["step"]) + 1 if self._kept else 0

    def forget(self) -> None:
        """Something else than a step has changed them."""
        self._kept = {}

    def take(self) -> list[DetectedFault]:
        """A step was made: from here on nothing is to change. What was wrong with the number of steps."""
        following, wrong = self.step or self._state.step, []
        if self._state.step != following:
            self._state.step, wrong = following, [self._fault("step")]
        self._kept = self._now()
        return wrong

    def put_right(self) -> list[DetectedFault]:
        """What has changed since; it has not any more."""
        if not self._kept:
            return []
        now = self._now()
        changed = [name for name, value in self._kept.items() if now[name] != value]
        if changed:
            self._give_back()
        return [self._fault(name) for name in changed]

    def _now(self) -> dict[str, float]:
        scale = self._engine.control.loss_scale
        of_engine = {
            "updates": self._engine.stage.optimizer.updates,
            "loss_scale": scale.value,
            "good_steps": scale.good_steps,
        }
        return asdict(self._state) | of_engine

    def _give_back(self) -> None:
        for name in asdict(self._state):
            setattr(self._state, name, self._kept[name])
        self._engine.stage.optimizer.updates = int(self._kept["updates"])
        scale = self._engine.control.loss_scale
        scale.value, scale.good_steps = self._kept["loss_scale"], int(self._kept["good_steps"])

    def _fault(self, name: str) -> DetectedFault:
        group = self._engine.world.everyone
        return DetectedFault(
            "memory", name, "other", (group.ranks[group.rank],), "changed since the step before"
        )
