"""Rates of a complete step: elements per second of the optimizer, and the fixed time."""

from __future__ import annotations

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.data.batches import MicroBatch
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import build_engine
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from hpctrain.optim.clip import local_square_norm
from hpctrain.pipeline.execute import Executor, PreparedBatch
from hpctrain.plan.calibrate.calibration_decks import on_data_ranks
from hpctrain.plan.calibrate.clock import Clock
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.step_plan import plan_step

MOST_PARAMETERS = 40_000_000
"""Parameters of the largest model with which the optimizer is timed."""


def parameters_of(deck: Deck) -> int:
    """Return the number of parameters of a deck's model."""
    return count(ModelShape.of(deck, deck.model.vocabulary or 0)).parameters


def measure_optimizer(deck: Deck, clock: Clock) -> float:
    """Return the elements per second of gradient norm, update and rounding of parameters. Collective."""
    engine = _engine(deck, clock)
    for bucket in engine.stage.buckets:
        bucket.owned_gradients.fill_(1e-3)

    def update() -> None:
        local_square_norm(engine.stage.buckets).item()
        engine.stage.optimizer.step(1e-6, 1.0)

    return parameters_of(deck) / clock.seconds("optimizer", update)


def measure_fixed(deck: Deck, machine: MachineRates, clock: Clock) -> float:
    """Return the seconds of a step of a tiny deck beyond the predicted ones. Collective."""
    engine, world = _engine(deck, clock), clock.world
    executor = Executor(
        engine.stage.models,
        engine.mesh.group("pipeline"),
        engine.stage.layer_context.weight_gradients,
        world.ledger,
        engine.objective.metrics,
        engine.auxiliary_loss_names,
        engine.stage.statistics,
    )

    def step() -> None:
        batch = _batch(engine, deck)
        engine.stage.synchronizer.start(1)
        with engine.stage.pass_context(("train", 1)):
            sums = executor.run(engine.placement.schedule_of(1), [batch])
        engine.stage.synchronizer.finish()
        if engine.stage.statistics is not None:
            engine.stage.statistics.reduce(world.everyone)
        world.everyone.all_reduce(torch.cat((sums, local_square_norm(engine.stage.buckets).view(1))))
        engine.stage.optimizer.step(1e-6, 1.0)
        engine.stage.synchronizer.end_step(True, 1.0)

    measured = clock.group_seconds("fixed", world.everyone, step)
    planned = plan_step(on_data_ranks(deck, world.size), world.size, engine.shape.vocabulary, machine)
    return max(0.0, measured - planned.seconds)


def _engine(deck: Deck, clock: Clock) -> Engine:
    world = clock.world
    deck = on_data_ranks(deck, world.size)
    return build_engine(deck, world, Mesh(world, axis_sizes(deck, world.size)))


def _batch(engine: Engine, deck: Deck) -> PreparedBatch:
    size = deck.batch.micro_size, deck.batch.sequence
    tokens, targets = (torch.randint(engine.shape.vocabulary, size) for _ in range(2))
    scale = torch.tensor(1.0 / targets.numel(), device=engine.world.device)
    micro = MicroBatch.of_tokens(tokens, targets)
    return PreparedBatch.of(micro, engine.objective, scale, engine.positions, None, scale)
