"""Model that a rank holds, if models of a run have dedicated ranks (`deck/sections/rank_partition.py`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from hpctrain.comm.mesh import Mesh, sizes_text
from hpctrain.comm.world import World
from hpctrain.deck.check import check_world
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.rank_partition import RankPartition, without_dedicated_ranks
from hpctrain.engine.layout.run_mesh import configure_communication, make_mesh
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.engine.stages.inference_stage import build_inference_stage
from hpctrain.engine.stages.stage import StageBuilder, StageSetup, TrainedStage, build_trained_stage
from hpctrain.text import counted

Value = TypeVar("Value")


@dataclass(frozen=True)
class ModelPlacement:
    """Model that this rank holds in a run, and the ranks with which it trains or evaluates that model.

    A run with dedicated ranks has two worlds: the ranks of the policy, and all other ranks, whose engine has
    no model parts. All ranks of a run without them are in one world.

    Attributes:
        run_world: All ranks of the run.
        partition: Ranks of each model.
        deck: Deck of this rank's engine.
        world: Ranks of this rank's engine.
        mesh: Arrangement of these ranks.
        stages: Number of pipeline stages of the policy.
        idle: True if this rank's engine has no model parts.
    """

    run_world: World
    partition: RankPartition
    deck: Deck
    world: World
    mesh: Mesh
    stages: int
    idle: bool = False

    @property
    def has_dedicated_ranks(self) -> bool:
        """True if some models have ranks of their own."""
        return bool(self.partition.dedicated)

    @property
    def stage_builder(self) -> StageBuilder:
        """Function that builds this rank's stage."""
        return _build_no_parts if self.idle else build_trained_stage

    @property
    def stage(self) -> int:
        """Number of this rank's stage in a plan, in which the policy's stages come first."""
        index = self.partition.rank_set_index(self.run_world.rank)
        return self.stages + index - 1 if index else self.mesh.coordinate("pipeline")

    def world_of(self, model: str) -> World | None:
        """Return the ranks that hold a model, or None if this rank does not. Collective over the run."""
        if model not in self.partition.dedicated:
            return None if self.idle else self.world
        ranks = self.partition.dedicated[model]
        is_member = self.run_world.rank in ranks
        part = self.run_world.subworld(
            ranks if is_member else [rank for rank in range(self.run_world.size) if rank not in ranks]
        )
        return part if is_member else None

    def agreement(self) -> AbstractContextManager[None]:
        """Return a context that raises an error of one world on all ranks of the run."""
        return self.run_world.agreement() if self.has_dedicated_ranks else nullcontext()

    def broadcast_from(self, model: str, value: Value) -> Value:
        """Send a value from the first rank that holds a model to all ranks, and return it. Collective.

        Args:
            model: Name of the model.
            value: The value. It is ignored on ranks that do not hold the model.
        """
        if not self.has_dedicated_ranks:
            return value
        received: Value = self.run_world.everyone.broadcast_object(value, self.partition.of_model(model)[0])
        return received

    @property
    def description(self) -> str:
        """Number of ranks of each model, for the log."""
        text = f"{counted(self.run_world.size, 'rank')} ({sizes_text(self.mesh.sizes)}"
        further = [
            f"{' and '.join(each.models)} on {counted(len(each.ranks), 'other')}"
            for each in self.partition.rank_sets[1:]
        ]
        return f"{'; '.join([text, *further])})"


def place_models(deck: Deck, world: World) -> ModelPlacement:
    """Return this rank's place in a run. Collective over all ranks.

    Raises:
        HpctrainError: On all ranks if the deck does not fit the ranks.
    """
    partition, stages = RankPartition.of(deck, world.size), deck.layout.pipeline
    if not partition.dedicated:
        return ModelPlacement(world, partition, deck, world, make_mesh(deck, world), stages)
    with world.agreement():
        check_world(deck, world.size)
    transport, idle = configure_communication(deck, world), world.rank in partition.other_ranks
    part = world.subworld(partition.other_ranks if idle else partition.policy)
    engine_deck = without_dedicated_ranks(deck)
    if idle:
        stability = {"check_parameters": False}
        engine_deck = on_one_rank(engine_deck).with_keys(memory={"activations": "keep"}, stability=stability)
    with world.agreement():
        # The batch does not matter on ranks without model parts.
        sizes = {"data": part.size} if idle else axis_sizes(engine_deck, part.size)
    return ModelPlacement(world, partition, engine_deck, part, Mesh(part, sizes, transport), stages, idle)


def _build_no_parts(deck: Deck, setup: StageSetup) -> TrainedStage:
    """Build the stage of a rank whose engine has no model parts. It is a StageBuilder."""
    return build_inference_stage(deck, replace(setup, models=[]))
