"""The scene in which a fault acts: the step, micro-batch and rank that compute, and how to change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.pipeline.action import Action
from hpctrain.pipeline.execute import _ScheduleExecution
from hpctrain.train.step import Step

Change = Callable[[Tensor], object]
"""Changes a tensor in place."""


class Scene:
    """The step and micro-batch that a rank of the layout computes, and the means to change what it computes.

    Attributes:
        patch: Undoes the changes at the end of the test.
        in_layout: True in the steps of the layout, False in those of the one rank that it is compared with.
        step: Number of the step, from 0.
        micro_batch: Number of the micro-batch, from 0; -1 outside of micro-batches.
        rank: Rank of this process.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.in_layout, self.step, self.micro_batch, self.rank = False, 0, -1, 0
        make_step = Step.__call__
        compute, run = _ScheduleExecution._compute, _ScheduleExecution.run

        def follow_step(step: Step, state: Any, *arguments: Any) -> Any:
            world = step.engine.world
            self.in_layout, self.step, self.rank = world.size > 1, state.step, world.rank
            try:
                return make_step(step, state, *arguments)
            finally:
                self.in_layout = False

        def follow_action(execution: _ScheduleExecution, action: Action, received: Any) -> Any:
            self.micro_batch = action.micro_batch if torch.is_grad_enabled() else -1
            return compute(execution, action, received)

        def follow_schedule(execution: _ScheduleExecution) -> Tensor:
            try:
                return run(execution)
            finally:
                self.micro_batch = -1

        patch.setattr(Step, "__call__", follow_step)
        patch.setattr(_ScheduleExecution, "_compute", follow_action)
        patch.setattr(_ScheduleExecution, "run", follow_schedule)

    def around(self, owner: Any, name: str, change: Callable[..., Any], when: When | None = None) -> None:
        """Call `change(original, *arguments)` instead of `original(*arguments)` in steps of the layout."""
        is_static = isinstance(vars(owner).get(name), staticmethod)
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if not self.in_layout or (when is not None and not when(self)):
                return original(*arguments, **options)
            return change(original, *arguments, **options)

        self.patch.setattr(owner, name, staticmethod(call) if is_static else call)

    def communicated(self, axis: str, operation: str, change: Change, when: When | None = None) -> None:
        """Change the results of an operation over groups of an axis, in steps of the layout."""
        run = Group._run

        def run_and_change(group: Group, call: Any, result: Any) -> Any:
            work = run(group, call, result)
            applies = axis in group.axes and call.operation == operation and isinstance(result, Tensor)
            if not (self.in_layout and applies and result.is_floating_point()):
                return work
            return ChangedWork(work, change) if when is None or when(self) else work

        self.patch.setattr(Group, "_run", run_and_change)


class ChangedWork(Work[Any]):
    """An operation whose result is changed when it is waited for."""

    def __init__(self, work: Work[Any], change: Change) -> None:
        self.work, self.change, self.changed = work, change, False

    def wait(self) -> Any:
        """Complete the operation and change its result, once."""
        value = self.work.wait()
        if not self.changed:
            self.changed = True
            with torch.no_grad():
                self.change(value)
        return value

    def test(self) -> bool:
        """Return True if the operation is complete."""
        return self.work.test()

    def proceed(self) -> None:
        """Go on to the next operation."""
        self.work.proceed()


When = Callable[[Scene], bool]
"""Tells whether a fault acts now."""


def in_third_micro_batch(scene: Scene) -> bool:
    """Return True in the third micro-batch."""
    return scene.micro_batch == 2


def in_second_step(scene: Scene) -> bool:
    """Return True in the second step."""
    return scene.step == 1


def on_rank_1(scene: Scene) -> bool:
    """Return True on rank 1."""
    return scene.rank == 1


def in_last_update(scene: Scene) -> bool:
    """Return True in the update of the second step on rank 1."""
    return scene.step == 1 and scene.rank == 1
