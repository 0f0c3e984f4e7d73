"""Rehearsal of a step of a pipeline stage without memory, with the objects of a run.

It shows which buckets use memory at the same time, and which messages they send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

from hpctrain.engine.stages.stage import TrainedStage
from hpctrain.memory.recompute import segment_size
from hpctrain.model.parameters.frozen import blocks_without_backward, embedding_trained
from hpctrain.model.part import Layer, ModelPart, blocks_of
from hpctrain.model.shape import Recomputed
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.shards import Parameter
from hpctrain.pipeline.action import Schedule


def rehearse(
    stage: TrainedStage,
    recompute: Recomputed,
    schedule: Schedule,
    number: int,
) -> None:
    """Rehearse the bucket operations of a step of a stage. Nothing is computed.

    Parameters are gathered, and gradients are allocated, summed and freed, in the order of the layers.

    Args:
        stage: Stage on the meta device.
        recompute: Kind of recomputation.
        schedule: Schedule of the step.
        number: Number of the stage.
    """
    passes = [_Passes(model, recompute) for model in stage.models]
    stage.synchronizer.start(schedule.micro_batches)
    with stage.residency.step("plan"):
        for action in schedule.stages[number]:
            chunk_passes = passes[action.chunk]
            if action.kind == "F":
                chunk_passes.forward(stage.residency)
            elif action.kind == "W":
                for deferred in chunk_passes.deferred_parameters:
                    add(deferred)
            else:
                chunk_passes.backward(stage.residency, action.kind == "I")
        stage.synchronizer.finish()


def rehearse_forward(stage: TrainedStage, schedule: Schedule, number: int) -> None:
    """Rehearse the forward passes of a step of a stage that is not trained.

    Args:
        stage: Stage on the meta device.
        schedule: Schedule of the step.
        number: Number of the stage.
    """
    with stage.residency.step("plan"):
        for action in schedule.stages[number]:
            if action.kind == "F":
                for layer in stage.models[action.chunk].layers:
                    _compute(layer, stage.residency, trained=False)


class _BackwardStep(NamedTuple):
    """Step of the backward pass of a layer.

    Attributes:
        gathered: Parameter that is in memory during the step; None for none.
        added: Parameters to whose gradients the step adds.
        immediate: Those of them whose gradients are not deferred to a W action.
    """

    gathered: Parameter | None
    added: list[Parameter]
    immediate: list[Parameter]


class _LayerBackward(NamedTuple):
    """Backward pass of a layer.

    Attributes:
        recomputed: Layers whose forward passes are computed again before it.
        gathered: Parameter that is in memory during the whole pass; None for none.
        steps: Steps of the pass.
    """

    recomputed: Sequence[Layer]
    gathered: Parameter | None
    steps: list[_BackwardStep]


class _Passes:
    """Bucket operations of the passes of a model part, in their order.

    Attributes:
        part: The model part.
        deferred_parameters: Parameters whose gradients a W action adds, by layer, the last layer first.
    """

    def __init__(self, part: ModelPart, recompute: Recomputed) -> None:
        self.part = part
        self._layers = list(_layer_backwards(part, recompute))
        self.deferred_parameters = [
            [p for _, added in layer.backward_order() for p in added if p in layer.deferred_parameters]
            for layer in reversed(part.layers)
        ]

    def forward(self, residency: ParameterResidency) -> None:
        """Rehearse the forward pass of all layers."""
        for layer in self.part.layers:
            _compute(layer, residency)

    def backward(self, residency: ParameterResidency, defers: bool) -> None:
        """Rehearse the backward pass of all layers.

        Args:
            residency: Parameters in memory.
            defers: True if the weight gradients of linear layers are deferred to a W action.
        """
        for recomputed, gathered_block, steps in self._layers:
            for layer in recomputed:
                _compute(layer, residency)
            with _in_memory(residency, gathered_block):
                for gathered, added, immediate in steps:
                    with _in_memory(residency, gathered):
                        add(immediate if defers else added)


def _layer_backwards(part: ModelPart, recompute: Recomputed) -> Iterator[_LayerBackward]:
    """Yield the layers that the backward pass reaches, the last one first."""
    blocks = blocks_of(part)
    size = segment_size(recompute, len(blocks))
    unreached = blocks_without_backward(part)
    reached = set(blocks[unreached // (size or 1) * (size or 1) :])
    for layer in reversed(part.layers):
        recomputed: Sequence[Layer] = ()
        if layer.is_block:
            if layer not in reached:
                continue
            number = blocks.index(layer)
            if size and number == min(number // size * size + size, len(blocks)) - 1:
                recomputed = blocks[number // size * size : number + 1]  # the forward pass of its segment
        elif layer is part.layers[0] and not embedding_trained(part):
            continue
        deferred = layer.deferred_parameters
        steps = [
            _BackwardStep(gathered, added, [p for p in added if p not in deferred])
            for gathered, added in layer.backward_order()
        ]
        yield _LayerBackward(recomputed, layer.gather_keys[0] if layer.is_block else None, steps)


def _compute(layer: Layer, residency: ParameterResidency, trained: bool = True) -> None:
    """Rehearse the forward pass of a layer."""
    with ExitStack() as gathered_block:
        for parameter in layer.gather_keys:
            with ExitStack() as gathered:
                gathered.enter_context(residency.in_memory(parameter))
                if trained and parameter in set(layer.added_in_forward):
                    assert not parameter.requires_grad or parameter.gradient is not None
                if layer.is_block and parameter is layer.gather_keys[0]:
                    gathered_block.push(gathered.pop_all())


def _in_memory(residency: ParameterResidency, parameter: Parameter | None) -> AbstractContextManager[None]:
    """Return a context in which a parameter is in memory. It does nothing for None."""
    return nullcontext() if parameter is None else residency.in_memory(parameter)


def add(parameters: Iterable[Parameter]) -> None:
    """Add once to each gradient."""
    for parameter in parameters:
        if parameter.requires_grad:
            assert parameter.lookup_gradients or parameter.gradient is not None
            parameter.mark_gradient_added()
