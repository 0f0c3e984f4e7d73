"""An engine whose memory is planned before it is there, and refused where no node could have it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from hpctrain.comm.device import on_host
from hpctrain.comm.host_memory import available_bytes, resident_bytes, shared_bytes
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.read import deck_text, parse_deck
from hpctrain.deck.schema import Deck, Machine
from hpctrain.engine.build import Arrangement, Engine, arrange, assemble
from hpctrain.errors import HpctrainError
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory import MemoryPlan, plan_memory
from hpctrain.plan.room import Claim, Room, limits_of, tightest
from hpctrain.plan.savings import LEAST_SAVING, find_savings
from hpctrain.plan.words import largest_kinds
from hpctrain.units import format_bytes

ADVISED = 3
"""Changes of the deck that are named where it does not fit, at most."""

ADVICE_SECONDS = 4.0
"""After so long no other change is planned: all ranks wait to be refused."""


def build_within_memory(
    deck: Deck, world: World, mesh: Mesh, ready: Callable[[], None] = lambda: None
) -> tuple[Engine, MemoryPlan]:
    """The engine of a deck, and the plan of its memory, which comes first. Collective.

    HpctrainError on all ranks, before anything large is allocated, where the plan needs more than a node
    has, or than the deck's [machine] says. `ready` is called when that is settled, before the engine makes
    any file.
    """
    libraries = library_bytes() if on_host(world.device) else 0
    arrangement = arrange(deck, world, mesh)

    def planned(deck: Deck, arrangement: Arrangement | None = None) -> MemoryPlan:
        return plan_memory(
            deck,
            world.size,
            shape.vocabulary,
            libraries,
            max(1, world.size // world.nodes),
            None if arrangement is None else arrangement.placement.split,
            None if arrangement is None else arrangement.plan,
        )

    shape = arrangement.shape
    plan = planned(deck, arrangement)
    here = plan.stages[mesh.coordinate("pipeline")].memory.total

    def advice(found: Room) -> str:
        def changed(change: str) -> Deck:
            return parse_deck(deck_text(deck), [change], ranks=world.size)

        savings = find_savings(deck, plan, changed, planned, ADVICE_SECONDS)[:ADVISED]
        told = [f"--set {saving.change} ({format_bytes(saving.total)} a rank)" for saving in savings]
        held = plan.largest.memory
        cut = held.parameter + held.gradient + held.optimizer > LEAST_SAVING * held.total
        if libraries < found.limit.bytes and (found.ranks > 1 or cut):
            told.append("more nodes")
        *others, last = told or [""]
        less = (
            f"{', '.join([*others, f'or {last}' if others else last])} would need less, and " if told else ""
        )
        key = "machine.memory" if on_host(world.device) else "machine.gpu_memory"
        return f"{largest_kinds(plan)}; {less}--set {key}=SIZE overrules what is there"

    demand_room(world, deck.machine, deck.sources.name, here, advice)
    world.planned_bytes = here
    ready()
    return assemble(deck, world, mesh, arrangement), plan


def demand_room(
    world: World, machine: Machine, name: str, needed: int, advice: Callable[[Room], str]
) -> None:
    """HpctrainError on all ranks where those of some node need more than it has. Collective.

    `needed` are the bytes that this rank will hold in all; the error begins with `name` and ends with
    `advice` for the node that lacks most. Where there is as much, but others hold it at present, that is a
    warning.
    """
    on_cpu = on_host(world.device)
    shared = min(needed, shared_bytes()) if on_cpu else 0
    limits = limits_of(machine, world.device, os.environ)
    claim = Claim(world.node, world.hostname, needed, shared, limits)
    claims = world.everyone.all_gather_object(claim)
    room = tightest(claims)
    with world.agreement():
        if room is not None and not room.fits and world.rank == 0:
            raise HpctrainError(f"{name}: does not fit into memory: {room}; {advice(room)}")
    if not on_cpu or machine.memory is not None:
        return
    more = max(0, needed - resident_bytes())
    found = world.everyone.all_gather_object((world.node, world.hostname, more, available_bytes()))
    if world.rank == 0:
        for node in sorted({node for node, _, _, _ in found}):
            of_node = [each for each in found if each[0] == node]
            wanted = sum(each[2] for each in of_node)
            free = of_node[0][3]
            if free is not None and wanted > free:
                logging.getLogger("hpctrain").warning(
                    "%s has only %s of its memory free, of which its ranks will need %s",
                    of_node[0][1],
                    format_bytes(free),
                    format_bytes(wanted),
                )
