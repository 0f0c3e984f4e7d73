"""Mirrors in a run: when they are made, and on which nodes a run can have any."""

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
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.control import StepDecision
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.mirror_recovery import forget_mirrors
from hpctrain.train.step import TrainState
from hpctrain.units import format_bytes


class Mirrors(Hook):
    """Has a run's state mirrored every `checkpoint.mirror_every` steps."""

    def __init__(self, deck: Deck, world: World, checkpoints: Checkpoints, state: TrainState) -> None:
        """Collective. HpctrainError on all ranks where a node has no room for mirrors."""
        self.deck, self.world, self.checkpoints = deck, world, checkpoints
        self.folder = Path(deck.run.dir)
        self.seconds = 0.0
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
        """Copy first what the mirror still needs of what forward and backward change."""
        with self._timed():
            self.mirror.protect(update=False)
        yield

    def before_update(self) -> None:
        """Copy first what the mirror still needs of parameters and moments."""
        with self._timed():
            self.mirror.protect()

    def after_step(self, done: StepDone) -> None:
        """Go on with the mirror that is being made, and begin another one where it is time."""
        every, step = self.deck.checkpoint.mirror_every, done.state.step
        with self._timed():
            self.mirror.advance()
            if step % every == 0 and step < self.deck.run.steps:
                entries = training_entries(self.checkpoints.engine.state(), writing=True)
                # In half of the steps up to the next one: to be there soon, and no step carries it all.
                rounds = max(1, every // 2)
                self.mirror.begin(entries, self.checkpoints.stored(done.state), step, rounds)

    def before_rollback(self) -> None:
        """What was mirrored is of steps that are given up."""
        self.mirror.invalidate()

    def at_end(self, order: StepDecision) -> None:  # noqa: ARG002
        """The disk has all: nothing stays in memory."""
        self.mirror.close()
        forget_mirrors(self.world, self.folder)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        ledger = self.world.ledger
        phase, ledger.phase = ledger.phase, "checkpoint"
        try:
            yield
        finally:
            ledger.phase = phase


def begin_mirrors(deck: Deck, world: World, checkpoints: Checkpoints, state: TrainState) -> list[Hook]:
    """The hook that has a run mirrored, if its deck says so and there is a neighbour node; what this run, or
    others that are no more, had mirrored before is deleted. Collective, once the run's folder is its own.
    """
    log = logging.getLogger("hpctrain")
    forget_mirrors(world, Path(deck.run.dir))
    # One rank of each node, since one would find what another one is deleting.
    swept = world.everyone.all_gather_object(sweep_mirrors() if world.local_rank == 0 else [])
    if removed := [name for names in swept for name in names]:
        log.info("removed in-memory mirrors of ended runs: %s", ", ".join(removed))
    if not deck.checkpoint.mirror or deck.communication.server is not None:
        return []
    if len(set(nodes_of(world, deck))) == 1:
        log.warning("checkpoint.mirror has no effect: no neighbour node is left")
        return []
    mirrors = Mirrors(deck, world, checkpoints, state)
    held = format_bytes(max(world.everyone.all_gather_object(mirrors.mirror.bytes)))
    every = counted(deck.checkpoint.mirror_every, "step")
    log.info("state is mirrored every %s in the memory of neighbour nodes, %s per rank", every, held)
    return [mirrors]


def require_neighbour(world: World, deck: Deck) -> None:
    """HpctrainError on all ranks where a run is to be mirrored that has all of its ranks on one node."""
    with world.agreement():
        if deck.checkpoint.mirror and len(set(nodes_of(world, deck))) == 1:
            sentence = (
                f"requires at least two nodes, not {counted(world.size, 'rank')} on one "
                "(use more nodes, or leave it out)"
            )
            raise HpctrainError(deck.problem("checkpoint.mirror", sentence))


def nodes_of(world: World, deck: Deck) -> tuple[int, ...]:
    """The node of every rank, as the deck has it emulated."""
    topology = Topology(world.topology.machine_nodes)
    topology.emulate(deck.communication.ranks_per_node)
    return topology.nodes
