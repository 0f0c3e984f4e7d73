"""Stages with given times, on a clock that only they advance: exact even on a busy machine.

Every message carries the time at which it was sent: hidden states and gradients are filled with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.comm.world import World
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.part import ModelPart
from hpctrain.objective.objective import Losses
from hpctrain.parallel.backward.weight_gradients import WeightGradientQueue
from hpctrain.parallel.vocabulary import VocabularyHead
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.execute import Executor, PreparedBatch
from hpctrain.pipeline.simulate import StageTimes


@dataclass
class Clock:
    """Time of one stage, and its periods of work as (start, end)."""

    now: float = 0.0
    work: list[tuple[float, float]] = field(default_factory=list)

    def spend(self, seconds: float, since: Tensor | None = None) -> None:
        """Work for some seconds on a message that was sent at the time in `since`."""
        start = self.now if since is None else max(self.now, float(since.flatten()[0]))
        self.now = start + seconds
        self.work.append((start, self.now))

    @property
    def busy(self) -> float:
        return sum(end - start for start, end in self.work)

    @property
    def span(self) -> float:
        return self.work[-1][1] - self.work[0][0]


class LateWork:
    """Handle of a receive whose message takes some seconds."""

    def __init__(self, work: Work[Tensor], seconds: float) -> None:
        self.work, self.seconds = work, seconds

    def wait(self) -> Tensor:
        return self.work.wait().add_(self.seconds)


class SentWork:
    """Handle of a send that records how much work had been done when it was waited for."""

    def __init__(self, work: Work[None], clock: Clock, waits: list[int]) -> None:
        self.work, self.clock, self.waits = work, clock, waits

    def test(self) -> bool:
        return self.work.test()

    def wait(self) -> None:
        self.waits.append(len(self.clock.work))
        self.work.wait()


class LateGroup:
    """Pipeline group, as far as the executor uses it, whose messages take `seconds`."""

    def __init__(self, group: Group, clock: Clock, seconds: float) -> None:
        self.group, self.rank, self.size, self.empty = group, group.rank, group.size, group.empty
        self.clock, self.seconds, self.device = clock, seconds, group.device
        self.computes_on = group.computes_on
        self.waits: list[int] = []

    def start_recv(self, tensor: Tensor, source: int) -> LateWork:
        return LateWork(self.group.start_recv(tensor, source), self.seconds)

    def start_send(self, tensor: Tensor, target: int) -> SentWork:
        return SentWork(self.group.start_send(tensor, target), self.clock, self.waits)


class _Spend(torch.autograd.Function):
    """Autograd function that takes time: F in forward, I in backward, W through the queue."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: TimedPart) -> Tensor:
        ctx.part = part
        part.clock.spend(part.forward_time, x)
        return torch.full_like(x, part.clock.now)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        part: TimedPart = ctx.part
        part.clock.spend(part.input_time, gradients[0])
        part.queue.submit(lambda: part.clock.spend(part.weight_time))
        return torch.full_like(gradients[0], part.clock.now), None


class TimedPart(nn.Module):
    """Part of a model with the interface that the executor needs."""

    def __init__(
        self, times: Sequence[float], shape: tuple[int, int, int], clock: Clock, queue: WeightGradientQueue
    ) -> None:
        super().__init__()
        self.forward_time, self.input_time, self.weight_time = times
        self.shape, self.clock, self.queue = shape, clock, queue
        self.dtype = torch.float64
        self.first = nn.Parameter(torch.zeros(shape, dtype=self.dtype))

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        return self.shape

    def forward(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Tensor:
        return cast(Tensor, _Spend.apply(self.first if hidden is None else hidden, self))

    def predict(self, hidden: Tensor, compute: Callable[[VocabularyHead, Tensor], Losses]) -> Losses:
        return compute(cast(VocabularyHead, None), hidden)


def no_losses(_: VocabularyHead, hidden: Tensor) -> Losses:
    """Return losses with weight 0, so that the gradient that comes back is the start of time."""
    total = 0.0 * hidden.sum()
    return Losses(total, (total.detach(),))


@dataclass(frozen=True)
class Run:
    """Times of one run of a schedule, the same on all ranks: seconds by stage.

    `prompt` is True if no stage waited for the receiver of its messages before all its work was done.
    """

    spans: tuple[float, ...]
    busy: tuple[float, ...]
    prompt: bool

    @property
    def cost(self) -> float:
        return max(self.spans)

    @property
    def bubble_rate(self) -> float:
        return 1 - max(self.busy) / self.cost


def run_in_virtual_time(
    world: World, schedule: Schedule, times: StageTimes, shape: tuple[int, int, int] = (4, 1, 8)
) -> Run:
    """Run a schedule with one stage per rank through the executor.

    `times` are seconds of whole stages, with one number for all. `shape` is that of the hidden states.
    """
    whole = (times.forward, times.input_gradient, times.weight_gradient)
    seconds = [cast(float, of_stage) / schedule.chunks for of_stage in whole]
    clock, queue = Clock(), WeightGradientQueue()
    models = [TimedPart(seconds, shape, clock, queue) for _ in range(schedule.chunks)]
    group = LateGroup(world.everyone, clock, cast(float, times.communication))
    executor = Executor(cast("list[ModelPart]", models), cast(Group, group), queue, world.ledger)
    tokens = torch.zeros(4, 1, dtype=torch.int64)
    batch = PreparedBatch(ModelInputs.of_tokens(tokens, torch.arange(4)), no_losses)
    executor.run(schedule, [batch] * schedule.micro_batches)
    prompt = all(done == len(clock.work) for done in group.waits)
    own = torch.tensor([clock.span, clock.busy, prompt], dtype=torch.float64).unsqueeze(0)
    spans, busy, prompts = world.everyone.all_gather(own).t().tolist()
    return Run(tuple(spans), tuple(busy), all(prompts))
