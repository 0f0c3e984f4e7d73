"""Stages that sleep instead of computing: they take the same time everywhere, and no cores."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group, Work
from hpctrain.comm.world import World
from hpctrain.model.transformer import Inputs, Transformer
from hpctrain.parallel.vocabulary import LossTerms
from hpctrain.parallel.weight_grad import WeightGradientQueue
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.execute import Executor, PreparedBatch
from hpctrain.pipeline.simulate import Times

AWAKE = 0.001
PAUSE = 0.00005


@dataclass
class Clock:
    """The naps of one stage, as (start, end) in seconds."""

    naps: list[tuple[float, float]] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        """Sleep, but be awake at the end: who has just woken up is slow at first, which is not to count."""
        start = time.perf_counter()
        time.sleep(max(0.0, seconds - AWAKE))
        while time.perf_counter() < start + seconds:
            pass
        self.naps.append((start, time.perf_counter()))

    @property
    def busy(self) -> float:
        return sum(end - start for start, end in self.naps)

    @property
    def span(self) -> float:
        return self.naps[-1][1] - self.naps[0][0]


class PatientWork:
    """A receive that is waited for asleep: ranks that wait leave the cores to those that wake up."""

    def __init__(self, work: Work[Tensor]) -> None:
        self.work = work

    def wait(self) -> Tensor:
        while not self.work.test():
            time.sleep(PAUSE)
        return self.work.wait()


class PatientGroup:
    """The pipeline axis, as far as the executor makes use of it."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.empty, self.start_send = group.empty, group.start_send

    def start_recv(self, tensor: Tensor, source: int) -> PatientWork:
        return PatientWork(self.group.start_recv(tensor, source))


class _Nap(torch.autograd.Function):
    """Passes its input on: F in forward, I in backward, W through the queue."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: SleepingPart) -> Tensor:
        ctx.part = part
        part.clock.sleep(part.forward_time)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        part: SleepingPart = ctx.part
        part.clock.sleep(part.input_time)
        part.queue.submit(lambda: part.clock.sleep(part.weight_time))
        return gradients[0].clone(), None


class SleepingPart(nn.Module):
    """One part of a model, with what the executor asks of a Transformer."""

    def __init__(
        self, times: Sequence[float], shape: tuple[int, int, int], clock: Clock, queue: WeightGradientQueue
    ) -> None:
        super().__init__()
        self.forward_time, self.input_time, self.weight_time = times
        self.shape, self.clock, self.queue = shape, clock, queue
        self.first = nn.Parameter(torch.zeros(shape))

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        return self.shape

    def forward(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor:
        return cast(Tensor, _Nap.apply(self.first if hidden is None else hidden, self))

    def loss(self, inputs: Inputs, terms: LossTerms, hidden: Tensor | None = None) -> Tensor:
        return self(inputs, hidden).sum()


@dataclass(frozen=True)
class Measured:
    """One run of a schedule, the same on all ranks: seconds, by stage."""

    spans: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def cost(self) -> float:
        return max(self.spans)

    @property
    def bubble_rate(self) -> float:
        return 1 - max(self.busy) / self.cost


def run_asleep(
    world: World, schedule: Schedule, times: Times, shape: tuple[int, int, int] = (4, 1, 8)
) -> Measured:
    """Run a schedule, a stage a rank, through the executor; `times` are seconds of whole stages, one for all.

    `shape` is that of the hidden states.
    """
    whole = (times.forward, times.input_gradient, times.weight_gradient)
    naps = [cast(float, seconds) / schedule.chunks for seconds in whole]
    clock, queue = Clock(), WeightGradientQueue()
    models = [SleepingPart(naps, shape, clock, queue) for _ in range(schedule.chunks)]
    group = cast(Group, PatientGroup(world.everyone))
    executor = Executor(cast("list[Transformer]", models), group, queue, world.ledger)
    tokens = torch.zeros(4, 1, dtype=torch.int64)
    batch = PreparedBatch(Inputs(tokens, torch.arange(4)), LossTerms(tokens, torch.ones(()), 0.0))
    gc.collect()
    gc.disable()
    try:
        world.everyone.barrier()
        executor.run(schedule, [batch] * schedule.micro_batches)
    finally:
        gc.enable()
    own = torch.tensor([clock.span, clock.busy], dtype=torch.float64).unsqueeze(0)
    spans, busy = world.everyone.all_gather(own).t().tolist()
    return Measured(tuple(spans), tuple(busy))
