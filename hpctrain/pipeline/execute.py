"""The executor: does one stage's actions of a schedule over the stage's parts of the model.

Hidden states go forward and their gradients backward over the pipeline axis. Who sends what to whom, and
in which order, follows from the schedule, which every rank knows whole: between two stages messages are
received in the order in which the other one sends them, with receives posted ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.work import Work
from hpctrain.data.batches import MicroBatch
from hpctrain.host.device import on_host, start_copy
from hpctrain.model.inputs import AuxiliaryLosses, ModelInputs
from hpctrain.model.part import ModelPart
from hpctrain.model.routing_choices import RoutingChoices
from hpctrain.objective.objective import LossOf, Objective
from hpctrain.parallel.backward import BackwardStart
from hpctrain.parallel.context import context_piece
from hpctrain.parallel.random import DropoutSource
from hpctrain.parallel.step_statistics import StepStatistics
from hpctrain.parallel.weight_grad import DeferredGradient, WeightGradientQueue, compute_all
from hpctrain.pipeline.action import Action, Schedule

AHEAD = 2  # receives posted ahead, for each stage that sends to this one, where they take no part of a GPU

Key = tuple[int, int]  # chunk and micro-batch


@dataclass(frozen=True)
class PreparedBatch:
    """One micro-batch: what goes in, and how its losses are computed of what comes out."""

    inputs: ModelInputs
    losses: LossOf

    @staticmethod
    def of(
        micro: MicroBatch,
        objective: Objective,
        scale: Tensor,
        positions: Tensor,
        dropout: DropoutSource | None,
        terms_scale: Tensor | None = None,
        choices: RoutingChoices | None = None,
    ) -> PreparedBatch:
        """That of this rank, which holds `positions` [s/c] of sequences, on their device.

        `scale` is the factor of the objective's losses in the gradient, `terms_scale` that of layers' terms;
        `choices` go to the routers.
        """
        device = positions.device
        fields = dict(micro.fields)
        if not on_host(device):
            fields = {name: start_copy(field, device) for name, field in fields.items()}
        if micro.sequences:
            fields = {name: context_piece(field, positions).t() for name, field in fields.items()}
        inputs = ModelInputs(
            fields,
            positions,
            dropout,
            AuxiliaryLosses(terms_scale),
            micro.samples,
            choices,
            micro.documents,
            lengths=micro.row_lengths,
        )
        return PreparedBatch(inputs, objective.losses(inputs, scale))


@dataclass(frozen=True)
class BoundaryMessage:
    """Hidden states (F) or their gradient (B) of a micro-batch, for a chunk of the stage that receives."""

    kind: str
    micro_batch: int
    chunk: int


class Executor:
    """Runs schedules on this rank's stage; `ledger.phase` says which phase communication belongs to.

    `models` are the stage's parts, by chunk; `figures` and `terms` name what objective and layers sum up,
    `noted` takes what layers note. A schedule of one stage needs no messages.
    """

    def __init__(
        self,
        models: Sequence[ModelPart],
        group: Group,
        queue: WeightGradientQueue,
        ledger: Ledger,
        figures: Sequence[str] = ("loss",),
        terms: Sequence[str] = (),
        noted: StepStatistics | None = None,
    ) -> None:
        self.models, self.group, self.queue, self.ledger = models, group, queue, ledger
        self.figures, self.terms, self.noted = figures, terms, noted or StepStatistics()

    def run(
        self, schedule: Schedule, micro_batches: Sequence[PreparedBatch], training: bool = True
    ) -> Tensor:
        """Forward and backward of all micro-batches, or by a schedule of forwards alone, not `training`.

        This rank's sums of the objective's figures, zero but on the stage that predicts, and of the terms of
        its layers: fp64 [figures + terms]. Gradients are added to the parameters' buffers. Nothing waits for
        the device.
        """
        with torch.set_grad_enabled(training):
            return _Pass(self, schedule, micro_batches).run()


class _Pass:
    def __init__(
        self, executor: Executor, schedule: Schedule, micro_batches: Sequence[PreparedBatch]
    ) -> None:
        self.executor, self.schedule, self.micro_batches = executor, schedule, micro_batches
        self.stage = executor.group.rank
        self.last = schedule.parts - 1
        self.ends: dict[Key, tuple[Tensor | None, BackwardStart]] = {}
        self.held: dict[Key, list[DeferredGradient]] = {}
        self.local: dict[BoundaryMessage, Tensor] = {}
        self.sends: list[tuple[Work[None], Tensor]] = []
        self.mailbox = _Mailbox(executor.group, schedule, self._shape_of)
        device = micro_batches[0].inputs.positions.device
        self.figures = torch.zeros(len(executor.figures), dtype=torch.float64, device=device)

    def run(self) -> Tensor:
        ledger, noted, training = self.executor.ledger, self.executor.noted, torch.is_grad_enabled()
        for action in self.schedule.stages[self.stage]:
            ledger.phase = "evaluation" if not training else "forward" if action.kind == "F" else "backward"
            received = self._receive(action)
            padding = self.micro_batches[action.micro_batch].inputs.padding
            noted.begin(action.micro_batch if training else None, padding)
            began = perf_counter()
            passed_on = self._compute(action, received)
            # Before its sending, so that it is over where its message arrives.
            if ledger.timeline is not None:
                ledger.timeline.record_action(str(action), began, training)
            if passed_on is not None:
                self._send(action, passed_on)
            self.sends = [send for send in self.sends if not send[0].test()]
        noted.begin(None)
        for work, _ in self.sends:
            work.wait()
        ledger.phase = "synchronize" if training else "evaluation"
        terms = self.figures.new_zeros(len(self.executor.terms))
        for batch in self.micro_batches:
            batch.inputs.terms.add_to(terms, self.executor.terms)
        return torch.cat((self.figures, terms))

    def _compute(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Do an action on what it needs from another part; what the next part needs of it."""
        if action.kind == "F":
            return self._forward(action, received)
        if action.kind == "W":
            compute_all(self.held.pop((action.chunk, action.micro_batch)))
            return None
        return self._backward(action, received)

    def _forward(self, action: Action, hidden: Tensor | None) -> Tensor | None:
        model, batch = self.executor.models[action.chunk], self.micro_batches[action.micro_batch]
        if hidden is not None:
            hidden.requires_grad_(torch.is_grad_enabled())
        key = (action.chunk, action.micro_batch)
        if self.schedule.part(self.stage, action.chunk) == self.last:
            losses = model.predict(model(batch.inputs, hidden), batch.losses)
            self.figures += torch.stack([figure.double() for figure in losses.figures])
            if losses.total.requires_grad:
                self.ends[key] = (hidden, BackwardStart(losses.total))
            return None
        output = model(batch.inputs, hidden)
        if output.requires_grad:
            # The graph is kept by its end alone, so that the output's memory goes with its sending.
            self.ends[key] = (hidden, BackwardStart(output))
        passed_on: Tensor = output.detach()
        return passed_on

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        key = (action.chunk, action.micro_batch)
        if key not in self.ends:  # the first part, where nothing of it is trained
            self.held[key] = []
            return None
        hidden, end = self.ends.pop(key)
        queue = self.executor.queue
        with queue.backward(deferring=action.kind == "I"):
            end.backward(gradient)
        if action.kind == "I":
            self.held[key] = queue.take()
        if hidden is None:
            return None
        assert hidden.grad is not None
        return hidden.grad

    def _send(self, action: Action, tensor: Tensor) -> None:
        """Hand the result of an action to the part that needs it, on this stage or another."""
        target = _target(self.schedule, self.stage, action)
        assert target is not None
        stage, message = target
        if stage == self.stage:
            self.local[message] = tensor
        else:
            tensor = tensor.contiguous()
            self.sends.append((self.executor.group.start_send(tensor, stage), tensor))

    def _receive(self, action: Action) -> Tensor | None:
        """Wait for what an action needs from another part: nothing at the model's ends, and for W."""
        first = 0 if action.kind == "F" else self.last
        if action.kind == "W" or self.schedule.part(self.stage, action.chunk) == first:
            return None
        message = BoundaryMessage("F" if action.kind == "F" else "B", action.micro_batch, action.chunk)
        here = self.local.pop(message, None)
        return here if here is not None else self.mailbox.take(message)

    def _shape_of(self) -> Tensor:
        """Fresh memory for hidden states or their gradient; all parts pass the same shape on."""
        model, inputs = self.executor.models[0], self.micro_batches[0].inputs
        return self.executor.group.empty(model.hidden_shape(inputs.rows), model.dtype)


class _Mailbox:
    """Receives this stage's messages, from each other stage in the order in which that one sends them."""

    def __init__(self, group: Group, schedule: Schedule, memory: Any) -> None:
        self.group, self.memory = group, memory
        self.coming: dict[int, deque[BoundaryMessage]] = {}
        self.posted: dict[int, deque[tuple[BoundaryMessage, Work[Tensor]]]] = {}
        self.arrived: dict[BoundaryMessage, Tensor] = {}
        self.sender: dict[BoundaryMessage, int] = {}
        self.ahead = receives_ahead(group.computes_on)
        for stage in range(schedule.stage_count):
            if stage != group.rank and (order := deque(messages(schedule, stage, group.rank))):
                self.sender |= dict.fromkeys(order, stage)
                self.coming[stage], self.posted[stage] = order, deque()
                self._post(stage, self.ahead)

    def _post(self, stage: int, count: int) -> None:
        while self.coming[stage] and len(self.posted[stage]) < count:
            work = self.group.start_recv(self.memory(), stage)
            self.posted[stage].append((self.coming[stage].popleft(), work))

    def take(self, message: BoundaryMessage) -> Tensor:
        """Wait for one message; those that its sender sends before it stay."""
        while message not in self.arrived:
            stage = self.sender[message]
            self._post(stage, self.ahead + 1)
            first, work = self.posted[stage].popleft()
            self.arrived[first] = work.wait()
        return self.arrived.pop(message)


def receives_ahead(device: torch.device) -> int:
    """Receives that are posted before they are waited for, for each stage that sends to this one."""
    return AHEAD if on_host(device) else 0


def messages(schedule: Schedule, sender: int, receiver: int) -> Iterator[BoundaryMessage]:
    """What one stage sends to another, in its order."""
    for action in schedule.stages[sender]:
        target = _target(schedule, sender, action)
        if target is not None and target[0] == receiver:
            yield target[1]


def _target(schedule: Schedule, stage: int, action: Action) -> tuple[int, BoundaryMessage] | None:
    """The stage that needs the result of an action, and as what; None for W and at the model's ends."""
    step = 1 if action.kind == "F" else -1
    part = schedule.part(stage, action.chunk) + step
    if action.kind == "W" or not 0 <= part < schedule.parts:
        return None
    receiver, chunk = schedule.home(part)
    return receiver, BoundaryMessage("F" if step > 0 else "B", action.micro_batch, chunk)


def forward_only(schedule: Schedule, micro_batches: int) -> Schedule:
    """A schedule of forward actions over the same placement of parts, for evaluation."""
    stages = schedule.stage_count
    order = [
        Action("F", micro_batch, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(schedule.chunks)
        for micro_batch in range(first, min(first + stages, micro_batches))
    ]
    return Schedule((tuple(order),) * stages, "evaluation", schedule.placement)
