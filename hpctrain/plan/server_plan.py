"""Memory and traffic of a run with parameter servers, and the engine of a rank in such a run."""

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
from hpctrain.pipeline.action import accumulation
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory_demand import require_memory
from hpctrain.plan.memory_plan import MemoryPlan, MemoryPlanner, StageMemory
from hpctrain.plan.traffic_plan import PlannedTransfer, StageTraffic, TrafficPlan

NUMBER = 8
"""Bytes of a number in the header of a message."""

_PUSH, _PULL, _SHARE = 9, 3, 4
"""Count of numbers in the headers of a push and of a pull, and in a worker's message about its share.

Metrics and counts of rows are not included.
"""


def served_bytes(
    dense: int,
    workers: int,
    servers: int,
    gradient_bytes: int = 4,
    value_bytes: int = 4,
    metrics: int = 1,
    rows: Sequence[tuple[int, int]] = (),
) -> int:
    """Return the payload of all ranks together in a step in which every worker pushes and pulls once.

    It is W (P (g + v) + rows (row (g + v) + 8)) bytes and the headers, for W workers and P elements.

    Args:
        dense: Number of trained elements without the tables in `rows`.
        workers: Number of workers.
        servers: Number of servers.
        gradient_bytes: Bytes of an element of a gradient.
        value_bytes: Bytes of an element of a parameter.
        metrics: Number of metrics of a step.
        rows: For each table whose rows are sent one by one, the number of rows that a worker uses, and the
            elements of a row. Each table is on one server.
    """
    table_bytes = sum(count * (row * (gradient_bytes + value_bytes) + 8) for count, row in rows)
    header_numbers = servers * (_PUSH + metrics + _PULL + 2 * len(rows)) + _SHARE
    return workers * (dense * (gradient_bytes + value_bytes) + table_bytes + NUMBER * header_numbers)


def plan_served_traffic(deck: Deck, ranks: int, vocabulary: int, ranks_per_node: int = 1) -> TrafficPlan:
    """Return the traffic of a deck with parameter servers. All ranks of a role send the same number of bytes.

    The numbers in headers of messages are not counted. All rows of tables are counted, even if only the rows
    that were used are sent. For asynchronous workers, the result is an upper bound, since a worker sends
    while others compute.

    Args:
        deck: The deck.
        ranks: Number of ranks.
        vocabulary: Number of token ids of the model.
        ranks_per_node: Number of ranks per node.
    """
    roles, shape, precision = ServerRoles.of(deck, ranks), ModelShape.of(deck, vocabulary), Precision.of(deck)
    elements, linked = count(shape).parameters, ranks_per_node < ranks
    push, pull = (elements * each.itemsize for each in (precision.gradient, precision.storage))

    def transfers(pushed: Traffic, pulled: Traffic, payload: int) -> tuple[PlannedTransfer, ...]:
        directions = (pushed, pulled) if linked else (Traffic(), Traffic())
        return tuple(
            PlannedTransfer("server", bytes_, direction)
            for bytes_, direction in zip((payload, 0), directions, strict=True)
        )

    # One worker pushes while another one pulls. The larger of both takes its time for every worker, the
    # smaller one only for the last worker.
    pushes, pulls = (1, roles.workers) if pull >= push else (roles.workers, 1)
    received, sent = push * pushes // roles.servers, pull * pulls // roles.servers
    both = push + pull
    server = transfers(Traffic(0, received, 1), Traffic(sent, 0, 1), both * roles.workers // roles.servers)
    worker = transfers(Traffic(push, 0, 1), Traffic(0, pull, 2), both)
    passes = micro_batches(deck, roles.workers)
    return TrafficPlan((StageTraffic(0, (server,)), StageTraffic(1, (worker,))), passes, complete=True)


def plan_served(
    deck: Deck,
    ranks: int,
    vocabulary: int,
    process_bytes: int = 0,
    ranks_per_node: int | None = None,
) -> MemoryPlan:
    """Return the memory plan of a deck with parameter servers. Its stages are the servers and the workers."""
    roles = ServerRoles.of(deck, ranks)
    planner = MemoryPlanner(deck, ranks, vocabulary, ranks_per_node, build=build_worker_stage)
    plan = planner.plan(process_bytes)
    (worker,) = plan.stages
    device, shape = device_kind(deck.run.device), ModelShape.of(deck, vocabulary)
    mesh = PlannedMesh(
        {"pipeline": 1, "data": roles.servers, "context": 1, "tensor": 1}, 0, ranks, device=device
    )
    stage = plan_stage(
        server_deck(deck), shape, mesh, PipelinePosition(accumulation(1), [deck.model.layers], 0), device
    )
    buckets = stage.buckets
    owned_elements = sum(bucket.owned_slice.stop - bucket.owned_slice.start for bucket in buckets)
    value, gradient = buckets[0].dtype.itemsize, buckets[0].gradient_dtype.itemsize
    keys = deck.communication.server
    assert keys is not None
    steps = {"sync": 1, "stale": keys.staleness + 1}.get(keys.mode)
    # Pushes that wait for others of their step, and parameters on their way to workers.
    pending_gradients = gradient * (1 if steps is None else steps * roles.workers)
    sent = value * (roles.workers if steps != 1 else 1)
    # For the compensation of delays, servers keep each version of the parameters that a worker may have.
    backups = 4 * ((steps or roles.workers) + 1) if keys.correction == "compensate" else 0
    server = MemoryAccount(
        value_bytes(buckets),
        gradient_bytes(buckets),
        state_bytes(stage.state(), buckets),
        buffer=owned_elements * (pending_gradients + sent + backups),
        other=process_bytes,
    )
    elements = plan.parameters_total
    buffer_bytes = gradient * elements + value * -(-elements // roles.servers)
    workers = replace(
        worker, stage=1, memory=replace(worker.memory, buffer=worker.memory.buffer + buffer_bytes)
    )
    counts = ("servers", roles.servers), ("workers", roles.workers)
    return replace(plan, stages=(StageMemory(0, 0, owned_elements, server), workers), roles=counts)


def build_role_within_memory(
    deck: Deck, world: World, ready: Callable[[], None]
) -> tuple[Engine, MemoryPlan]:
    """Build the engine of this rank's role in a run with servers, if the memory fits. Collective.

    It is like `build_within_memory`.
    """
    roles = ServerRoles.of(deck, world.size)
    role_deck, part, mesh = roles.split_world(choose_functions(deck, world), world)
    serves = roles.serves(world.rank)
    if not serves:
        role_deck = choose_kernels(role_deck, part, mesh)
    kernels = world.everyone.broadcast_object(role_deck.runtime_choices.kernels, roles.servers)
    if serves:
        # Servers store parameters in the formats that the kernels of the workers need.
        role_deck = choose_kernels(
            role_deck.with_runtime_choices(replace(role_deck.runtime_choices, kernels=kernels)),
            part,
            mesh,
        )
    spec = make_engine_spec(role_deck, part, mesh)
    planned = deck.with_keys(run={"device": world.device.type}).with_runtime_choices(
        role_deck.runtime_choices
    )
    process_bytes = library_bytes() if on_host(world.device) else 0
    per_node = world.topology.ranks_per_node
    assert deck.model.vocabulary is not None
    plan = plan_served(planned, world.size, deck.model.vocabulary, process_bytes, per_node)
    required_bytes = plan.stages[0 if serves else 1].memory.total
    remedy = "use more servers to reduce it; --set machine.memory=SIZE overrides the limit"
    require_memory(world, deck.machine, deck.sources.name, required_bytes, lambda _: remedy)
    world.planned_bytes = required_bytes
    ready()
    return assemble(role_deck, part, mesh, spec, build=roles.stage_builder(world.rank)), plan
