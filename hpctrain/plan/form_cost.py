"""What it costs a rank to send less: the form's own computing, timed on this machine.

A stage is built in the memory of this process, as a run's first rank would hold it, on groups that give back
what they are given, and gets gradients of noise. A step's sums and what replicas do are timed so with the
deck's form and with exact sums; the difference is the cost. Of a large model fewer blocks stand for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from hpctrain.comm.planned import PlannedCalls, PlannedMesh
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.engine.stages.stage import StageSetup, TrainedStage, build_trained_stage
from hpctrain.engine.stages.zero_groups import make_replications
from hpctrain.host.device import device_kind, on_host
from hpctrain.memory.recompute import Recompute
from hpctrain.model.construction import build_parts
from hpctrain.model.count import count
from hpctrain.model.part import LayerRange
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.shards import Parameter
from hpctrain.pipeline.action import accumulation
from hpctrain.plan.step_on_meta import rehearse
from hpctrain.plan.traffic_plan import PlannedWeights, steady

PARAMETERS = 40_000_000
"""Of the model that is timed, about, at the most."""

_ROUNDS = 4


def form_seconds(deck: Deck, plain: Deck, ranks: int, vocabulary: int, ranks_per_node: int) -> float | None:
    """Seconds of a step that the deck's form takes beyond those of `plain`; None of GPUs, not timed here.

    Workers of servers compute no more than others.
    """
    if deck.communication.server is not None:
        return 0.0
    if not on_host(device_kind(deck.run.device)):
        return None
    shape = ModelShape.of(deck, vocabulary)
    blocks = shape.layers
    while blocks > 1 and count(_with_layers(shape, blocks)).parameters > PARAMETERS:
        blocks = (blocks + 1) // 2
    timed = _with_layers(shape, blocks)
    torch.set_num_threads(deck.run.threads)
    scale = count(shape).parameters / count(timed).parameters / deck.layout.pipeline
    taken = [_seconds(each, timed, ranks, ranks_per_node) for each in (deck, plain)]
    return max(0.0, scale * (taken[0] - taken[1]))


def _with_layers(shape: ModelShape, layers: int) -> ModelShape:
    return replace(shape, layers=layers)


def _seconds(deck: Deck, shape: ModelShape, ranks: int, ranks_per_node: int) -> float:
    """Of a step's sums and of what replicas do, the mean over the steps between their meetings."""
    stage = _build(steady(deck), shape, ranks, ranks_per_node)
    weights, period = PlannedWeights(stage), deck.layout.steps_between_syncs
    stage.replica_sync.begin(weights)

    def meet() -> None:
        for _ in range(period):
            weights.updates += 1
            stage.replica_sync.before_update(stage.buckets)
            stage.replica_sync.after_update(weights)

    def sums() -> None:
        rehearse(stage, "none", accumulation(1), 0)
        stage.synchronizer.end_step(True, 1.0)

    with torch.no_grad():
        return (_least(sums) + _least(meet) / period) / deck.run.threads


def _least(act: Callable[[], None]) -> float:
    """Seconds of processors: others may be busy on this machine."""
    taken = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        act()
        taken.append(time.process_time() - began)
    return min(taken)


def _build(deck: Deck, shape: ModelShape, ranks: int, ranks_per_node: int) -> TrainedStage:
    """A stage of all blocks in memory, whose gradients become noise as they are added."""
    cpu = torch.device("cpu")
    sizes = axis_sizes(deck, ranks)
    mesh = PlannedMesh(sizes, 0, ranks_per_node, calls=PlannedCalls(echo=True))
    layer_context = make_layer_context(deck, mesh, Recompute("none"), cpu)
    models = build_parts(shape, layer_context, [LayerRange.all_of(shape.layers)])
    setup = StageSetup(layer_context, models, make_replications(deck, mesh), cpu)
    stage = build_trained_stage(deck, setup)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(max(bucket.length for bucket in stage.buckets), generator=generator)
    for bucket in stage.buckets:
        for segment in bucket.segments:
            told = segment.parameter.on_gradient_added
            assert told is not None
            segment.parameter.on_gradient_added = partial(_fill, noise, told)
    return stage


def _fill(noise: torch.Tensor, told: Callable[[Parameter], None], parameter: Parameter) -> None:
    if parameter.gradient is not None:
        parameter.gradient.copy_(noise[: parameter.numel()].view(parameter.shape))
    told(parameter)
