"""What the layers of a stage do in an action, found once and done again as often as the schedule asks.

Layers call their groups, ask for gathered parameters and add to gradients: that is all by which others meet
them, and in every micro-batch they do it alike. It is noted of the run's own layers, on memory that is not
there; what stands in for them does it again, while buckets, their sums and their gathering are the run's own
in every action.
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
from hpctrain.plan.rehearse.programme import RehearsedCall
from hpctrain.plan.rehearse.record import Recorder
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.gather import Gatherer

Started = list["TransportWork | None"]
Touch = Callable[[Started], None]
"""One thing that layers do; given what they have started in the action so far."""

Kind = tuple[str, int]  # of an action: F, B, I or W, and the chunk


class Touches:
    """What layers do by kind of action, in a step's first action of the kind and in those that follow."""

    def __init__(self) -> None:
        self._of_kind: dict[Kind, list[list[Touch]]] = defaultdict(list)
        self._done: Counter[Kind] = Counter()

    def add(self, kind: Kind, touches: list[Touch]) -> None:
        """Those of the next action of a kind."""
        self._of_kind[kind].append(touches)

    def forget(self, name: str) -> None:
        """Those of the actions of a name, to be noted once more."""
        for kind in [kind for kind in self._of_kind if kind[0] == name]:
            del self._of_kind[kind]

    def begin(self) -> None:
        """A step begins."""
        self._done.clear()

    def again(self, kind: Kind) -> None:
        """Do again what is done in the next action of a kind in the step."""
        actions = self._of_kind[kind]
        started: Started = []
        for touch in actions[min(self._done[kind], len(actions) - 1)]:
            touch(started)
        self._done[kind] += 1


@dataclass
class TouchNotes:
    """The timeline of a step of a `schedule` of one stage, whose touches it notes."""

    recorder: Recorder
    schedule: Schedule
    touches: Touches = field(default_factory=Touches)
    _actions: int = 0
    _begun: int = 0
    _muted: bool = False
    _now: list[Touch] = field(default_factory=list)

    def record_action(self, *_: object) -> None:
        """See Timeline: an action ends."""
        action = self.schedule.stages[0][self._actions]
        self.touches.add((action.kind, action.chunk), self._now)
        self._actions, self._begun, self._now = self._actions + 1, 0, []

    def record(self, *_: object, **__: object) -> None:
        """Do nothing; spans are not recorded."""

    @contextmanager
    def of(self, stage: TrainedStage) -> Iterator[None]:
        """What layers call and ask of buckets is noted within, not what buckets call for that."""
        every = (parameter for model in stage.models for parameter in parameter_list(model))
        parameters = {parameter: parameter.on_gradient_added for parameter in every}
        # In front of the methods of the class.
        for parameter, on_gradient_added in parameters.items():
            assert on_gradient_added is not None
            vars(parameter)["_buffer"] = partial(self._asked, parameter, parameter._buffer)
            parameter.on_gradient_added = self._noting(on_gradient_added)
        names = ("enter", "leave") if isinstance(stage.residency, Gatherer) else ()
        for name in names:
            vars(stage.residency)[name] = self._noting(getattr(stage.residency, name))
        self.recorder.note, self.recorder.listening = self._called, True
        try:
            yield
        finally:
            self.recorder.note, self.recorder.listening = self.recorder.add, False
            for parameter, on_gradient_added in parameters.items():
                del vars(parameter)["_buffer"]
                parameter.on_gradient_added = on_gradient_added
            for name in names:
                del vars(stage.residency)[name]

    def _asked(self, parameter: Parameter, buffer: Callable[[], Tensor | None]) -> Tensor | None:
        with self._touching(lambda _: _ask(parameter)):
            return buffer()

    def _noting(self, method: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted(of: Parameter | Bucket) -> None:
            with self._touching(lambda _: method(of)):
                method(of)

        return noted

    @contextmanager
    def _touching(self, touch: Touch) -> Iterator[None]:
        outermost, self._muted = not self._muted, True
        if outermost:
            self._now.append(touch)
        yield
        self._muted = not outermost

    def _called(self, event: RehearsedCall) -> TransportWork | None:
        """Note what a layer calls; stages pass their results on by themselves."""
        if self._muted or event.group == "pipeline":
            return None
        self._now.append(partial(_call, self.recorder, event))
        self._begun += 1
        return None if event.blocking else _Noted(self, self._begun - 1)

    def waited(self, number: int) -> None:
        """The wait for what an action started, by its number."""
        self._now.append(partial(_wait, number))


@dataclass(frozen=True)
class _Noted:
    notes: TouchNotes
    number: int

    def wait(self) -> None:
        self.notes.waited(self.number)

    def test(self) -> bool:
        return False


def _ask(parameter: Parameter) -> None:
    assert parameter.gradient is not None


def _call(recorder: Recorder, event: RehearsedCall, started: Started) -> None:
    started.append(recorder.add(event))


def _wait(number: int, started: Started) -> None:
    pending = started[number]
    assert pending is not None
    pending.wait()


@dataclass
class StandIn:
    """In the place of a part, of which it is the `chunk` of a stage: does again what its layers do."""

    part: ModelPart
    chunk: int
    touches: Touches
    queue: WeightGradientQueue
    figures: int

    def __post_init__(self) -> None:
        self.trained = any(parameter.requires_grad for parameter in parameter_list(self.part))
        self._given = torch.zeros((), device=META, requires_grad=True)

    def __call__(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Tensor:
        """See ModelPart; that of the last part is a number."""
        given = hidden if hidden is not None else self._given if self.trained else self._given.detach()
        shape = () if self.part.span.has_head else self.hidden_shape(inputs.rows)
        result: Tensor = _StandInAutograd.apply(given, self, shape)
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
        """Do again what its layers do in backward, the whole or that of its inputs."""
        if self.queue.deferring:
            self.touches.again(("I", self.chunk))
            self.queue.submit(partial(self.touches.again, ("W", self.chunk)))
        else:
            self.touches.again(("B", self.chunk))


class _StandInAutograd(torch.autograd.Function):
    """What a part makes, without memory."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, part: StandIn, shape: Sequence[int]) -> Tensor:
        ctx.part, ctx.shape = part, given.shape
        part.touches.again(("F", part.chunk))
        return torch.empty(shape, dtype=part.dtype, device=META)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        ctx.part.backward()
        return torch.empty(ctx.shape, dtype=ctx.part.dtype, device=META), None, None
