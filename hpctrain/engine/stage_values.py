"""Values of the parameters of a stage: initialized from the seed, or loaded from a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.finite import nonfinite_sentence, nonfinite_weight
from hpctrain.checkpoint.load import load
from hpctrain.checkpoint.state_entries import model_entries, resumed_entries
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.engine.stages.stage import Stage, TrainedStage
from hpctrain.memory.scratch import fill_pieces
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import initialize_parts
from hpctrain.optim.optimizer import gather_updated


def initialize(
    world: World, architecture: Architecture, stage: TrainedStage, seed: int, noise_std: float
) -> None:
    """Fill this rank's fp32 master weights from the seed, then the parameters from them. Collective.

    Args:
        world: All ranks of the stage's engine.
        architecture: Architecture of the model.
        stage: Stage to initialize.
        seed: Seed of the random numbers, which depend on nothing else but names and positions.
        noise_std: As in `build_engine`; 0 in runs.
    """
    optimizer = stage.optimizer
    targets = (
        (segment.parameter, piece, offset + first)
        for bucket, master in zip(optimizer.buckets, optimizer.masters, strict=True)
        for segment, values, offset in bucket.owned_segments(master)
        if values.numel()
        for first, piece in fill_pieces(values)
    )
    with world.agreement():
        initialize_parts(architecture, stage.models, targets, seed, noise_std)
    optimizer.copy_to_parameters()


def load_parameters(path: Path, stage: Stage, everyone: Group) -> None:
    """Load the parameters of a stage that is not trained from a checkpoint. Collective over `everyone`.

    Weights that are not finite cause a warning in the log, so that such a model can still be examined. It
    raises what `checkpoint.load.load` raises.
    """
    structure = examine(path, everyone)
    module_entries, left = resumed_entries(stage.module_state.state(), structure.datasets)
    entries = [(entry, structure.datasets.get(entry.dataset)) for entry in model_entries(stage.buckets)]
    # The common weights of replicas are stored in fp32, even if parameters have another dtype.
    read = [
        replace(entry, values=torch.empty(entry.values.numel()))
        if stored is not None and stored.kind == "float32" and entry.kind != stored.kind
        else entry
        for entry, stored in entries
    ]
    load(structure, everyone, [*read, *module_entries], left=left)
    weight = nonfinite_weight(everyone, read)
    if weight is not None and everyone.rank == 0:
        sentence = nonfinite_sentence(path, weight, "the results of this model may be NaN or infinite")
        logging.getLogger("hpctrain").warning("%s", sentence)
    for (entry, _), each in zip(entries, read, strict=True):
        if each is not entry:
            assert isinstance(entry.values, torch.Tensor) and isinstance(each.values, torch.Tensor)
            entry.values.copy_(each.values)
    gather_updated(stage.buckets)
