"""Construction of an engine after a check that its predicted memory fits into the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

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
from hpctrain.plan.auxiliary_memory import plan_run_memory
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory_demand import MemoryDemand, require_memory
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.plan_text import largest_kinds
from hpctrain.plan.savings import LEAST_SAVING, MemorySaving, find_savings
from hpctrain.text import either
from hpctrain.units import format_bytes

MAX_ADVISED_CHANGES = 3
"""Largest number of changes of a deck that the error message names if the deck does not fit."""

ADVICE_SECONDS = 4.0
"""Seconds after which no further change of a deck is planned, since all ranks wait for the error message."""


def build_within_memory(
    deck: Deck,
    world: World,
    mesh: Mesh,
    ready: Callable[[], None] = lambda: None,
) -> tuple[Engine, MemoryPlan]:
    """Predict the memory of a run, and build its engine if that memory fits. Collective.

    Choices that an earlier run has measured are taken from the deck and not measured again.

    Args:
        deck: The deck.
        world: All ranks.
        mesh: Mesh of the ranks.
        ready: Function that is called when the memory is known to fit, before the engine creates files.

    Returns:
        The engine, and the predicted memory of all ranks.

    Raises:
        HpctrainError: On all ranks, before anything large is allocated, if the ranks of a node need more
            memory than the node has, or than the deck allows in [machine].
    """
    with world.agreement():
        # Libraries that a user's module loads when it is built and run count in `library_bytes`.
        model_flops(architecture_of(deck, deck.model.vocabulary or 0))
    deck = choose_kernels(with_split(deck, deck.runtime_choices.split), world, mesh)
    choices = replace(deck.runtime_choices, uses_malloc=bool(world.malloc_reason))
    deck = deck.with_runtime_choices(choices)
    process_bytes = library_bytes() if on_host(world.device) else 0
    spec = make_engine_spec(deck, world, mesh)
    planned = deck.with_keys(run={"device": world.device.type}, communication={"transport": mesh.transport})
    assert deck.model.vocabulary is not None
    arguments = world.size, deck.model.vocabulary, process_bytes, world.topology.ranks_per_node
    plan = plan_run_memory(planned, *arguments, spec.placement.split, spec.schedule)
    required_bytes = plan.stages[mesh.coordinate("pipeline")].required_bytes

    def advice(exceeded: MemoryDemand) -> str:
        savings = find_savings(
            deck,
            plan,
            lambda change: changed_deck(planned, [change], world.size),
            lambda changed: plan_run_memory(changed.with_runtime_choices(deck.runtime_choices), *arguments),
            ADVICE_SECONDS,
        )
        key = "machine.memory" if on_host(world.device) else "machine.gpu_memory"
        return _advice(plan, savings, exceeded, process_bytes, key)

    require_memory(world, deck.machine, deck.sources.name, required_bytes, advice)
    world.planned_bytes = required_bytes
    ready()
    return assemble(deck, world, mesh, spec), plan


def _advice(
    plan: MemoryPlan,
    savings: Sequence[MemorySaving],
    exceeded: MemoryDemand,
    process_bytes: int,
    limit_key: str,
) -> str:
    """Return the end of the error message: what needs most memory, and which changes would reduce it.

    Args:
        plan: Predicted memory of all ranks.
        savings: Changes of the deck that save memory, the best first.
        exceeded: Limit that the ranks of a node exceed.
        process_bytes: Bytes of a process without a model.
        limit_key: Key of the deck that sets the limit.
    """
    remedies = [
        f"--set {saving.change} ({format_bytes(saving.total)} per rank)"
        for saving in savings[:MAX_ADVISED_CHANGES]
    ]
    account = plan.largest.memory
    state = account.parameter + account.gradient + account.optimizer
    # With more nodes, fewer ranks share a node, or the state is split among more ranks.
    if process_bytes < exceeded.limit.bytes and (exceeded.ranks > 1 or state > LEAST_SAVING * account.total):
        remedies.append("more nodes")
    reduction = f"to reduce it, use {either(remedies)}; " if remedies else ""
    return f"{largest_kinds(plan)}; {reduction}--set {limit_key}=SIZE overrides the limit"
