"""A step of a stage that is planned: the run's own objects, in memory that is not there.

A rehearsal of a step finds what memory buckets take turns in.
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
    """One step of a stage by its number, as far as buckets are concerned.

    Parameters are gathered and gradients opened, summed and closed in the order in which layers do so.
    """
    passes = [_Passes(model, recompute) for model in stage.models]
    stage.synchronizer.start(schedule.micro_batches)
    with stage.residency.step("plan"):
        for action in schedule.stages[number]:
            of_chunk = passes[action.chunk]
            if action.kind == "F":
                of_chunk.forward(stage.residency)
            elif action.kind == "W":
                for late in of_chunk.deferred_parameters:
                    add(late)
            else:
                of_chunk.backward(stage.residency, action.kind == "I")
        stage.synchronizer.finish()


def rehearse_forward(stage: TrainedStage, schedule: Schedule, number: int) -> None:
    """The forward passes of a step alone, of a stage that is not trained."""
    with stage.residency.step("plan"):
        for action in schedule.stages[number]:
            if action.kind == "F":
                for layer in stage.models[action.chunk].layers:
                    _compute(layer, stage.residency, trained=False)


class _Step(NamedTuple):
    """Of a layer's backward: the parameter that is held meanwhile, those that are added, and those of them
    that do not wait for their W.
    """

    held: Parameter | None
    added: list[Parameter]
    at_once: list[Parameter]


class _Layer(NamedTuple):
    """A layer as backward meets it: the layers whose forward passes it computes again, and its steps."""

    again: Sequence[Layer]
    throughout: Parameter | None
    steps: list[_Step]


class _Passes:
    """What the passes of a part ask of buckets, in their order; found once."""

    def __init__(self, part: ModelPart, recompute: Recomputed) -> None:
        self.part = part
        self._layers = list(_met(part, recompute))
        self.deferred_parameters = [
            [p for _, added in layer.backward_order() for p in added if p in layer.deferred_parameters]
            for layer in reversed(part.layers)
        ]

    def forward(self, residency: ParameterResidency) -> None:
        """All layers."""
        for layer in self.part.layers:
            _compute(layer, residency)

    def backward(self, residency: ParameterResidency, waiting: bool) -> None:
        """The layers, the last one first; with `waiting` the linear layers of blocks wait for their W."""
        for again, throughout, steps in self._layers:
            for other in again:
                _compute(other, residency)
            with _there(residency, throughout):
                for held, added, at_once in steps:
                    with _there(residency, held):
                        add(at_once if waiting else added)


def _met(part: ModelPart, recompute: Recomputed) -> Iterator[_Layer]:
    """The layers that backward comes to, in its order."""
    blocks = blocks_of(part)
    size = segment_size(recompute, len(blocks))
    silent = blocks_without_backward(part)
    seen = set(blocks[silent // (size or 1) * (size or 1) :])
    for layer in reversed(part.layers):
        again: Sequence[Layer] = ()
        if layer.is_block:
            if layer not in seen:
                continue
            number = blocks.index(layer)
            if size and number == min(number // size * size + size, len(blocks)) - 1:
                again = blocks[number // size * size : number + 1]  # the forward pass of its segment
        elif layer is part.layers[0] and not embedding_trained(part):
            continue
        late = layer.deferred_parameters
        steps = [
            _Step(held, added, [p for p in added if p not in late]) for held, added in layer.backward_order()
        ]
        yield _Layer(again, layer.gather_keys[0] if layer.is_block else None, steps)


def _compute(layer: Layer, residency: ParameterResidency, trained: bool = True) -> None:
    """The forward pass of a layer."""
    with ExitStack() as throughout:
        for parameter in layer.gather_keys:
            with ExitStack() as held:
                held.enter_context(residency.in_memory(parameter))
                if trained and parameter in set(layer.added_in_forward):
                    assert not parameter.requires_grad or parameter.gradient is not None
                if layer.is_block and parameter is layer.gather_keys[0]:
                    throughout.push(held.pop_all())


def _there(residency: ParameterResidency, parameter: Parameter | None) -> AbstractContextManager[None]:
    """The parameter is there within, if any is named."""
    return nullcontext() if parameter is None else residency.in_memory(parameter)


def add(parameters: Iterable[Parameter]) -> None:
    """One addition to each gradient."""
    for parameter in parameters:
        if parameter.requires_grad:
            assert parameter.lookup_gradients or parameter.gradient is not None
            parameter.mark_gradient_added()
