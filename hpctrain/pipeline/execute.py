"""Executor: runs the actions of one stage of a schedule on the stage's parts of the model.

Hidden states go forward and their gradients backward over the pipeline axis. Every rank knows the whole
schedule, so senders, receivers and the order of messages follow from it. Between two stages, messages are
received in the order in which they are sent, and some receives are posted ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.work import Work
from hpctrain.data.batches import MicroBatch
from hpctrain.host.device import on_host
from hpctrain.host.streams import start_copy
from hpctrain.model.inputs import AuxiliaryLosses, ModelInputs, RoutingChoices
from hpctrain.model.part import ModelPart
from hpctrain.objective.objective import LossFunction, Objective
from hpctrain.parallel.backward.autograd import BackwardStart
from hpctrain.parallel.backward.weight_gradients import DeferredGradient, WeightGradientQueue, compute_all
from hpctrain.parallel.random import DropoutSource
from hpctrain.parallel.step_statistics import StepStatistics
from hpctrain.pipeline.action import Action, Schedule

RECEIVES_AHEAD = 2
"""Receives that a stage posts ahead for each sending stage if messages arrive in host memory."""

GPU_RECEIVES_AHEAD = 1
"""Receives that a stage posts ahead for each sending stage on a GPU.

The channel between two stages carries one direction and runs one receive at a time, so more receives ahead
would only take memory. While a stage waits for a message, one further receive is posted.
"""

ChunkMicroBatch = tuple[int, int]  # numbers of a chunk and a micro-batch


@dataclass(frozen=True)
class PreparedBatch:
    """Inputs of one micro-batch, and the function that computes its losses from the model's outputs."""

    inputs: ModelInputs
    losses: LossFunction

    @staticmethod
    def of(
        micro_batch: MicroBatch,
        objective: Objective,
        scale: Tensor,
        positions: Tensor,
        dropout: DropoutSource | None,
        auxiliary_loss_scale: Tensor | None = None,
        choices: RoutingChoices | None = None,
    ) -> PreparedBatch:
        """Return a micro-batch on this rank's device, with this rank's piece of the sequences. Local.

        Sequences are [b, s/c]. Fields that are not sequences stay whole.

        Args:
            micro_batch: The micro-batch, with whole sequences.
            objective: Objective that chooses the fields and computes the losses.
            scale: Factor of the objective's losses in the gradient, 0-dim.
            positions: Positions [s/c] of this rank's piece of the sequences, on its device.
            dropout: Source of dropout masks; None for no dropout.
            auxiliary_loss_scale: Factor of auxiliary losses in the gradient; None without a backward pass.
            choices: Recorded choices of experts for the routers, or None.
        """
        device = positions.device
        fields = dict(objective.fields_of(micro_batch))
        if not on_host(device):
            fields = {name: start_copy(field, device) for name, field in fields.items()}
        if micro_batch.sequences:
            fields = {name: context_piece(field, positions).t() for name, field in fields.items()}
        auxiliary, samples = AuxiliaryLosses(auxiliary_loss_scale), micro_batch.samples
        documents, lengths = micro_batch.documents, micro_batch.row_lengths
        inputs = ModelInputs(
            fields, positions, dropout, auxiliary, samples, choices, documents, lengths=lengths
        )
        return PreparedBatch(inputs, objective.loss_function(inputs, scale))


def context_piece(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the columns at `positions` of tokens [b, s], sequence first: [s/c, b]."""
    if positions.numel() == tokens.shape[1]:
        return tokens.t().contiguous()
    return tokens.t()[positions]


@dataclass(frozen=True)
class BoundaryMessage:
    """Hidden states, or their gradient, of a micro-batch that cross a boundary between parts.

    Attributes:
        kind: "F" for hidden states, "B" for their gradient.
        micro_batch: Number of the micro-batch.
        chunk: Chunk of the receiving stage that needs them.
    """

    kind: str
    micro_batch: int
    chunk: int


class Executor:
    """Runs schedules on this rank's stage. Sets `ledger.phase` to the phase that communication belongs to.

    Args:
        models: Model parts of the stage, by chunk.
        group: Group of the pipeline axis; a schedule with one stage sends no messages.
        queue: Queue of weight gradients, which holds those of W back during I.
        ledger: Ledger of this rank.
        metrics: Names of the objective's metrics.
        auxiliary_loss_names: Names of the layers' auxiliary losses.
        statistics: Collects what layers record of a step; None if they record nothing.
    """

    def __init__(
        self,
        models: Sequence[ModelPart],
        group: Group,
        queue: WeightGradientQueue,
        ledger: Ledger,
        metrics: Sequence[str] = ("loss",),
        auxiliary_loss_names: Sequence[str] = (),
        statistics: StepStatistics | None = None,
    ) -> None:
        self.models, self.group, self.queue, self.ledger = models, group, queue, ledger
        self.metrics, self.auxiliary_loss_names, self.statistics = metrics, auxiliary_loss_names, statistics

    def run(
        self, schedule: Schedule, micro_batches: Sequence[PreparedBatch], training: bool = True
    ) -> Tensor:
        """Run forward and backward of all micro-batches. All ranks of the pipeline axis call it.

        Gradients are added to the parameters' buffers. It never waits for the device.

        Args:
            schedule: The schedule; one with only F if not `training`.
            micro_batches: Micro-batches of the step.
            training: If False, no gradients are computed.

        Returns:
            This rank's sums of the objective's metrics, which are 0 except on the stage with the last part,
            and of its layers' auxiliary losses: fp64 [metrics + auxiliary losses].
        """
        with torch.set_grad_enabled(training):
            return _ScheduleExecution(self, schedule, micro_batches).run()


class _ScheduleExecution:
    """State of one run of a schedule.

    Attributes:
        backward_starts: For each chunk and micro-batch, its input and the output from which its backward pass
            starts.
        deferred: For each chunk and micro-batch, the weight gradients that W will compute.
        local: Hidden states and gradients for another chunk of this stage.
        sends: Sends that may be incomplete, with their tensors.
        metrics: Sums of the objective's metrics, fp64.
    """

    def __init__(
        self, executor: Executor, schedule: Schedule, micro_batches: Sequence[PreparedBatch]
    ) -> None:
        self.executor, self.schedule, self.micro_batches = executor, schedule, micro_batches
        self.stage = executor.group.rank
        self.last = schedule.parts - 1
        self.backward_starts: dict[ChunkMicroBatch, tuple[Tensor | None, BackwardStart]] = {}
        self.deferred: dict[ChunkMicroBatch, list[DeferredGradient]] = {}
        self.local: dict[BoundaryMessage, Tensor] = {}
        self.sends: list[tuple[Work[None], Tensor]] = []
        self.inbox = _BoundaryInbox(executor.group, schedule, self._empty_hidden)
        device = micro_batches[0].inputs.positions.device
        self.metrics = torch.zeros(len(executor.metrics), dtype=torch.float64, device=device)

    def run(self) -> Tensor:
        """Run all actions, wait for the sends, and return the sums of metrics and auxiliary losses."""
        ledger, statistics, training = self.executor.ledger, self.executor.statistics, torch.is_grad_enabled()
        for action in self.schedule.stages[self.stage]:
            ledger.phase = "evaluation" if not training else "forward" if action.kind == "F" else "backward"
            received = self._receive(action)
            if statistics is not None:
                padding = self.micro_batches[action.micro_batch].inputs.padding
                statistics.begin_action(action.micro_batch if training else None, padding)
            start = perf_counter()
            result = self._compute(action, received)
            # Before the send, so that the action ends before its message arrives elsewhere.
            if ledger.timeline is not None:
                ledger.timeline.record_action(str(action), start, training)
            if result is not None:
                self._send(action, result)
            self.sends = [send for send in self.sends if not send[0].test()]
        if statistics is not None:
            statistics.begin_action(None)
        for work, _ in self.sends:
            work.wait()
        ledger.phase = "synchronize" if training else "evaluation"
        losses = self.metrics.new_zeros(len(self.executor.auxiliary_loss_names))
        for batch in self.micro_batches:
            batch.inputs.auxiliary_losses.add_to(losses, self.executor.auxiliary_loss_names)
        return torch.cat((self.metrics, losses))

    def _compute(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Run an action on its input, and return the output for the next part, if any."""
        if action.kind == "F":
            return self._forward(action, received)
        if action.kind == "W":
            compute_all(self.deferred.pop((action.chunk, action.micro_batch)))
            return None
        return self._backward(action, received)

    def _forward(self, action: Action, hidden: Tensor | None) -> Tensor | None:
        model, batch = self.executor.models[action.chunk], self.micro_batches[action.micro_batch]
        if hidden is not None:
            hidden.requires_grad_(torch.is_grad_enabled())
        key = (action.chunk, action.micro_batch)
        if self.schedule.part(self.stage, action.chunk) == self.last:
            losses = model.predict(model(batch.inputs, hidden), batch.losses)
            self.metrics += torch.stack([metric.double() for metric in losses.metrics])
            if losses.total.requires_grad:
                self.backward_starts[key] = (hidden, BackwardStart(losses.total))
            return None
        output = model(batch.inputs, hidden)
        if output.requires_grad:
            # The detached output does not keep the graph alive, so its memory is freed after the send.
            self.backward_starts[key] = (hidden, BackwardStart(output))
        result: Tensor = output.detach()
        return result

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        key = (action.chunk, action.micro_batch)
        if key not in self.backward_starts:  # the first part, if none of its parameters is trained
            self.deferred[key] = []
            return None
        hidden, start = self.backward_starts.pop(key)
        queue = self.executor.queue
        with queue.backward(deferring=action.kind == "I"):
            start.backward(gradient)
        if action.kind == "I":
            self.deferred[key] = queue.take()
        if hidden is None:
            return None
        assert hidden.grad is not None
        return hidden.grad

    def _send(self, action: Action, tensor: Tensor) -> None:
        """Pass the result of an action to the part that needs it, on this stage or another one."""
        target = _destination(self.schedule, self.stage, action)
        assert target is not None
        stage, message = target
        if stage == self.stage:
            self.local[message] = tensor
        else:
            tensor = tensor.contiguous()
            self.sends.append((self.executor.group.start_send(tensor, stage), tensor))

    def _receive(self, action: Action) -> Tensor | None:
        """Wait for the input of an action. None for W and at the ends of the model."""
        first = 0 if action.kind == "F" else self.last
        if action.kind == "W" or self.schedule.part(self.stage, action.chunk) == first:
            return None
        message = BoundaryMessage("F" if action.kind == "F" else "B", action.micro_batch, action.chunk)
        local_result = self.local.pop(message, None)
        return local_result if local_result is not None else self.inbox.take(message)

    def _empty_hidden(self) -> Tensor:
        """Return new memory for hidden states or their gradient, whose shape is the same everywhere."""
        model, inputs = self.executor.models[0], self.micro_batches[0].inputs
        return self.executor.group.empty(model.hidden_shape(inputs.rows), model.dtype)


class _BoundaryInbox:
    """Receives this stage's messages, from each other stage in the order in which it sends them.

    Args:
        group: Group of the pipeline axis.
        schedule: The schedule.
        allocate: Function that returns memory for one message.
    """

    def __init__(self, group: Group, schedule: Schedule, allocate: Callable[[], Tensor]) -> None:
        self.group, self.allocate = group, allocate
        self.expected: dict[int, deque[BoundaryMessage]] = {}
        self.posted: dict[int, deque[tuple[BoundaryMessage, Work[Tensor]]]] = {}
        self.arrived: dict[BoundaryMessage, Tensor] = {}
        self.senders: dict[BoundaryMessage, int] = {}
        self.ahead = receives_ahead(group.computes_on)
        for stage in range(schedule.stage_count):
            if stage != group.rank and (order := deque(messages_between(schedule, stage, group.rank))):
                self.senders |= dict.fromkeys(order, stage)
                self.expected[stage], self.posted[stage] = order, deque()
                self._post(stage, self.ahead)

    def _post(self, stage: int, count: int) -> None:
        while self.expected[stage] and len(self.posted[stage]) < count:
            work = self.group.start_recv(self.allocate(), stage)
            self.posted[stage].append((self.expected[stage].popleft(), work))

    def take(self, message: BoundaryMessage) -> Tensor:
        """Wait for one message and return it. Messages that its sender sends before it are kept for later."""
        while message not in self.arrived:
            stage = self.senders[message]
            self._post(stage, self.ahead + 1)
            first, work = self.posted[stage].popleft()
            self.arrived[first] = work.wait()
        return self.arrived.pop(message)


def receives_ahead(device: torch.device) -> int:
    """Return how many receives a stage posts ahead for each sending stage."""
    return RECEIVES_AHEAD if on_host(device) else GPU_RECEIVES_AHEAD


def messages_between(schedule: Schedule, sender: int, receiver: int) -> Iterator[BoundaryMessage]:
    """Yield the messages that one stage sends to another, in order."""
    for action in schedule.stages[sender]:
        target = _destination(schedule, sender, action)
        if target is not None and target[0] == receiver:
            yield target[1]


def _destination(schedule: Schedule, stage: int, action: Action) -> tuple[int, BoundaryMessage] | None:
    """Return the stage that needs an action's result, and its message; None if no part needs it."""
    step = 1 if action.kind == "F" else -1
    part = schedule.part(stage, action.chunk) + step
    if action.kind == "W" or not 0 <= part < schedule.parts:
        return None
    receiver, chunk = schedule.stage_and_chunk(part)
    return receiver, BoundaryMessage("F" if step > 0 else "B", action.micro_batch, chunk)


def forward_only(schedule: Schedule, micro_batches: int) -> Schedule:
    """Return a schedule of only forward passes with the same placement of parts, for evaluation."""
    stages = schedule.stage_count
    order = [
        Action("F", micro_batch, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(schedule.chunks)
        for micro_batch in range(first, min(first + stages, micro_batches))
    ]
    return Schedule((tuple(order),) * stages, "evaluation", schedule.placement)
