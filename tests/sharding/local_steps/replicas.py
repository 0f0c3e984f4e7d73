"""Expected results of replicas, computed from runs of one rank each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.data.batches import Batches, MicroBatch
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.sharding.local_steps.local_steps import LocalSteps
from hpctrain.train.layout_verification import NOISE_STD
from tests.engines import Trainer


class Share(Batches):
    """Samples of data rank `number` of `count`, for a rank that trains alone."""

    def __init__(self, batches: Batches, number: int, count: int) -> None:
        super().__init__(batches.source, 1)
        self.number, self.count = number, count

    def step(
        self, first_sample: int, global_size: int, data_rank: int, data_ranks: int, micro_size: int
    ) -> Iterator[MicroBatch]:
        assert (data_rank, data_ranks) == (0, 1)
        return super().step(first_sample, global_size, self.number, self.count, micro_size)


def singles(world: World, deck: Deck, batches: Batches, replicas: int) -> list[Trainer]:
    """Return trainers of one rank, each with the samples of one of the replicas."""
    deck, one = on_one_rank(deck), world.single_rank_world()
    return [
        Trainer(
            deck,
            build_engine(deck, one, make_mesh(deck, one), noise_std=NOISE_STD),
            Share(batches, number, replicas),
        )
        for number in range(replicas)
    ]


class Expected:
    """Local SGD, DiLoCo and streaming DiLoCo, computed parameter by parameter."""

    def __init__(self, deck: Deck, runs: Sequence[Trainer]) -> None:
        self.keys, self.runs, self.step = deck.layout.local_steps, runs, 0
        self.outer = {name: values.clone() for name, values in runs[0].parameters().items()}
        self.velocity = {name: values * 0 for name, values in self.outer.items()}
        self.under_way: dict[str, tuple[int, Tensor]] = {}

    def train_step(self) -> None:
        """One step of each, and what follows it."""
        for run in self.runs:
            run.train_step()
        self.step += 1
        keys = self.keys
        mine = [run.parameters() for run in self.runs]
        rate, momentum = (keys.diloco.learning_rate, keys.diloco.momentum) if keys.diloco else (1.0, 0.0)
        for name, outer in self.outer.items():
            if name in self.under_way and self.under_way[name][0] + keys.delay == self.step:
                self.take(name, outer, mine, rate, momentum)
            parts = name.split(".")
            fragment = int(parts[1]) % keys.fragments if parts[0] == "blocks" else 0
            if self.step % keys.steps == fragment * keys.steps // keys.fragments:
                gradients = [outer - values[name] for values in mine]
                self.under_way[name] = self.step, sum(gradients) / len(gradients)
                if keys.delay == 0:
                    self.take(name, outer, mine, rate, momentum)

    def take(
        self, name: str, outer: Tensor, mine: Sequence[dict[str, Tensor]], rate: float, momentum: float
    ) -> None:
        """The outer step of one parameter, with Nesterov's momentum as in torch's SGD."""
        _, gradient = self.under_way.pop(name)
        self.velocity[name] = velocity = momentum * self.velocity[name] + gradient
        outer -= rate * (gradient + momentum * velocity)
        for values in mine:
            values[name].copy_(self.keys.blend * values[name] + (1 - self.keys.blend) * outer)


def outer_of(training: Trainer) -> dict[str, Tensor]:
    """Return this rank's piece of every parameter of the outer model, by name."""
    engine = training.engine
    assert isinstance(engine.stage.replica_sync, LocalSteps)
    with engine.stage.replica_sync.common_weights(engine.stage.optimizer):
        return {name: values.clone() for name, values in training.parameters().items()}
