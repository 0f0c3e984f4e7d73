"""Stage of a model that is only evaluated: its parameters on any layout, without gradients or optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.deck.schema import Deck
from hpctrain.engine.stages.stage import StageSetup, TrainedStage, build_stage
from hpctrain.optim.optimizer import IdleOptimizer
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.replica_sync import SyncEveryStep
from hpctrain.sharding.state import MASTER
from hpctrain.sharding.synchronize import GradientSynchronizer


def build_inference_stage(deck: Deck, setup: StageSetup) -> TrainedStage:
    """Build the stage of a model that is only evaluated, such as a reference, without gradients.

    It is a StageBuilder for engines whose weights are loaded from a file, and for their plans.
    """
    stage = build_stage(deck, setup.layer_context, setup.models, setup.replications, setup.offload.parameters)
    replica_sync = SyncEveryStep()
    return TrainedStage(
        **vars(stage),
        synchronizer=GradientSynchronizer([], replica_sync),
        replica_sync=replica_sync,
        optimizer=IdleOptimizer(),
        state_owners=[stage.module_state],
    )


def build_initial_stage(deck: Deck, setup: StageSetup) -> TrainedStage:
    """Build a stage without gradients for the model that a run started from, to compare models with it.

    Its weights are initialized as those of a new run. An IdleOptimizer holds them in the dtype in which the
    run initializes them, so that rounding to parameters gives the same bits. When the parameters have their
    values, replace it by an empty `IdleOptimizer()`, to free that memory.
    """
    stage = build_inference_stage(deck, setup)
    has_adapters = deck.model.adapters is not None
    states = [{MASTER: _initial_weights(bucket, has_adapters)} for bucket in stage.buckets]
    stage.optimizer = IdleOptimizer(stage.buckets, states, setup.agreement)
    return stage


def _initial_weights(bucket: Bucket, has_adapters: bool) -> Tensor:
    """Return the bucket's parameters, or new fp32 memory if the run trains them in another dtype."""
    values = bucket.owned_values
    assert isinstance(values, Tensor)
    frozen = has_adapters and not bucket.layout.trained
    return values if frozen or bucket.dtype == torch.float32 else values.float()
