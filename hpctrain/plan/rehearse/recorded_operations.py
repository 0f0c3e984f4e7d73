"""Operations of the layers of a stage, recorded once per action and replayed as often as a schedule asks.

The calls of a layer, its requests for gathered parameters and its additions to gradients are all that other
ranks and the buckets see of it. Every micro-batch has the same ones. They are recorded while the layers of
the run compute on the meta device. `ReplayedPart` then replays them in place of a model part. Buckets,
gradient reduction and parameter gathering are those of the run in every action.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.planned import META
from hpctrain.comm.transports.transport import TransportWork
from hpctrain.engine.stages.stage import TrainedStage
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.part import ModelPart, parameter_list
from hpctrain.objective.objective import Losses
from hpctrain.parallel.backward.weight_gradients import WeightGradientQueue
from hpctrain.parallel.shards import Parameter
from hpctrain.pipeline.action import Schedule
from hpctrain.plan.rehearse.call_recorder import Recorder
from hpctrain.plan.rehearse.programme import RehearsedCall
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.gather import Gatherer

Started = list["TransportWork | None"]
Operation = Callable[[Started], None]
"""Replays one operation. The argument is the list of calls that the action has started so far."""

ActionKind = tuple[str, int]
"""Kind of an action ("F", "B", "I" or "W") and its chunk."""


class RecordedOperations:
    """Operations of layers by kind of action, for the first action of a kind in a step and for later ones."""

    def __init__(self) -> None:
        self._of_kind: dict[ActionKind, list[list[Operation]]] = defaultdict(list)
        self._done: Counter[ActionKind] = Counter()

    def add(self, kind: ActionKind, operations: list[Operation]) -> None:
        """Add the operations of the next action of a kind."""
        self._of_kind[kind].append(operations)

    def forget(self, name: str) -> None:
        """Remove the operations of all actions of a kind, such as "F", so that they are recorded again."""
        for kind in [kind for kind in self._of_kind if kind[0] == name]:
            del self._of_kind[kind]

    def begin(self) -> None:
        """Begin a step."""
        self._done.clear()

    def replay(self, kind: ActionKind) -> None:
        """Replay the next action of a kind in the step. After the last recorded one, that one is repeated."""
        actions = self._of_kind[kind]
        started: Started = []
        for operation in actions[min(self._done[kind], len(actions) - 1)]:
            operation(started)
        self._done[kind] += 1


@dataclass
class OperationRecorder:
    """Timeline that records the operations of the layers of one stage, action by action.

    Attributes:
        recorder: Recorder of the rank's calls.
        schedule: Schedule of the recorded step.
        operations: Result.
    """

    recorder: Recorder
    schedule: Schedule
    operations: RecordedOperations = field(default_factory=RecordedOperations)
    _actions: int = 0
    _started_calls: int = 0
    _is_nested: bool = False
    _current: list[Operation] = field(default_factory=list)

    def record_action(self, *_: object) -> None:
        """End an action, as a `Timeline`."""
        action = self.schedule.stages[0][self._actions]
        self.operations.add((action.kind, action.chunk), self._current)
        self._actions, self._started_calls, self._current = self._actions + 1, 0, []

    def record(self, *_: object, **__: object) -> None:
        """Do nothing; spans are not recorded."""

    @contextmanager
    def of(self, stage: TrainedStage) -> Iterator[None]:
        """Record, inside the context, what the layers of a stage call and request from buckets.

        Calls that buckets make because of this are not recorded.
        """
        every = (parameter for model in stage.models for parameter in parameter_list(model))
        parameters = {parameter: parameter.on_gradient_added for parameter in every}
        # Attributes of an instance are found before the methods of its class.
        for parameter, on_gradient_added in parameters.items():
            assert on_gradient_added is not None
            vars(parameter)["_buffer"] = partial(self._buffer_of, parameter, parameter._buffer)
            parameter.on_gradient_added = self._recording_calls(on_gradient_added)
        names = ("enter", "leave") if isinstance(stage.residency, Gatherer) else ()
        for name in names:
            vars(stage.residency)[name] = self._recording_calls(getattr(stage.residency, name))
        self.recorder.note, self.recorder.listening = self._record_call, True
        try:
            yield
        finally:
            self.recorder.note, self.recorder.listening = self.recorder.add, False
            for parameter, on_gradient_added in parameters.items():
                del vars(parameter)["_buffer"]
                parameter.on_gradient_added = on_gradient_added
            for name in names:
                del vars(stage.residency)[name]

    def _buffer_of(self, parameter: Parameter, buffer: Callable[[], Tensor | None]) -> Tensor | None:
        with self._recording(lambda _: _request(parameter)):
            return buffer()

    def _recording_calls(self, method: Callable[[Any], None]) -> Callable[[Any], None]:
        def recorded(of: Parameter | Bucket) -> None:
            with self._recording(lambda _: method(of)):
                method(of)

        return recorded

    @contextmanager
    def _recording(self, operation: Operation) -> Iterator[None]:
        outermost, self._is_nested = not self._is_nested, True
        if outermost:
            self._current.append(operation)
        yield
        self._is_nested = not outermost

    def _record_call(self, event: RehearsedCall) -> TransportWork | None:
        """Record a call of a layer. Messages between stages are left out, since the executor sends them."""
        if self._is_nested or event.group == "pipeline":
            return None
        self._current.append(partial(_call, self.recorder, event))
        self._started_calls += 1
        return None if event.blocking else _PendingOperation(self, self._started_calls - 1)

    def record_wait(self, number: int) -> None:
        """Record the wait for a call, given its number among the started calls of the action."""
        self._current.append(partial(_wait, number))


@dataclass(frozen=True)
class _PendingOperation:
    operations: OperationRecorder
    number: int

    def wait(self) -> None:
        self.operations.record_wait(self.number)

    def test(self) -> bool:
        return False


def _request(parameter: Parameter) -> None:
    assert parameter.gradient is not None


def _call(recorder: Recorder, event: RehearsedCall, started: Started) -> None:
    started.append(recorder.add(event))


def _wait(number: int, started: Started) -> None:
    pending = started[number]
    assert pending is not None
    pending.wait()


@dataclass
class ReplayedPart:
    """Replacement of a model part that replays the recorded operations of its layers.

    Attributes:
        part: Part that is replaced.
        chunk: Number of the part in its stage.
        operations: Recorded operations of the stage.
        queue: Queue of deferred weight gradients.
        figures: Number of metrics of the objective.
    """

    part: ModelPart
    chunk: int
    operations: RecordedOperations
    queue: WeightGradientQueue
    figures: int

    def __post_init__(self) -> None:
        self.trained = any(parameter.requires_grad for parameter in parameter_list(self.part))
        self._input = torch.zeros((), device=META, requires_grad=True)

    def __call__(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Tensor:
        """Replay the forward pass, as `ModelPart` computes it. The result of the last part is a scalar."""
        if hidden is None:
            hidden = self._input if self.trained else self._input.detach()
        shape = () if self.part.span.has_head else self.hidden_shape(inputs.rows)
        result: Tensor = _ReplayedPartFunction.apply(hidden, self, shape)
        return result

    def predict(self, hidden: Tensor, compute: object) -> Losses:  # noqa: ARG002
        """Return the result of `compute` for the output of the last part, with its parameters gathered."""
        return Losses(hidden, (hidden.detach(),) * self.figures)

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """Return the shape of the tensors that are sent between parts."""
        return self.part.hidden_shape(micro_size)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors that are sent between parts."""
        return self.part.dtype

    def backward(self) -> None:
        """Replay the backward pass: all of it, or that of inputs now and that of weights from the queue."""
        if self.queue.deferring:
            self.operations.replay(("I", self.chunk))
            self.queue.submit(partial(self.operations.replay, ("W", self.chunk)))
        else:
            self.operations.replay(("B", self.chunk))


class _ReplayedPartFunction(torch.autograd.Function):
    """Autograd function of a replayed part, whose results have no memory."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, part: ReplayedPart, shape: Sequence[int]) -> Tensor:
        ctx.part, ctx.shape = part, hidden.shape
        part.operations.replay(("F", part.chunk))
        return torch.empty(shape, dtype=part.dtype, device=META)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        ctx.part.backward()
        return torch.empty(ctx.shape, dtype=ctx.part.dtype, device=META), None, None
