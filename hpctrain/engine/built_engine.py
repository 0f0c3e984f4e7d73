"""Engine: everything that computes a model on one mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.engine.layout.layer_placement import LayerPlacement
from hpctrain.engine.stages.stage import TrainedStage
from hpctrain.engine.update_control import UpdateControl
from hpctrain.memory.scratch import ScratchFiles
from hpctrain.model.architecture import Architecture
from hpctrain.model.count import count
from hpctrain.model.part import ModelPart
from hpctrain.model.shape import ModelShape
from hpctrain.objective.objective import Objective
from hpctrain.pipeline.action import Schedule
from hpctrain.sharding.state import StateTensor


@dataclass
class Engine:
    """Everything that computes a model on one mesh.

    Attributes:
        world: All ranks of the engine.
        mesh: Arrangement of these ranks.
        architecture: Architecture of the model.
        stage: Model parts of this rank, with their gradients and optimizer.
        objective: Losses and metrics.
        control: Learning rate, loss scale, noise scale and loss spikes.
        placement: Number of blocks of each pipeline part.
        schedule: Pipeline schedule of the deck's batch.
        positions: Positions of this rank's tokens in a sequence, on the device.
        offload_description: Description of memory outside the device, for the log.
        scratch: Files of this rank with offloaded state, parameters and activations.
        auxiliary_engines: Engines of models that are trained in the same run, such as a critic, by name.
    """

    world: World
    mesh: Mesh
    architecture: Architecture
    stage: TrainedStage
    objective: Objective
    control: UpdateControl
    placement: LayerPlacement
    schedule: Schedule
    positions: torch.Tensor
    offload_description: str
    scratch: Sequence[ScratchFiles]
    auxiliary_engines: dict[str, Engine] = field(default_factory=dict)

    def state(self) -> Iterator[StateTensor]:
        """Yield all state. Tensors of an auxiliary engine have its name as a prefix."""
        yield from self.stage.state()
        for name, engine in self.auxiliary_engines.items():
            for each in engine.state():
                yield replace(each, shard=replace(each.shard, name=f"{name}.{each.shard.name}"))

    @property
    def shape(self) -> ModelShape:
        """Sizes of the transformer. A user's module has none, so an AssertionError is raised for it."""
        assert isinstance(self.architecture, ModelShape)
        return self.architecture

    @property
    def model(self) -> ModelPart:
        """First model part of this stage, which is the whole model if there is one stage with one chunk."""
        return self.stage.models[0]

    @property
    def auxiliary_loss_names(self) -> tuple[str, ...]:
        """Names of the auxiliary losses that layers add."""
        return count(self.architecture).auxiliary_loss_names

    def close(self) -> None:
        """Remove the files of offloaded tensors. Nothing can be computed afterwards. Local."""
        for engine in self.auxiliary_engines.values():
            engine.close()
        for scratch in self.scratch:
            scratch.close()
