"""Mirrors of a run: copies of its state in the memory of neighbour nodes, made while it trains."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.checkpoint.memory_mirror import Mirror
from hpctrain.checkpoint.mirror_folder import sweep_mirrors, write_token
from hpctrain.checkpoint.state_entries import training_entries
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.host.topology import Topology
from hpctrain.text import counted
from hpctrain.train.checkpoints import Checkpoints, checkpoint_phase
from hpctrain.train.control import StepDecision
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.mirror_recovery import forget_mirrors
from hpctrain.train.step import TrainState
from hpctrain.units import format_bytes


class Mirrors(Hook):
    """Hook that mirrors the state of a run every `checkpoint.mirror_every` steps. Collective."""

    def __init__(self, deck: Deck, world: World, checkpoints: Checkpoints, state: TrainState) -> None:
        self.deck, self.world, self.checkpoints = deck, world, checkpoints
        self.folder = Path(deck.run.dir)
        entries = training_entries(checkpoints.engine.state(), writing=True)
        self.mirror = Mirror(
            world,
            nodes_of(world, deck),
            self.folder,
            entries,
            checkpoints.stored(state),
            lambda token: write_token(self.folder, token),
        )

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:  # noqa: ARG002
        """Copy what an unfinished mirror needs of the state that the passes of the step change."""
        with checkpoint_phase(self.world.ledger):
            self.mirror.protect(update=False)
        yield

    def before_update(self) -> None:
        """Copy what an unfinished mirror needs of the parameters and the optimizer state."""
        with checkpoint_phase(self.world.ledger):
            self.mirror.protect()

    def after_step(self, done: StepDone) -> None:
        """Continue an unfinished mirror, and start another one if it is due."""
        every, step = self.deck.checkpoint.mirror_every, done.state.step
        with checkpoint_phase(self.world.ledger):
            self.mirror.advance()
            if step % every == 0 and step < self.deck.run.steps:
                entries = training_entries(self.checkpoints.engine.state(), writing=True)
                # Spread over half of the steps up to the next mirror, so that no step copies everything.
                rounds = max(1, every // 2)
                self.mirror.begin(entries, self.checkpoints.stored(done.state), step, rounds)

    def before_rollback(self) -> None:
        """Discard mirrors, since they may be of steps that the run gives up."""
        self.mirror.invalidate()

    def at_end(self, decision: StepDecision) -> None:  # noqa: ARG002
        """Delete the mirrors, since the state is on disk."""
        self.mirror.close()
        forget_mirrors(self.world, self.folder)


def start_mirrors(deck: Deck, world: World, checkpoints: Checkpoints, state: TrainState) -> list[Hook]:
    """Return the hook that mirrors a run, if its deck asks for it and there is a neighbour node. Collective.

    Earlier mirrors of this run, and those of ended runs, are deleted. The run folder must be locked.
    """
    log = logging.getLogger("hpctrain")
    forget_mirrors(world, Path(deck.run.dir))
    # One rank of each node, since other ranks would find files that it is deleting.
    removed_by_ranks = world.everyone.all_gather_object(sweep_mirrors() if world.local_rank == 0 else [])
    if removed := [name for names in removed_by_ranks for name in names]:
        log.info("removed in-memory mirrors of ended runs: %s", ", ".join(removed))
    if not deck.checkpoint.mirror or deck.communication.server is not None:
        return []
    if len(set(nodes_of(world, deck))) == 1:
        log.warning("checkpoint.mirror has no effect: no neighbour node is left")
        return []
    mirrors = Mirrors(deck, world, checkpoints, state)
    size = format_bytes(max(world.everyone.all_gather_object(mirrors.mirror.bytes)))
    every = counted(deck.checkpoint.mirror_every, "step")
    log.info("state is mirrored every %s in the memory of neighbour nodes, %s per rank", every, size)
    return [mirrors]


def require_neighbour(world: World, deck: Deck) -> None:
    """Raise HpctrainError on all ranks if a run must be mirrored, but has only one node. Collective."""
    with world.agreement():
        if deck.checkpoint.mirror and len(set(nodes_of(world, deck))) == 1:
            sentence = (
                f"requires at least two nodes, not {counted(world.size, 'rank')} on one "
                "(use more nodes, or leave it out)"
            )
            raise HpctrainError(deck.problem("checkpoint.mirror", sentence))


def nodes_of(world: World, deck: Deck) -> tuple[int, ...]:
    """Return the node of every rank, as emulated by the deck."""
    topology = Topology(world.topology.machine_nodes)
    topology.emulate(deck.communication.ranks_per_node)
    return topology.nodes
