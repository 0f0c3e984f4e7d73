"""Time that compressed communication needs for computation, measured on this machine.

A stage is built in the memory of this process, as the first rank of a run would have it. Its groups return
what they are given, and its gradients are random. The reductions of a step and the synchronization of
replicas are timed with the deck's form of communication and with exact sums. The cost is the difference. A
large model is measured with fewer blocks, and the result is scaled up.
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
from hpctrain.plan.traffic_plan import PlannedWeights, without_warmup

PARAMETERS = 40_000_000
"""Approximate number of parameters of the largest model that is timed."""

_ROUNDS = 4


def form_seconds(deck: Deck, plain: Deck, ranks: int, vocabulary: int, ranks_per_node: int) -> float | None:
    """Return how many more seconds a step computes than with exact sums.

    Workers of parameter servers compute no more than other ranks.

    Args:
        deck: The deck.
        plain: The deck with exact sums.
        ranks: Number of ranks.
        vocabulary: Number of token ids of the model.
        ranks_per_node: Number of ranks per node.

    Returns:
        The seconds; None for GPUs, since this machine may have none.
    """
    if deck.communication.server is not None:
        return 0.0
    if not on_host(device_kind(deck.run.device)):
        return None
    shape = ModelShape.of(deck, vocabulary)
    blocks = shape.layers
    while blocks > 1 and count(_with_layers(shape, blocks)).parameters > PARAMETERS:
        blocks = (blocks + 1) // 2
    small_shape = _with_layers(shape, blocks)
    torch.set_num_threads(deck.run.threads)
    scale = count(shape).parameters / count(small_shape).parameters / deck.layout.pipeline
    seconds = [_seconds(each, small_shape, ranks, ranks_per_node) for each in (deck, plain)]
    return max(0.0, scale * (seconds[0] - seconds[1]))


def _with_layers(shape: ModelShape, layers: int) -> ModelShape:
    return replace(shape, layers=layers)


def _seconds(deck: Deck, shape: ModelShape, ranks: int, ranks_per_node: int) -> float:
    """Return the seconds of the reductions of a step, and of the synchronization of replicas per step."""
    stage = _build(without_warmup(deck), shape, ranks, ranks_per_node)
    weights, period = PlannedWeights(stage), deck.layout.steps_between_syncs
    stage.replica_sync.begin(weights)

    def synchronize() -> None:
        for _ in range(period):
            weights.updates += 1
            stage.replica_sync.before_update(stage.buckets)
            stage.replica_sync.after_update(weights)

    def reduce() -> None:
        rehearse(stage, "none", accumulation(1), 0)
        stage.synchronizer.end_step(True, 1.0)

    with torch.no_grad():
        return (_least(reduce) + _least(synchronize) / period) / deck.run.threads


def _least(call: Callable[[], None]) -> float:
    """Return the smallest processor time of several calls. Other processes may use this machine meanwhile."""
    seconds = []
    for _ in range(_ROUNDS):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


def _build(deck: Deck, shape: ModelShape, ranks: int, ranks_per_node: int) -> TrainedStage:
    """Build a stage with all blocks. Each gradient that is added is replaced by random numbers."""
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
            on_added = segment.parameter.on_gradient_added
            assert on_added is not None
            segment.parameter.on_gradient_added = partial(_fill, noise, on_added)
    return stage


def _fill(noise: torch.Tensor, on_added: Callable[[Parameter], None], parameter: Parameter) -> None:
    if parameter.gradient is not None:
        parameter.gradient.copy_(noise[: parameter.numel()].view(parameter.shape))
    on_added(parameter)
