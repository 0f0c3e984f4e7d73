"""Optional features of an engine. Each has one entry here, which adds it to what it changes.

Features that a deck does not use add nothing, so they cost nothing in a step. To add a feature, derive a
class from `EngineFeature` and list it in `FEATURES`. Some features have registries of their own: update rules
(`update_rules.py`), replica synchronization (`gradients.py`), and compression
(`sharding/compression/methods.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.audit_kernel_choice import with_matmul_audit
from hpctrain.fault_checks.replica_check import check_replicas
from hpctrain.model.part import blocks_of
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.sharding.gather import Gatherer
from hpctrain.sharding.weight_maxima import WeightMaxima, products_in_8_bits

if TYPE_CHECKING:
    from hpctrain.engine.stages.stage import Stage, TrainedStage


class EngineFeature:
    """Optional feature of an engine. A subclass overrides what it needs, and checks whether it is on."""

    def extend_layer_context(self, layer_context: LayerContext, deck: Deck, world: World) -> LayerContext:  # noqa: ARG002
        """Return the context of the layers with the feature. Collective; not called in plans."""
        return layer_context

    def attach(self, stage: Stage, deck: Deck) -> None:
        """Add the feature to a stage whose buckets are built. Local; also called in plans."""

    def start(self, stage: TrainedStage, deck: Deck, world: World) -> None:
        """Add the feature to an initialized stage. Collective; not called in plans."""


class AuditedProducts(EngineFeature):
    """Checks of all matrix products for silent faults, with `stability.corruption = "full"`."""

    @override
    def extend_layer_context(self, layer_context: LayerContext, deck: Deck, world: World) -> LayerContext:
        if deck.stability.corruption != "full":
            return layer_context
        return with_matmul_audit(layer_context, world, deck.run.seed)

    @override
    def start(self, stage: TrainedStage, deck: Deck, world: World) -> None:
        if stage.layer_context.products.audit is not None:
            stage.synchronizer.on_gradients_complete = stage.layer_context.products.audit.check_gradients


class WeightMaximaOfSteps(EngineFeature):
    """Largest weights of 8-bit products, which are computed once per step."""

    @override
    def attach(self, stage: Stage, deck: Deck) -> None:
        products = products_in_8_bits(layer for model in stage.models for layer in model.layers)
        if not products:
            return
        maxima = WeightMaxima(products, stage.buckets, stage.layer_context.tensor)
        stage.surround_passes(lambda _: maxima.provide_maxima())


class ConstantMatrices(EngineFeature):
    """Weights that are converted once per step, for kernels that compute 16-bit products in fp32."""

    @override
    def start(self, stage: TrainedStage, deck: Deck, world: World) -> None:
        kernels = stage.layer_context.products.kernels
        if kernels.reuse_converted:
            stage.surround_passes(lambda _: kernels.constant_matrices())


class GatheredParameters(EngineFeature):
    """Parameters that are not always on the device: split by ZeRO-3, or offloaded."""

    @override
    def attach(self, stage: Stage, deck: Deck) -> None:
        if all(bucket.sharding.zero < 3 for bucket in stage.buckets):
            return
        blocks = [block for model in stage.models for block in blocks_of(model)]
        last = blocks[max(0, len(blocks) - deck.memory.keep_gathered) :]
        lasting = [layer for model in stage.models for layer in model.layers if layer.keeps_gathered]
        persistent_parameters = {key for layer in (*last, *lasting) for key in layer.gather_keys}
        stage.residency = Gatherer(stage.buckets, persistent_parameters)
        for model in stage.models:
            model.residency = stage.residency
        stage.surround_passes(stage.residency.step)


class RecordedStatistics(EngineFeature):
    """Statistics of a step that routers and 8-bit products record."""

    @override
    def attach(self, stage: Stage, deck: Deck) -> None:
        if deck.model.experts or stage.layer_context.products.fp8 is not None:
            stage.statistics = stage.layer_context.statistics


class CheckedReplicas(EngineFeature):
    """Comparison of the parameters that several ranks hold, at the start of a run."""

    @override
    def start(self, stage: TrainedStage, deck: Deck, world: World) -> None:
        if deck.stability.check_parameters:
            check_replicas(stage.buckets, world.everyone)


FEATURES: Sequence[EngineFeature] = (
    AuditedProducts(),
    WeightMaximaOfSteps(),
    ConstantMatrices(),
    GatheredParameters(),
    RecordedStatistics(),
    CheckedReplicas(),
)
"""All features, in the order in which they are added."""


def extend_layer_context(layer_context: LayerContext, deck: Deck, world: World) -> LayerContext:
    """Return the context of the layers with all features of a deck. Collective over all ranks."""
    for feature in FEATURES:
        layer_context = feature.extend_layer_context(layer_context, deck, world)
    return layer_context


def attach_features(stage: Stage, deck: Deck) -> None:
    """Add all features of a deck to a stage whose buckets are built. Local."""
    for feature in FEATURES:
        feature.attach(stage, deck)


def start_features(stage: TrainedStage, deck: Deck, world: World) -> None:
    """Add all features of a deck to an initialized stage. Collective over all ranks."""
    for feature in FEATURES:
        feature.start(stage, deck, world)
