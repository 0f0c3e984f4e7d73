"""Measured times of layers and pipeline parts on this machine, without waiting for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.batches import MicroBatch
from hpctrain.deck.schema import Deck
from hpctrain.engine.stage import build_stage
from hpctrain.host.device import synchronize
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import build_parts, initialize_parts, layer_kinds
from hpctrain.model.part import Layer, LayerRange, ModelPart
from hpctrain.objective.factory import make_objective
from hpctrain.parallel.autograd import BackwardStart
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.random import DropoutSource
from hpctrain.parallel.sequence import context_positions
from hpctrain.parallel.weight_gradients import DeferredGradient, compute_all
from hpctrain.pipeline.action import Action, Kind, Schedule
from hpctrain.pipeline.execute import PreparedBatch
from hpctrain.pipeline.simulate import StageTimes
from hpctrain.sharding.replication import Replications

_SECONDS = 1.0  # of all repetitions of a measurement, about
_MOST_REPETITIONS = 7
_PINGS = 5
_DEVIATION = 0.02  # standard deviation of random weights

Measured = Mapping[tuple[Kind, int], float]
"""Median seconds of a micro-batch by kind of action and chunk."""


class PassTimes(NamedTuple):
    """Seconds of one micro-batch. A whole backward pass takes `input_gradient + weight_gradient`."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        """Seconds of the forward and the backward pass."""
        return sum(self)

    def without(self, other: PassTimes) -> PassTimes:
        """Return the times without those of another layer, at least 0."""
        return PassTimes(*(max(0.0, both - one) for both, one in zip(self, other, strict=True)))


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one micro-batch in a layer of each kind, the same on all ranks.

    Attributes:
        of_kind: Times by kind of layer. That of the head includes the final norm and the loss; its weight
            gradient counts as forward, where it is computed.
        communication: Seconds of sending hidden states from one stage to the next.
    """

    of_kind: Mapping[str, PassTimes]
    communication: float

    def of_parts(self, parts: Iterable[Sequence[Layer]]) -> StageTimes:
        """Return the times of each part of a pipeline, given the layers of each part."""
        passes = ([self.of_kind[layer.kind] for layer in part] for part in parts)
        return times_of_parts(passes, self.communication)


def times_of_parts(parts: Iterable[Sequence[PassTimes]], communication: float = 0.0) -> StageTimes:
    """Return the times of each part of a pipeline, given the times of the layers of each part."""
    sums = zip(*(map(sum, zip(*part, strict=True)) for part in parts), strict=True)
    forward, input_gradient, weight_gradient = map(list, sums)
    return StageTimes(forward, input_gradient, weight_gradient, communication)


def single_layers(kinds: Sequence[str], with_block: bool = False) -> dict[str, LayerRange]:
    """Return a range of one layer for each kind: blocks, then embedding and output layer.

    Args:
        kinds: Kind of each layer of the model, from the embedding to the output layer.
        with_block: True if the embedding and the output layer need the block next to them in their range.
    """
    spans: dict[str, LayerRange] = {}
    first, *blocks, last = kinds
    for number, kind in enumerate(blocks):
        if not with_block or number or kind not in blocks[1:]:
            spans.setdefault(kind, LayerRange(number, number + 1, with_block and not number, False))
    if with_block:
        many = len(blocks)
        return spans | {first: LayerRange(0, 1, True, False), last: LayerRange(many - 1, many, False, True)}
    return spans | {
        first: LayerRange(0, 0, True, False),
        last: LayerRange(len(blocks), len(blocks), False, True),
    }


def measure_layers(
    deck: Deck, architecture: Architecture, groups: LayerContext, mesh: Mesh, ends: bool = True
) -> LayerTimes:
    """Measure one layer of each kind, the output layer with its loss, at full size on this rank.

    Collective: all ranks measure at the same time and get the times of the slowest one. It takes about a
    second, or a few repetitions if they take longer, and the memory of these layers.

    Args:
        deck: The deck.
        architecture: Architecture of the model.
        groups: Context of the layers.
        mesh: Arrangement of the ranks.
        ends: False to measure only blocks.
    """
    world = mesh.world
    kinds, with_block = layer_kinds(architecture), architecture.begins_with_block
    spans = {
        kind: span for kind, span in single_layers(kinds, with_block).items() if ends or kind in kinds[1:-1]
    }
    models = [part for span in spans.values() for part in build_parts(architecture, groups, [span])]
    chunks = range(len(models))
    generator = torch.Generator(world.device).manual_seed(0)
    replications = Replications.of_one_rank(mesh.new_subgroup("data", 1))
    for bucket in build_stage(deck, groups, models, replications, trained=True).buckets:
        assert bucket.values is not None
        bucket.values.normal_(std=_DEVIATION, generator=generator)
    initialize_parts(architecture, models, (), 0)

    def repeated(times: int) -> list[Action]:
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        return [Action(kind, 0, chunk) for chunk in chunks for _ in range(times) for kind in kinds]

    replay = ActionTimer(models, groups, _random_batch(deck, architecture, groups, world.device))
    replay.run(repeated(1))
    start = perf_counter()
    world.everyone.barrier()
    replay.run(repeated(1))
    (longest,) = _slowest(world, [perf_counter() - start])
    count = max(2, min(_MOST_REPETITIONS, int(_SECONDS / max(longest, 1e-6))))
    measured = replay.run(repeated(count))
    figures = [measured[kind, chunk] for chunk in chunks for kind in ("F", "I", "W")]
    *slowest, communication = _slowest(world, [*figures, _ping(mesh.group("pipeline"), replay.hidden)])
    passes = (PassTimes(*slowest[3 * chunk : 3 * chunk + 3]) for chunk in chunks)
    of_kind = dict(zip(spans, passes, strict=True))
    if with_block and ends:
        of_kind[kinds[0]] = of_kind[kinds[0]].without(of_kind[kinds[1]])
        of_kind[kinds[-1]] = of_kind[kinds[-1]].without(of_kind[kinds[-2]])
    return LayerTimes(of_kind, communication)


class ActionTimer:
    """Runs pipeline actions on parts of a model without messages, and times each of them.

    Random tensors replace the messages of neighbouring stages.

    Attributes:
        models: Parts of the model by chunk.
        queue: Queue of deferred weight gradients.
        batch: Micro-batch of all actions.
        device: Device of the model.
        hidden: Hidden states that replace those of the previous stage.
        gradient: Gradient that replaces that of the next stage.
    """

    def __init__(self, models: Sequence[ModelPart], groups: LayerContext, batch: PreparedBatch) -> None:
        self.models, self.queue, self.batch = models, groups.weight_gradients, batch
        self.device = batch.inputs.positions.device
        size = models[0].hidden_shape(batch.inputs.rows)
        generator = torch.Generator(self.device).manual_seed(1)
        self.hidden = torch.randn(size, generator=generator, device=self.device).to(models[0].dtype)
        self.gradient = self.hidden * 1e-3

    def run(self, actions: Iterable[Action]) -> Measured:
        """Run the actions in their order, and return the median time of each kind and chunk. Local."""
        seconds: dict[tuple[Kind, int], list[float]] = {}
        ends: dict[tuple[int, int], tuple[Tensor | None, BackwardStart, Tensor | None]] = {}
        deferred: dict[tuple[int, int], list[DeferredGradient]] = {}
        for action in actions:
            key = (action.chunk, action.micro_batch)
            start = _now(self.device)
            if action.kind == "F":
                ends[key] = self._forward(self.models[action.chunk])
            elif action.kind == "W":
                compute_all(deferred.pop(key))
            else:
                hidden, end, gradient = ends.pop(key)
                with self.queue.backward(deferring=action.kind == "I"):
                    end.backward(gradient)
                if action.kind == "I":
                    deferred[key] = self.queue.take()
                del hidden, end
            seconds.setdefault((action.kind, action.chunk), []).append(_now(self.device) - start)
        return {key: median(values) for key, values in seconds.items()}

    def _forward(self, model: ModelPart) -> tuple[Tensor | None, BackwardStart, Tensor | None]:
        """Return the input, the start of the backward pass and its gradient, as the executor does."""
        hidden = None if model.span.embeds else self.hidden.detach().requires_grad_()
        if model.span.predicts:
            last = model(self.batch.inputs, hidden)
            return hidden, BackwardStart(model.predict(last, self.batch.losses).total), None
        return hidden, BackwardStart(model(self.batch.inputs, hidden)), self.gradient


def _now(device: torch.device) -> float:
    synchronize(device)
    return perf_counter()


def gather_part_times(measured: Measured, schedule: Schedule, mesh: Mesh, hidden: Tensor) -> StageTimes:
    """Return the times of all parts of a pipeline, from the measurements of each stage. Collective.

    The slowest rank of each stage counts.

    Args:
        measured: Result of `ActionTimer.run` for the parts of this stage.
        schedule: Pipeline schedule. Without actions "I" and "W", backward passes count as input gradient.
        mesh: Arrangement of the ranks.
        hidden: Hidden states of a micro-batch, to measure messages between stages.
    """
    stage = mesh.coordinate("pipeline")
    figures = [0.0] * (3 * schedule.parts)
    for chunk in range(schedule.chunks):
        forward, both, first, second = (measured.get((kind, chunk), 0.0) for kind in ("F", "B", "I", "W"))
        # If both were measured, separate times of the two halves are more exact.
        backward = (first, second) if first else (both, 0.0)
        part = schedule.part(stage, chunk)
        figures[3 * part : 3 * part + 3] = (forward, *backward)
    *slowest, communication = _slowest(mesh.world, [*figures, _ping(mesh.group("pipeline"), hidden)])
    return StageTimes(slowest[0::3], slowest[1::3], slowest[2::3], communication)


def _random_batch(
    deck: Deck, architecture: Architecture, groups: LayerContext, device: torch.device
) -> PreparedBatch:
    micro_size, vocabulary = deck.batch.micro_size, deck.model.vocabulary
    assert vocabulary is not None
    positions = context_positions(groups.context, groups.context_form, architecture.sequence).to(device)
    generator = torch.Generator().manual_seed(0)
    size = (micro_size, architecture.sequence)
    tokens, targets = (torch.randint(vocabulary, size, generator=generator) for _ in range(2))
    micro = MicroBatch.of_tokens(tokens, targets)
    samples = torch.arange(micro_size, device=device)
    dropout = DropoutSource(0, 0, samples, positions) if architecture.uses_random_numbers else None
    scale = torch.tensor(1.0 / micro.targets.numel(), device=device)
    return PreparedBatch.of(micro, make_objective(deck), scale, positions, dropout, scale)


def _ping(pipeline: Group, hidden: Tensor) -> float:
    """Return half the seconds of a message to the next stage and back; 0 for one stage. Collective."""
    seconds = [0.0]
    for first in range(min(2, pipeline.size)):
        is_first = pipeline.rank % 2 == first
        peer = pipeline.rank + (1 if is_first else -1)
        if not 0 <= peer < pipeline.size:
            continue
        memory = hidden.clone()
        times = []
        for _ in range(_PINGS):
            start = _now(hidden.device)
            if is_first:
                pipeline.send(memory, peer)
                pipeline.recv(memory, peer)
            else:
                pipeline.recv(memory, peer)
                pipeline.send(memory, peer)
            times.append((_now(hidden.device) - start) / 2)
        seconds.append(min(times))  # a busy machine only adds to it
    return max(seconds)


def _slowest(world: World, figures: Sequence[float]) -> list[float]:
    slowest = world.everyone.all_reduce(torch.tensor(figures, dtype=torch.float64), "max")
    return [float(seconds) for seconds in slowest]
