"""Engine of a run whose auxiliary models have ranks of their own, after a check of the predicted memory."""

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


def build_partition_within_memory(
    deck: Deck, placement: ModelPlacement, ready: Callable[[], None] = lambda: None
) -> tuple[Engine, MemoryPlan]:
    """Build the engine of the model that this rank has, if the predicted memory of the run fits. Collective.

    It is like `build_within_memory` for a run whose ranks are divided among several models.

    Args:
        deck: Deck of the run.
        placement: Model of this rank, and the ranks that share it.
        ready: Function that is called when the memory is known to fit.

    Returns:
        The engine, and the predicted memory of all ranks of the run.
    """
    world = placement.run_world
    if not placement.has_dedicated_ranks:
        return build_within_memory(deck, world, placement.mesh, ready)
    with placement.agreement():
        model_deck = choose_kernels(
            with_split(placement.deck, placement.deck.runtime_choices.split), placement.world, placement.mesh
        )
        spec = make_engine_spec(model_deck, placement.world, placement.mesh)
    communication = {"transport": placement.mesh.transport}
    planned = deck.with_keys(run={"device": world.device.type}, communication=communication)
    process_bytes = library_bytes() if on_host(world.device) else 0
    split = spec.placement.split, spec.schedule
    per_node, plan = world.topology.ranks_per_node, None
    assert deck.model.vocabulary is not None
    with world.agreement():
        if world.rank == 0:
            numbers = world.size, deck.model.vocabulary, process_bytes, per_node
            plan = plan_run_memory(planned.with_runtime_choices(model_deck.runtime_choices), *numbers, *split)
    plan = world.everyone.broadcast_object(plan)
    assert isinstance(plan, MemoryPlan)
    required_bytes = plan.stages[placement.stage].required_bytes
    remedy = "use more ranks in policy.critic_ranks or reference_ranks to reduce it"
    override = "--set machine.memory=SIZE overrides the limit"
    require_memory(world, deck.machine, deck.sources.name, required_bytes, lambda _: f"{remedy}; {override}")
    world.planned_bytes = required_bytes
    ready()
    with placement.agreement():
        engine = assemble(model_deck, placement.world, placement.mesh, spec, build=placement.stage_builder)
    return engine, plan
