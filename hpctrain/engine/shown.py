"""A stage of a model that is only looked at: its parameters on any layout, without gradients or optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from hpctrain.deck.schema import Deck
from hpctrain.engine.offload import Offload
from hpctrain.engine.stage import TrainedStage, build_stage
from hpctrain.model.part import Part
from hpctrain.optim.optimizer import Agreement, Optimizer
from hpctrain.parallel.groups import LayerGroups
from hpctrain.sharding.outer import EveryStep
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.synchronize import GradientSynchronizer


class NoOptimizer(Optimizer):
    """Of parameters that stay as they are."""

    updates = 0

    def __init__(self) -> None:
        super().__init__(None, (), ())

    def step(self, learning_rate: float, gradient_divisor: float) -> None:  # noqa: ARG002
        """There is nothing to update."""
        raise AssertionError("a model that is only looked at")


def build_shown_stage(
    deck: Deck,
    groups: LayerGroups,
    models: Sequence[Part],
    replications: Replications,
    offload: Offload,
    device: torch.device,  # noqa: ARG001
    agreement: Agreement = nullcontext,  # noqa: ARG001
) -> TrainedStage:
    """In place of `build_trained_stage`."""
    stage, outer = build_stage(deck, groups, models, replications, offload.parameters), EveryStep()
    nothing = GradientSynchronizer([], outer)
    return TrainedStage(
        **vars(stage), synchronizer=nothing, outer=outer, optimizer=NoOptimizer(), stateful=[stage.modules]
    )
