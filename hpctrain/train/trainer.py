"""The trainer: what a run computes with, and the one way to make its next step.

The run, its replay, the check of a layout and the benchmarks of training all step through it, so that what
is verified and what is measured is what runs, with all that watches it.
"""

from __future__ import annotations

from hpctrain.data.batches import Batches
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import Engine
from hpctrain.train.batch_size import batch_at
from hpctrain.train.memory import ActivationPeak
from hpctrain.train.step import Step, StepResult, TrainState


class Trainer:
    """An engine, the samples that it learns from, and how far it is.

    `activations` is counted in the first step, whichever that is.
    """

    def __init__(self, deck: Deck, engine: Engine, batches: Batches, state: TrainState | None = None) -> None:
        self.deck, self.engine = deck, engine
        self.state = TrainState() if state is None else state
        self.step = Step(engine, batches, deck.batch.micro_size, deck.optimizer.clip, deck.run.seed)
        self.activations = ActivationPeak(engine)

    def train_step(self, batch: int | None = None) -> StepResult:
        """Make the next step, of `batch` sequences over all data ranks (default: the deck's). Collective."""
        timeline = self.engine.world.ledger.timeline
        if timeline is not None:
            timeline.begin(self.state.step + 1)
        batch = batch_at(self.deck.batch, self.state.step) if batch is None else batch
        with self.activations.first():
            return self.step(self.state, batch)
