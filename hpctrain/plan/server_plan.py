"""What a run with servers will hold and send: the memory of both roles, and the bytes of pushes and pulls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.transports.traffic import Traffic
from hpctrain.comm.world import World
from hpctrain.costs.bucket_bytes import gradient_bytes, state_bytes, value_bytes
from hpctrain.costs.memory_account import MemoryAccount
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import assemble
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.engine.choices.kernel_choice import choose_kernels
from hpctrain.engine.layout.engine_spec import make_engine_spec
from hpctrain.engine.layout.server_roles import ServerRoles, build_worker_stage, server_deck
from hpctrain.engine.mesh_sizes import micro_batches
from hpctrain.engine.stages.planned_stage import PipelinePosition, plan_stage
from hpctrain.host.device import device_kind, on_host
from hpctrain.model.count import count
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.action import Schedule, accumulation
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory_demand import require_memory
from hpctrain.plan.memory_plan import MemoryPlan, MemoryPlanner, StageMemory
from hpctrain.plan.traffic_plan import Moved, StageTraffic, TrafficPlan

NUMBER = 8
"""Bytes of a number of a letter."""

_PUSH, _PULL, _SHARE = 9, 3, 4
"""Numbers of letters, besides figures and counts of rows."""


def served_bytes(
    dense: int,
    workers: int,
    servers: int,
    gradient_bytes: int = 4,
    value_bytes: int = 4,
    figures: int = 1,
    rows: Sequence[tuple[int, int]] = (),
) -> int:
    """Payload of all ranks together in a step: every worker pushes and pulls `dense` trained elements, and of
    tables whose rows travel alone `rows`: (rows that its share touches, elements of one), each on one server.

    W (phi (g + v) + rows (row (g + v) + 8)) and the letters; a step in which nothing else is done.
    """
    of_tables = sum(count * (row * (gradient_bytes + value_bytes) + 8) for count, row in rows)
    letters = servers * (_PUSH + figures + _PULL + 2 * len(rows)) + _SHARE
    return workers * (dense * (gradient_bytes + value_bytes) + of_tables + NUMBER * letters)


def plan_served_traffic(deck: Deck, ranks: int, vocabulary: int, ranks_per_node: int = 1) -> TrafficPlan:
    """As `plan_traffic`, of a deck with servers, of which every rank of a role moves as much.

    Payload is what a rank sends and receives, without letters' numbers. A table of which touched rows travel
    alone is counted as if all were touched. Where workers do not go in
    step, what one moves while others compute makes it an upper bound.
    """
    roles, shape, precision = ServerRoles.of(deck, ranks), ModelShape.of(deck, vocabulary), Precision.of(deck)
    elements, linked = count(shape).parameters, ranks_per_node < ranks
    push, pull = (elements * each.itemsize for each in (precision.gradient, precision.storage))

    def moved(pushed: Traffic, pulled: Traffic, payload: int) -> tuple[Moved, ...]:
        ways = (pushed, pulled) if linked else (Traffic(), Traffic())
        return tuple(Moved("server", bytes_, way) for bytes_, way in zip((payload, 0), ways, strict=True))

    # One worker pushes while another one pulls: of the larger way all pass, of the other one's the last.
    pushes, pulls = (1, roles.workers) if pull >= push else (roles.workers, 1)
    received, sent = push * pushes // roles.servers, pull * pulls // roles.servers
    both = push + pull
    server = moved(Traffic(0, received, 1), Traffic(sent, 0, 1), both * roles.workers // roles.servers)
    worker = moved(Traffic(push, 0, 1), Traffic(0, pull, 2), both)
    passes = micro_batches(deck, roles.workers)
    return TrafficPlan((StageTraffic(0, (server,)), StageTraffic(1, (worker,))), passes, whole=True)


def plan_served(
    deck: Deck,
    ranks: int,
    vocabulary: int,
    libraries: int = 0,
    ranks_per_node: int | None = None,
    split: Sequence[int] | None = None,
    schedule: Schedule | None = None,
) -> MemoryPlan:
    """As `plan_memory`, of a deck with servers: its stages are these and the workers."""
    roles = ServerRoles.of(deck, ranks)
    planner = MemoryPlanner(deck, ranks, vocabulary, ranks_per_node, split, schedule, build_worker_stage)
    plan = planner.plan(libraries)
    (worker,) = plan.stages
    device, shape = device_kind(deck.run.device), ModelShape.of(deck, vocabulary)
    mesh = PlannedMesh(
        {"pipeline": 1, "data": roles.servers, "context": 1, "tensor": 1}, 0, ranks, device=device
    )
    stage = plan_stage(
        server_deck(deck), shape, mesh, PipelinePosition(accumulation(1), [deck.model.layers], 0), device
    )
    buckets = stage.buckets
    own = sum(bucket.owned_slice.stop - bucket.owned_slice.start for bucket in buckets)
    value, gradient = buckets[0].dtype.itemsize, buckets[0].gradient_dtype.itemsize
    keys = deck.communication.server
    assert keys is not None
    steps = {"sync": 1, "stale": keys.staleness + 1}.get(keys.mode)
    # Pushes that wait for others of their step, and parameters on their way to workers.
    kept = gradient * (1 if steps is None else steps * roles.workers)
    sent = value * (roles.workers if steps != 1 else 1)
    # What was pulled, of as many versions as may be told apart, and what it is compared with.
    backups = 4 * ((steps or roles.workers) + 1) if keys.correction == "compensate" else 0
    server = MemoryAccount(
        value_bytes(buckets),
        gradient_bytes(buckets),
        state_bytes(stage.state(), buckets),
        buffer=own * (kept + sent + backups),
        other=libraries,
    )
    held = plan.parameters_total
    passing = gradient * held + value * -(-held // roles.servers)
    workers = replace(worker, stage=1, memory=replace(worker.memory, buffer=worker.memory.buffer + passing))
    counts = ("servers", roles.servers), ("workers", roles.workers)
    return replace(plan, stages=(StageMemory(0, 0, own, server), workers), roles=counts)


def build_role_within_memory(
    deck: Deck, world: World, ready: Callable[[], None]
) -> tuple[Engine, MemoryPlan]:
    """As `build_within_memory`, of this rank's role in a run with servers. Collective."""
    roles = ServerRoles.of(deck, world.size)
    own, part, mesh = roles.split_world(choose_functions(deck, world), world)
    serves = roles.serves(world.rank)
    if not serves:
        own = choose_kernels(own, part, mesh)
    products = world.everyone.broadcast_object(own.runtime_choices.kernels, roles.servers)
    if serves:
        # What they store and say is what workers compute with.
        own = choose_kernels(
            own.with_runtime_choices(replace(own.runtime_choices, kernels=products)), part, mesh
        )
    spec = make_engine_spec(own, part, mesh)
    planned = deck.with_keys(run={"device": world.device.type}).with_runtime_choices(own.runtime_choices)
    libraries = library_bytes() if on_host(world.device) else 0
    per_node = world.topology.ranks_per_node
    assert deck.model.vocabulary is not None
    plan = plan_served(planned, world.size, deck.model.vocabulary, libraries, per_node)
    here = plan.stages[0 if serves else 1].memory.total
    more = "use more servers to reduce it; --set machine.memory=SIZE overrides the limit"
    require_memory(world, deck.machine, deck.sources.name, here, lambda _: more)
    world.planned_bytes = here
    ready()
    return assemble(own, part, mesh, spec, build=roles.stage_builder(world.rank)), plan
