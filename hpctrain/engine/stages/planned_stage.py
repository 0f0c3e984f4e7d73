"""Construction of a pipeline stage without memory, on torch's device "meta", for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hpctrain.comm.planned import META, PlannedMesh
from hpctrain.costs.bucket_bytes import value_bytes
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.engine.choices.function_choice import with_planned_functions
from hpctrain.engine.choices.offload_allocators import planned_offload
from hpctrain.engine.stages.stage import StageBuilder, StageSetup, TrainedStage, build_trained_stage
from hpctrain.engine.stages.zero_groups import make_replications
from hpctrain.memory.recompute import Recompute
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import build_parts
from hpctrain.model.parameters.frozen import freeze_parameters
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.split import layer_ranges


class PipelinePosition(NamedTuple):
    """Stage of a pipeline.

    Attributes:
        schedule: Pipeline schedule.
        split: Number of blocks of each pipeline part.
        number: Number of the stage.
    """

    schedule: Schedule
    split: Sequence[int]
    number: int


def plan_stage(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    position: PipelinePosition,
    device: torch.device,
    build: StageBuilder = build_trained_stage,
) -> TrainedStage:
    """Return a stage as its first rank along all other axes builds it, but without memory. Local.

    The other ranks of the stage hold the same amount, because of padding. Tensors that a run has on its
    device are on torch's device "meta".

    Args:
        deck: The deck.
        architecture: Architecture of the model.
        mesh: Planned mesh, at the first rank of the stage.
        position: Stage of the pipeline.
        device: Device of the run.
        build: Function that builds the stage.
    """
    layer_context = make_layer_context(
        with_planned_functions(deck), mesh, Recompute(deck.memory.recompute), device
    )
    with META:
        models = build_parts(architecture, layer_context, layer_ranges(*position))
        freeze_parameters(models, deck.model.frozen)
        replications = make_replications(deck, mesh)
        return build(deck, StageSetup(layer_context, models, replications, device, planned_offload(deck)))


def offloaded_bytes(deck: Deck, stage: TrainedStage) -> dict[str, int]:
    """Return the bytes of a planned stage that are kept outside the device: "optimizer" and "parameters"."""
    state = (
        flat.nbytes
        for bucket, state in zip(stage.buckets, stage.optimizer.states, strict=True)
        for flat in state.values()
        if flat is not bucket.owned_values
    )
    return {
        "optimizer": sum(state) if deck.memory.optimizer != "device" else 0,
        "parameters": value_bytes(stage.buckets) if deck.memory.parameters != "device" else 0,
    }
