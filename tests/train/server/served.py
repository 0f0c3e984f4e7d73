"""Trainers with servers for tests, on random tokens: of small models, on parts of the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import assemble
from hpctrain.engine.layout.engine_spec import make_engine_spec
from hpctrain.engine.layout.server_roles import ServerRoles
from hpctrain.train.layout_verification import NOISE_STD
from hpctrain.train.server.server_trainer import ServedTrainer
from hpctrain.train.step import StepResult
from tests.engines import small_deck, trainer

UNTIED = ("model.tied=false",)


def served_deck(mode: str, servers: int = 1, *overrides: str) -> Deck:
    """The small deck with servers, of 12 sequences a step, which two and three workers share."""
    keys = (
        f"communication.server.mode={mode}",
        f"communication.server.ranks={servers}",
        "batch.global_size=12",
    )
    return small_deck(*keys, *overrides)


def served(world: World, deck: Deck, masked: float = 0.2) -> ServedTrainer:
    """A trainer with servers on all ranks of the world."""
    roles = ServerRoles.of(deck, world.size)
    own, part, mesh = roles.split_world(deck, world)
    spec = make_engine_spec(own, part, mesh)
    engine = assemble(own, part, mesh, spec, NOISE_STD, roles.stage_builder(world.rank))
    source = SyntheticSource(deck.batch.sequence, deck.model.vocabulary or 0, masked=masked)
    return ServedTrainer(deck, world, engine, Batches(source, 1))


def plain(deck: Deck) -> Deck:
    """The same deck without servers."""
    return deck.with_keys(communication={"server": None})


def values(training: ServedTrainer) -> dict[str, Tensor]:
    """All parameters, as the servers have them, on all ranks. Collective."""
    if training.server is not None:
        training.server.serve_all()
    elif training.worker is not None:
        training.worker.pull(training.state.step)
        training.mailbox.wait_for_sends()
    here = training.worker._parameters if training.worker is not None else {}
    world = training.world
    root = training.roles.servers
    shapes = world.everyone.broadcast_object({name: list(p.shape) for name, p in here.items()}, root)
    gathered: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        own = here[name].detach().float().contiguous() if name in here else torch.empty(shape)
        gathered[name] = world.everyone.broadcast(own.clone(), root)
    return gathered


def by_itself(world: World, deck: Deck, steps: int) -> tuple[list[StepResult], dict[str, Tensor]]:
    """Steps and parameters of plain data parallel training on all ranks of a world."""
    training = trainer(world, plain(deck))
    results = training.train(steps)
    return results, {name: each.float().clone() for name, each in training.parameters().items()}


def part_of(world: World, size: int) -> World | None:
    """The first `size` ranks; None on the others. Collective."""
    mine = range(size) if world.rank < size else range(size, world.size)
    part = world.subworld(mine)
    return part if world.rank < size else None
