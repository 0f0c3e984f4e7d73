"""A stage of a model that is only looked at: its parameters on any layout, without gradients or optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from hpctrain.deck.schema import Deck
from hpctrain.engine.offload_settings import OffloadSettings
from hpctrain.engine.stage import TrainedStage, build_stage
from hpctrain.model.part import ModelPart
from hpctrain.optim.optimizer import Agreement, BucketState, Optimizer
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.replica_sync import SyncEveryStep
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.state import MASTER
from hpctrain.sharding.synchronize import GradientSynchronizer


class InferenceOptimizer(Optimizer):
    """An optimizer that never updates; it holds the weights in `states`, if any, while they are filled."""

    updates = 0

    def __init__(
        self,
        buckets: Sequence[Bucket] = (),
        states: Sequence[BucketState] = (),
        agreement: Agreement = nullcontext,
    ) -> None:
        super().__init__(None, buckets, states, agreement)

    def step(self, learning_rate: float, gradient_divisor: float) -> None:  # noqa: ARG002
        """There is nothing to update."""
        raise AssertionError("a model that is only looked at")


def build_shown_stage(
    deck: Deck,
    groups: LayerContext,
    models: Sequence[ModelPart],
    replications: Replications,
    offload: OffloadSettings,
    device: torch.device,  # noqa: ARG001
    agreement: Agreement = nullcontext,  # noqa: ARG001
) -> TrainedStage:
    """In place of `build_trained_stage`."""
    stage, outer = build_stage(deck, groups, models, replications, offload.parameters), SyncEveryStep()
    nothing = GradientSynchronizer([], outer)
    return TrainedStage(
        **vars(stage),
        synchronizer=nothing,
        outer=outer,
        optimizer=InferenceOptimizer(),
        stateful=[stage.modules],
    )


def build_initial_stage(
    deck: Deck,
    groups: LayerContext,
    models: Sequence[ModelPart],
    replications: Replications,
    offload: OffloadSettings,
    device: torch.device,
    agreement: Agreement = nullcontext,
) -> TrainedStage:
    """Build a stage without gradients whose weights are filled as those of a run that begins.

    Its optimizer holds the weights in the format in which the run holds them at that time, so that both round
    alike. Replace it by `InferenceOptimizer()` once the weights are published, which frees that memory.
    """
    stage = build_shown_stage(deck, groups, models, replications, offload, device)
    adapted = deck.model.adapters is not None
    states = [{MASTER: _initial_weights(bucket, adapted)} for bucket in stage.buckets]
    stage.optimizer = InferenceOptimizer(stage.buckets, states, agreement)
    return stage


def _initial_weights(bucket: Bucket, adapted: bool) -> Tensor:
    """Return the bucket's own values, or new memory in fp32 if the run trains them in another format."""
    values = bucket.own_values
    assert isinstance(values, Tensor)
    frozen = adapted and not bucket.layout.trained
    return values if frozen or bucket.dtype == torch.float32 else values.float()
