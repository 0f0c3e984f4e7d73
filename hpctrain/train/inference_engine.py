"""Engines for inference, with parameters on any layout but without gradients and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.machine import Machine
from hpctrain.engine.build import assemble
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.layout.engine_spec import make_engine_spec
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.engine.stage_values import load_parameters
from hpctrain.engine.stages.inference_stage import build_inference_stage, build_initial_stage
from hpctrain.engine.stages.stage import StageBuilder
from hpctrain.host.memory import resident_bytes
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import bare_model
from hpctrain.model.part import parameter_list
from hpctrain.model.precision import Precision
from hpctrain.optim.optimizer import IdleOptimizer
from hpctrain.plan.memory_demand import require_memory
from hpctrain.train.corpus_comparison import require_same_source
from hpctrain.train.start import start_from_source


def load_inference_engine(path: Path, deck: Deck, world: World) -> Engine:
    """Build the model of a checkpoint for inference, and load its weights. Collective.

    Args:
        path: The checkpoint.
        deck: Deck of the checkpoint with the final size of the vocabulary.
        world: All ranks.

    Raises:
        HpctrainError: The ranks have too little memory for the model, or the checkpoint cannot be loaded, as
            in `checkpoint.load.load`. Raised on all ranks.
    """
    world.ledger.activity = "loading the model"
    size = Precision.of(deck).storage.itemsize
    engine = _assemble_within_memory(path, deck, world, size, build_inference_stage)
    load_parameters(path, engine.stage, world.everyone)
    return engine


def initial_engine(path: Path, state: Mapping[str, Any], deck: Deck, world: World) -> Engine:
    """Build the model that the run of a checkpoint started from. Collective.

    The weights are those of `model.from`, or initialized from `run.seed`.

    Args:
        path: The checkpoint, for error messages.
        state: Its state.
        deck: Deck of the checkpoint with a known vocabulary.
        world: The ranks that share the model.

    Raises:
        InputOutputError: `model.from` is missing, or has changed since the run started.
        HpctrainError: The ranks have too little memory, or `start_from_source` fails.
    """
    world.ledger.activity = "building the model that the run started from"
    purpose = "its preferences are compared with the model that its run started from"
    require_same_source(world, deck, state, path, purpose)
    storage = Precision.of(deck).storage
    size = storage.itemsize + (0 if storage == torch.float32 else torch.float32.itemsize)
    engine = _assemble_within_memory(path, deck, world, size, build_initial_stage)
    if deck.model.source is not None:
        start_from_source(deck, engine)
    engine.stage.optimizer = IdleOptimizer()
    return engine


def _assemble_within_memory(path: Path, deck: Deck, world: World, size: int, build: StageBuilder) -> Engine:
    """Assemble an engine if the nodes have the memory, `size` bytes for each parameter. Collective."""
    mesh = make_mesh(deck, world)
    spec = make_engine_spec(deck, world, mesh)
    parameter_bytes = _elements(spec.architecture, deck, mesh) * size
    require_memory(
        world,
        Machine(),
        str(path),
        resident_bytes() + parameter_bytes,
        lambda _: "use more nodes to share the model",
    )
    return assemble(deck, world, mesh, spec, build=build)


def _elements(architecture: Architecture, deck: Deck, mesh: Mesh) -> int:
    """Return the approximate number of parameters on each rank."""
    total = 0.0
    for parameter in parameter_list(bare_model(architecture)):
        shard = parameter.shard
        axes = ["pipeline", *shard.split]
        if deck.layout.zero == 3:
            axes += ["expert_data"] if "expert" in shard.split else ["data", "context"]
        total += prod(shard.shape) / prod(map(mesh.size, axes))
    return round(total)
