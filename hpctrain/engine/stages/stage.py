"""Pipeline stage: model parts in buckets, and for training also gradients, replicas and an optimizer.

A run builds a stage in memory. A plan builds the same stage on torch's device "meta", which has no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.offload_allocators import OffloadAllocators
from hpctrain.engine.registry import attach_features
from hpctrain.engine.stages.gradients import ReplicaSyncChoice, make_synchronizer
from hpctrain.engine.stages.update_rules import assign_settings, make_optimizer
from hpctrain.model.part import ModelPart
from hpctrain.model.precision import Precision
from hpctrain.optim.optimizer import Agreement, Optimizer
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.step_statistics import StepStatistics
from hpctrain.sharding.bucket import Bucket, FlatAllocator
from hpctrain.sharding.bucket_layout import BucketLayout, bucket_layouts
from hpctrain.sharding.eight_bit_gather import make_bucket
from hpctrain.sharding.replica_sync import ReplicaSync
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.state import ModuleState, Stateful, StateTensor
from hpctrain.sharding.synchronize import GradientSynchronizer
from hpctrain.sharding.weight_maxima import products_in_8_bits

PassContext = Callable[[Hashable], AbstractContextManager[object]]
"""Function that returns a context for the passes of a step of some kind."""


@dataclass
class Stage:
    """Model parts that this rank holds, with their parameters in buckets. TrainedStage adds an optimizer.

    A rank may hold several stages, of one mesh or of several.

    Attributes:
        layer_context: Context of the layers.
        models: Model parts by chunk.
        replications: Ranks that hold each shard.
        buckets: Buckets of all parameters.
        module_state: State of layers that is no parameter.
        residency: Brings parameters to the device before they are used.
        pass_context: Function that returns a context for all passes of one step, in which parameters must not
            change, given the kind of step. Steps of one kind use parameters in the same order. Collective.
        statistics: Statistics that layers record of a step; None if no layer records any.
    """

    layer_context: LayerContext
    models: list[ModelPart]
    replications: Replications
    buckets: list[Bucket]
    module_state: ModuleState
    residency: ParameterResidency = field(default_factory=ParameterResidency)
    pass_context: PassContext = nullcontext
    statistics: StepStatistics | None = None

    def surround_passes(self, context: PassContext) -> None:
        """Make `pass_context` enter another context, too, after the contexts that it enters already."""
        outer = self.pass_context

        @contextmanager
        def both(kind: Hashable) -> Iterator[None]:
            with outer(kind), context(kind):
                yield

        self.pass_context = context if outer is nullcontext else both


@dataclass(kw_only=True)
class TrainedStage(Stage):
    """Stage that is trained.

    Attributes:
        synchronizer: Reduces gradients.
        replica_sync: Synchronizes replicas.
        optimizer: Updates parameters.
        state_owners: Further owners of state.
    """

    synchronizer: GradientSynchronizer
    replica_sync: ReplicaSync
    optimizer: Optimizer
    state_owners: list[Stateful]

    @property
    def replica(self) -> tuple[int, int]:
        """Number of this rank's replica and number of replicas; (0, 1) if replicas do not diverge."""
        groups = self.diverges and self.buckets[0].sharding.diverging_groups
        return (groups[0].rank, groups[0].size) if groups else (0, 1)

    @property
    def diverges(self) -> bool:
        """True if replicas diverge between synchronizations."""
        return any(bucket.sharding.diverging for bucket in self.buckets)

    def state(self) -> Iterator[StateTensor]:
        """Yield the parameters and all state that belongs to them."""
        for each in (self.optimizer, *self.state_owners):
            yield from each.state()


@dataclass(frozen=True)
class StageSetup:
    """Inputs from which a stage is built, apart from the deck.

    Attributes:
        layer_context: Context of the layers.
        models: Model parts by chunk, without memory, in which parameters are already frozen.
        replications: Ranks that hold each shard.
        device: Device of the run.
        offload: Makes memory outside the device.
        agreement: Context of operations that may fail on one rank alone.
    """

    layer_context: LayerContext
    models: Sequence[ModelPart]
    replications: Replications
    device: torch.device
    offload: OffloadAllocators = field(default_factory=OffloadAllocators)
    agreement: Agreement = nullcontext


StageBuilder = Callable[[Deck, StageSetup], TrainedStage]
"""Function that builds a stage. Collective over the ranks of the mesh."""


def build_stage(
    deck: Deck,
    layer_context: LayerContext,
    models: Sequence[ModelPart],
    replications: Replications,
    allocate: FlatAllocator | None = None,
    has_gradients: bool = False,
) -> Stage:
    """Return a stage of model parts whose parameters are in buckets, which allocates their memory.

    Features that the deck turns on are attached (engine/registry.py). The stage has no optimizer:
    `build_trained_stage` adds it.

    Args:
        deck: The deck.
        layer_context: Context of the layers.
        models: Model parts by chunk, without memory.
        replications: Ranks that hold each shard.
        allocate: Makes the memory of ZeRO slices outside the device; None for the device.
        has_gradients: True to allocate memory for gradients, too.
    """
    size, precision = deck.communication.bucket_bytes, Precision.of(deck)
    # With adapters, all other parameters have neither gradients nor state, so they have buckets of their own.
    separate = deck.model.adapters is not None
    layouts = (each for part in models for each in bucket_layouts(part.units(), replications, size, separate))
    layers = [layer for model in models for layer in model.layers]
    products = products_in_8_bits(layers)

    def allocate_bucket(layout: BucketLayout) -> Bucket:
        is_trained = has_gradients and (layout.trained or not separate)
        return make_bucket(products, layout, precision.storage, precision.gradient, is_trained, allocate)

    buckets = list(map(allocate_bucket, layouts))
    stage = Stage(layer_context, list(models), replications, buckets, ModuleState(layers, replications))
    attach_features(stage, deck)
    return stage


def build_trained_stage(deck: Deck, setup: StageSetup) -> TrainedStage:
    """Build a stage with gradients and an optimizer. Collective over the ranks of the mesh."""
    assign_settings(deck, setup.models)
    offload = setup.offload
    stage = build_stage(
        deck, setup.layer_context, setup.models, setup.replications, offload.parameters, has_gradients=True
    )
    replica_sync = ReplicaSyncChoice.of(deck).make(deck, stage)
    synchronizer, reductions = make_synchronizer(deck, stage, replica_sync)
    optimizer = make_optimizer(deck, stage.buckets, offload.optimizer, setup.device, setup.agreement)
    state_owners = [
        each for each in (replica_sync, *reductions, stage.module_state) if isinstance(each, Stateful)
    ]
    return TrainedStage(
        **vars(stage),
        synchronizer=synchronizer,
        replica_sync=replica_sync,
        optimizer=optimizer,
        state_owners=state_owners,
    )
