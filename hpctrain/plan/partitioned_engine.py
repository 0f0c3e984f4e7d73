"""An engine within planned memory, of a run whose models may have ranks of their own."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.deck.schema import Deck
from hpctrain.engine.build import assemble
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.choices.kernel_choice import choose_kernels
from hpctrain.engine.layout.engine_spec import make_engine_spec
from hpctrain.engine.layout.layer_placement import with_split
from hpctrain.engine.layout.model_placement import ModelPlacement
from hpctrain.host.device import on_host
from hpctrain.plan.auxiliary_memory import plan_run_memory
from hpctrain.plan.engine import build_within_memory
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory_demand import require_memory
from hpctrain.plan.memory_plan import MemoryPlan


def build_seat_within_memory(
    deck: Deck, seat: ModelPlacement, ready: Callable[[], None] = lambda: None
) -> tuple[Engine, MemoryPlan]:
    """As `build_within_memory`, the engine of this rank's seat, and the plan of all ranks. Collective."""
    world = seat.run_world
    if not seat.has_dedicated_ranks:
        return build_within_memory(deck, world, seat.mesh, ready)
    with seat.agreement():
        own = choose_kernels(with_split(seat.deck, seat.deck.runtime_choices.split), seat.world, seat.mesh)
        spec = make_engine_spec(own, seat.world, seat.mesh)
    carried = {"transport": seat.mesh.transport}
    planned = deck.with_keys(run={"device": world.device.type}, communication=carried)
    libraries = library_bytes() if on_host(world.device) else 0
    placed = spec.placement.split, spec.schedule
    per_node, plan = world.topology.ranks_per_node, None
    assert deck.model.vocabulary is not None
    with world.agreement():
        if world.rank == 0:
            numbers = world.size, deck.model.vocabulary, libraries, per_node
            plan = plan_run_memory(planned.with_runtime_choices(own.runtime_choices), *numbers, *placed)
    plan = world.everyone.broadcast_object(plan)
    assert isinstance(plan, MemoryPlan)
    here = plan.stages[seat.stage].required_bytes
    more = "use more ranks in policy.critic_ranks or reference_ranks to reduce it"
    overruled = "--set machine.memory=SIZE overrides the limit"
    require_memory(world, deck.machine, deck.sources.name, here, lambda _: f"{more}; {overruled}")
    world.planned_bytes = here
    ready()
    with seat.agreement():
        engine = assemble(own, seat.world, seat.mesh, spec, build=seat.stage_builder)
    return engine, plan
