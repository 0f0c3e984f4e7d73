"""The trainer: what a run computes with, and the one way to make its next step.

The run, its replay, the check of a layout and the benchmarks of training all step through it, so that what
is verified and what is measured is what runs, with all that watches it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from hpctrain.data.batches import Batches
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import Engine
from hpctrain.train.batch_size import batch_at
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.memory import ActivationPeak
from hpctrain.train.step import Step, StepResult, TrainState


class Trainer:
    """An engine, the samples that it learns from, how far it is, and the hooks that watch it, in their order.

    `activations` is the first of these.
    """

    def __init__(self, deck: Deck, engine: Engine, batches: Batches, state: TrainState | None = None) -> None:
        self.deck, self.engine = deck, engine
        self.state = TrainState() if state is None else state
        self.step = Step(engine, batches, deck.batch.micro_size, deck.optimizer.clip, deck.run.seed)
        self.activations = ActivationPeak(engine)
        self.hooks: list[Hook] = [self.activations]

    def train_step(self, batch: int | None = None) -> StepResult:
        """Make the next step, of `batch` sequences over all data ranks (default: the deck's). Collective."""
        ledger = self.engine.world.ledger
        started, communicating, payload = time.perf_counter(), ledger.seconds, ledger.bytes
        with ExitStack() as watching:
            for hook in self.hooks:
                watching.enter_context(hook.around_step(self.state.step + 1))
            batch = batch_at(self.deck.batch, self.state.step) if batch is None else batch
            result = self.step(self.state, batch, self._before_update)
        seconds = time.perf_counter() - started
        computing, payload = seconds - (ledger.seconds - communicating), ledger.bytes - payload
        done = StepDone(result, self.state, seconds, computing, payload)
        for hook in self.hooks:
            hook.after_step(done)
        return result

    def _before_update(self) -> None:
        for hook in self.hooks:
            hook.before_update()
