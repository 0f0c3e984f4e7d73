"""Measured times of layers and pipeline parts on this machine, without waiting for messages."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.costs.action_timer import ActionTimer, now
from hpctrain.costs.pass_times import LayerTimes, PassTimes
from hpctrain.costs.single_layers import single_layers
from hpctrain.data.batches import MicroBatch
from hpctrain.deck.schema import Deck
from hpctrain.engine.stages.stage import build_stage
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import build_parts, initialize_parts, layer_kinds
from hpctrain.objective.factory import make_objective
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.random import DropoutSource
from hpctrain.parallel.sequence import context_positions
from hpctrain.pipeline.action import Action, Kind
from hpctrain.pipeline.execute import PreparedBatch
from hpctrain.sharding.replication import Replications

_SECONDS = 1.0
"""Approximate time of all repetitions of a measurement, in seconds."""
_MOST_REPETITIONS = 7
_ROUND_TRIPS = 5
"""Number of messages to another stage and back that are timed."""
_WEIGHT_STD = 0.02
"""Standard deviation of the random weights of measured layers."""


def measure_layers(
    deck: Deck, architecture: Architecture, layer_context: LayerContext, mesh: Mesh, has_ends: bool = True
) -> LayerTimes:
    """Measure one layer of each kind at full size on this rank. The output layer includes the loss.

    Collective: all ranks measure at the same time and get the times of the slowest one. It takes about a
    second, or longer if two repetitions do, and the memory of these layers.

    Args:
        deck: The deck.
        architecture: Architecture of the model.
        layer_context: Context of the layers.
        mesh: Arrangement of the ranks.
        has_ends: True to measure embedding and output layer, too; False to measure only blocks.
    """
    world = mesh.world
    kinds, with_block = layer_kinds(architecture), architecture.begins_with_block
    spans = {
        kind: span
        for kind, span in single_layers(kinds, with_block).items()
        if has_ends or kind in kinds[1:-1]
    }
    models = [part for span in spans.values() for part in build_parts(architecture, layer_context, [span])]
    chunks = range(len(models))
    generator = torch.Generator(world.device).manual_seed(0)
    replications = Replications.of_one_rank(mesh.new_subgroup("data", 1))
    for bucket in build_stage(deck, layer_context, models, replications, has_gradients=True).buckets:
        assert bucket.values is not None
        bucket.values.normal_(std=_WEIGHT_STD, generator=generator)
    initialize_parts(architecture, models, (), 0)

    def repeated(times: int) -> list[Action]:
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        return [Action(kind, 0, chunk) for chunk in chunks for _ in range(times) for kind in kinds]

    replay = ActionTimer(
        models, layer_context, _random_batch(deck, architecture, layer_context, world.device)
    )
    replay.run(repeated(1))
    start = perf_counter()
    world.everyone.barrier()
    replay.run(repeated(1))
    (longest,) = slowest_ranks(world, [perf_counter() - start])
    count = max(2, min(_MOST_REPETITIONS, int(_SECONDS / max(longest, 1e-6))))
    measured = replay.run(repeated(count))
    medians = [measured[kind, chunk] for chunk in chunks for kind in ("F", "I", "W")]
    *slowest, communication = slowest_ranks(
        world, [*medians, message_seconds(mesh.group("pipeline"), replay.hidden)]
    )
    passes = (PassTimes(*slowest[3 * chunk : 3 * chunk + 3]) for chunk in chunks)
    of_kind = dict(zip(spans, passes, strict=True))
    if with_block and has_ends:
        of_kind[kinds[0]] = of_kind[kinds[0]].without(of_kind[kinds[1]])
        of_kind[kinds[-1]] = of_kind[kinds[-1]].without(of_kind[kinds[-2]])
    return LayerTimes(of_kind, communication)


def _random_batch(
    deck: Deck, architecture: Architecture, layer_context: LayerContext, device: torch.device
) -> PreparedBatch:
    micro_size, vocabulary = deck.batch.micro_size, deck.model.vocabulary
    assert vocabulary is not None
    positions = context_positions(
        layer_context.context, layer_context.context_form, architecture.sequence
    ).to(device)
    generator = torch.Generator().manual_seed(0)
    size = (micro_size, architecture.sequence)
    tokens, targets = (torch.randint(vocabulary, size, generator=generator) for _ in range(2))
    micro = MicroBatch.of_tokens(tokens, targets)
    samples = torch.arange(micro_size, device=device)
    dropout = DropoutSource(0, 0, samples, positions) if architecture.uses_random_numbers else None
    scale = torch.tensor(1.0 / micro.targets.numel(), device=device)
    return PreparedBatch.of(micro, make_objective(deck), scale, positions, dropout, scale)


def message_seconds(pipeline: Group, hidden: Tensor) -> float:
    """Return half the seconds of a message to the next stage and back; 0 for one stage. Collective."""
    seconds = [0.0]
    for first in range(min(2, pipeline.size)):
        is_first = pipeline.rank % 2 == first
        peer = pipeline.rank + (1 if is_first else -1)
        if not 0 <= peer < pipeline.size:
            continue
        memory = hidden.clone()
        times = []
        for _ in range(_ROUND_TRIPS):
            start = now(hidden.device)
            if is_first:
                pipeline.send(memory, peer)
                pipeline.recv(memory, peer)
            else:
                pipeline.recv(memory, peer)
                pipeline.send(memory, peer)
            times.append((now(hidden.device) - start) / 2)
        seconds.append(min(times))  # other work of the machine can only increase the time
    return max(seconds)


def slowest_ranks(world: World, seconds: Sequence[float]) -> list[float]:
    """Return the largest of each number of seconds over all ranks. Collective."""
    slowest = world.everyone.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max")
    return [float(each) for each in slowest]
