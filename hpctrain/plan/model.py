"""A step of a stage that is planned: the run's own objects, in memory that is not there.

A rehearsal of a step finds what memory buckets take turns in.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from hpctrain.comm.planned import META
from hpctrain.engine.stage import TrainedStage
from hpctrain.memory.recompute import segment_size
from hpctrain.model.frozen import embedding_trained, silent_blocks
from hpctrain.model.part import Layer, Part, blocks_of
from hpctrain.model.shape import Recomputed
from hpctrain.parallel.residency import Residency
from hpctrain.parallel.shard import Parameter
from hpctrain.pipeline.action import Schedule


def rehearse(
    stage: TrainedStage,
    recompute: Recomputed,
    schedule: Schedule,
    number: int,
    device: torch.device = META,
) -> None:
    """One step of a stage by its number, as far as buckets are concerned.

    Parameters are gathered and gradients opened, summed and closed in the order in which layers do so. The
    stage lies on `device`.
    """
    stage.synchronizer.start(schedule.micro_batches)
    with device, stage.residency.step("plan"):
        for action in schedule.stages[number]:
            model = stage.models[action.chunk]
            if action.kind == "F":
                _forward(model, stage.residency)
            elif action.kind == "W":
                for layer in reversed(model.layers):
                    late = layer.late
                    _add(p for _, added in layer.backward_order() for p in added if p in late)
            else:
                _backward(model, stage.residency, recompute, action.kind == "I")
        stage.synchronizer.finish()


def _forward(part: Part, residency: Residency) -> None:
    for layer in part.layers:
        _compute(layer, residency)


def _compute(layer: Layer, residency: Residency) -> None:
    """The forward pass of a layer."""
    with ExitStack() as throughout:
        for parameter in layer.held:
            with ExitStack() as held:
                held.enter_context(residency.held(parameter))
                if parameter in set(layer.added_in_forward):
                    assert not parameter.requires_grad or parameter.gradient is not None
                if layer.is_block and parameter is layer.held[0]:
                    throughout.push(held.pop_all())


def _backward(part: Part, residency: Residency, recompute: Recomputed, waiting: bool) -> None:
    """The layers, the last one first; with `waiting` the linear layers of blocks wait for their W."""
    blocks = blocks_of(part)
    size = segment_size(recompute, len(blocks))
    silent = silent_blocks(part)
    seen = blocks[silent // (size or 1) * (size or 1) :]
    for layer in reversed(part.layers):
        if layer.is_block:
            if layer not in seen:
                continue
            number = blocks.index(layer)
            last = min(number // size * size + size, len(blocks)) - 1 if size else -1
            if number == last:  # the forward pass of its segment again
                for other in blocks[number // size * size : number + 1]:
                    _compute(other, residency)
        elif layer is part.layers[0] and not embedding_trained(part):
            continue
        late = layer.late if waiting else set()
        with _there(residency, layer.held[0] if layer.is_block else None):
            for held, added in layer.backward_order():
                with _there(residency, held):
                    _add(p for p in added if p not in late)


def _there(residency: Residency, parameter: Parameter | None) -> AbstractContextManager[None]:
    """The parameter is there within, if any is named."""
    return nullcontext() if parameter is None else residency.held(parameter)


def _add(parameters: Iterable[Parameter]) -> None:
    """One addition to each gradient."""
    for parameter in parameters:
        if parameter.requires_grad:
            assert parameter.lookups is not None or parameter.gradient is not None
            parameter.added()
