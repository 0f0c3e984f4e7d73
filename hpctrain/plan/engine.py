"""An engine whose memory is planned before it is there, and refused where no node could have it."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.costs.layer_flops import model_flops
from hpctrain.deck.read import changed_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import assemble
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.choices.kernel_choice import choose_kernels
from hpctrain.engine.layout.engine_spec import make_engine_spec
from hpctrain.engine.layout.layer_placement import with_split
from hpctrain.host.device import on_host
from hpctrain.model.construction import architecture_of
from hpctrain.plan.companions import plan_run_memory
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory import MemoryPlan
from hpctrain.plan.room import Room, demand_room
from hpctrain.plan.savings import LEAST_SAVING, find_savings
from hpctrain.plan.words import largest_kinds
from hpctrain.text import either
from hpctrain.units import format_bytes

ADVISED = 3  # changes of the deck that are named where it does not fit, at most
ADVICE_SECONDS = 4.0  # after so long no other change is planned: all ranks wait to be refused


def build_within_memory(
    deck: Deck,
    world: World,
    mesh: Mesh,
    ready: Callable[[], None] = lambda: None,
) -> tuple[Engine, MemoryPlan]:
    """The engine of a deck, and the plan of its memory, which comes first. Collective.

    HpctrainError on all ranks, before anything large is allocated, where the plan needs more than a node
    has, or than the deck's [machine] says. `ready` is called when that is settled, before the engine makes
    any file; what was found for the deck stands in for what would be measured.
    """
    with world.agreement():
        # What building a module loads, and running it, counts as a library.
        model_flops(architecture_of(deck, deck.model.vocabulary or 0))
    deck = choose_kernels(with_split(deck, deck.runtime_choices.split), world, mesh)
    libraries = library_bytes() if on_host(world.device) else 0
    spec = make_engine_spec(deck, world, mesh)
    planned = deck.with_keys(run={"device": world.device.type}, communication={"transport": mesh.transport})
    assert deck.model.vocabulary is not None
    numbers = world.size, deck.model.vocabulary, libraries, world.topology.ranks_per_node
    plan = plan_run_memory(planned, *numbers, spec.placement.split, spec.schedule)
    here = plan.stages[mesh.coordinate("pipeline")].required_bytes

    def advice(room: Room) -> str:
        savings = find_savings(
            deck,
            plan,
            lambda change: changed_deck(planned, [change], world.size),
            lambda changed: plan_run_memory(changed.with_runtime_choices(deck.runtime_choices), *numbers),
            ADVICE_SECONDS,
        )
        ways = [f"--set {each.change} ({format_bytes(each.total)} per rank)" for each in savings[:ADVISED]]
        held = plan.largest.memory
        cut = held.parameter + held.gradient + held.optimizer > LEAST_SAVING * held.total
        if libraries < room.limit.bytes and (room.ranks > 1 or cut):
            ways.append("more nodes")
        less = f"to reduce it, use {either(ways)}; " if ways else ""
        key = "machine.memory" if on_host(world.device) else "machine.gpu_memory"
        return f"{largest_kinds(plan)}; {less}--set {key}=SIZE overrides the limit"

    demand_room(world, deck.machine, deck.sources.name, here, advice)
    world.planned_bytes = here
    ready()
    return assemble(deck, world, mesh, spec), plan
