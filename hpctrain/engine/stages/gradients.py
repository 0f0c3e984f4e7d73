"""Reduction of gradients during the backward pass, and synchronization of replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.deck.schema import Deck
from hpctrain.engine.stages.update_rules import compression_settings
from hpctrain.model.part import blocks_of
from hpctrain.sharding.compression.methods import make_reduction
from hpctrain.sharding.gradient_squares import FirstMicroBatchNorm
from hpctrain.sharding.local_steps.fragments import FragmentSchedule, fragments_of
from hpctrain.sharding.local_steps.local_steps import LocalSteps, OuterOptimizer
from hpctrain.sharding.local_steps.outer_format import FORMATS
from hpctrain.sharding.reducer import Reducer
from hpctrain.sharding.replica_sync import ReplicaSync, SyncEveryStep
from hpctrain.sharding.state import Stateful
from hpctrain.sharding.synchronize import GradientSynchronizer

if TYPE_CHECKING:
    from hpctrain.engine.stages.stage import Stage


class ReplicaSyncChoice(NamedTuple):
    """Function that makes a ReplicaSync of a deck and a stage, and True if replicas diverge under it."""

    make: Callable[[Deck, Stage], ReplicaSync]
    diverging: bool = False

    @staticmethod
    def of(deck: Deck) -> ReplicaSyncChoice:
        """Return the choice of a deck."""
        steps = deck.layout.local_steps
        return REPLICA_SYNCS["every_step" if steps is None or not steps.has_outer_model else steps.outer]


def make_local_steps(deck: Deck, stage: Stage) -> LocalSteps:
    """Return the synchronization of replicas that diverge for some steps (Local SGD or DiLoCo). Local."""
    keys = deck.layout.local_steps
    assert keys is not None
    blocks = {
        parameter: model.span.first + number
        for model in stage.models
        for number, block in enumerate(blocks_of(model))
        for parameter in block.all_parameters
    }
    fragments = fragments_of(stage.buckets, blocks, keys.fragments)
    timing = FragmentSchedule(keys.steps, keys.fragments, keys.delay, deck.communication.warmup)
    outer = keys.diloco
    rule = OuterOptimizer() if outer is None else OuterOptimizer(outer.learning_rate, outer.momentum)
    return LocalSteps(stage.buckets, fragments, timing, rule, keys.blend, FORMATS[keys.format])


REPLICA_SYNCS: Mapping[str, ReplicaSyncChoice] = {
    "every_step": ReplicaSyncChoice(lambda *_: SyncEveryStep()),
    "average": ReplicaSyncChoice(make_local_steps, diverging=True),
    "diloco": ReplicaSyncChoice(make_local_steps, diverging=True),
}
"""Choices by `layout.local_steps.outer`; "every_step" if replicas do not diverge."""


def make_synchronizer(
    deck: Deck, stage: Stage, replica_sync: ReplicaSync
) -> tuple[GradientSynchronizer, list[Stateful]]:
    """Return the synchronizer of a stage's gradients, and the reductions, which may have state. Local."""
    trained = [bucket for bucket in stage.buckets if bucket.trained]
    compression = compression_settings(deck)
    reductions = [make_reduction(compression, bucket) for bucket in trained]
    computes_squares, noise_norm = deck.run.noise_scale_steps > 0, None
    if computes_squares and all(bucket.sharding.ranks == 1 for bucket in stage.buckets):
        computes_squares = False
        noise_norm = FirstMicroBatchNorm(stage.buckets[0].sharding.group.device)
    reducers = [Reducer(*each, computes_squares) for each in zip(trained, reductions, strict=True)]
    in_order, sliced = deck.model.module is not None, deck.memory.accumulate == "sliced"
    synchronizer = GradientSynchronizer(reducers, replica_sync, sliced, noise_norm, in_order)
    return synchronizer, [*reductions]
