"""The trainer: what a run computes with, and the one way to make its next step.

The run, its replay, the check of a layout and the benchmarks of training all step through it, so that what
is verified and what is measured is what runs, with all that watches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.mesh import sizes_text
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.corpus import Corpus
from hpctrain.deck.schema import Deck
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.layout.model_placement import ModelPlacement
from hpctrain.text import counted
from hpctrain.train.batch_size import batch_at
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.memory_ledger import ActivationPeak, OtherMemory
from hpctrain.train.step import Step, StepGuard, StepResult, TrainState
from hpctrain.watch.stragglers import StragglerDetector, TimeComparison, work_of


@dataclass(frozen=True)
class TrainerParts:
    """What a trainer is made of: the deck and its engine, the samples, and the checkpoint that its run goes
    on from, if any. `fill`, which is collective, gives the engine and its companions their state, that of the
    checkpoint, or of the model that the run starts from; and returns how far that is. `seat` is this rank's.
    """

    deck: Deck
    engine: Engine
    corpus: Corpus
    checkpoint: Path | None
    fill: Callable[[], TrainState | None]
    seat: ModelPlacement


class Trainer:
    """An engine, the samples that it learns from, how far it is, and the hooks that watch it, in their order.

    `activations` is the first of these.
    """

    def __init__(self, deck: Deck, engine: Engine, batches: Batches, state: TrainState | None = None) -> None:
        self.deck, self.engine = deck, engine
        self.state = TrainState() if state is None else state
        self.step = self.make_step(batches)
        self.activations = ActivationPeak(engine)
        self.hooks: list[Hook] = [self.activations]
        if deck.stability.corruption != "off":
            from hpctrain.train.corruption import Guard
            from hpctrain.train.repeated import Repetition

            full = deck.stability.corruption == "full"
            again = Repetition(engine, self.step, self.state, self.next_batch) if full else None
            self.step.guard = guard = Guard(engine, self.state, deck.stability.corruption_every, again)
            self.hooks.append(guard)

    def close(self) -> None:
        """End what it has started; nothing can be trained afterwards."""

    def make_step(self, batches: Batches) -> Step:
        """What makes its steps."""
        return step_of(self.deck, self.engine, batches)

    @property
    def settled(self) -> bool:
        """Whether a run that ends here goes on with the same bits."""
        return True

    @property
    def known(self) -> Mapping[str, object]:
        """What checkpoints are to keep besides what any run's do."""
        return {}

    @property
    def evaluated(self) -> tuple[str, ...]:
        """Names of the figures of an evaluation."""
        return self.engine.objective.metrics

    @property
    def world(self) -> World:
        """All ranks of the run."""
        return self.engine.world

    def next_batch(self) -> int:
        """Sequences of the next step, by the deck."""
        return batch_at(self.deck.batch, self.state.step)

    def used_up(self, samples: int) -> int:
        """Where those go on that leave out all of so many samples."""
        return samples

    @property
    def guard(self) -> StepGuard | None:
        """Checks for silent faults; None if there are none."""
        return self.step.guard

    @property
    def computing(self) -> int:
        """How many of these compute."""
        return self.world.size

    @property
    def ranks(self) -> str:
        """These in words."""
        return f"{counted(self.world.size, 'rank')} ({sizes_text(self.engine.mesh.sizes)})"

    @property
    def outcome(self) -> list[str]:
        """What is to be said at the end besides what any run says, on rank 0."""
        return []

    def beside(self) -> OtherMemory:
        """What it has in memory besides its engine and companions of it."""
        return OtherMemory()

    @property
    def stage(self) -> int:
        """Which of the stages of a plan this rank is in."""
        return self.engine.mesh.coordinate("pipeline")

    def stragglers(self, factor: float) -> TimeComparison:
        """What finds ranks that are above `factor` times the median. Collective."""
        return StragglerDetector(self.engine.mesh, factor, work_of(self.engine.stage.models))

    def go_on(self, due: Callable[[int], bool], asked: Callable[[], bool]) -> None:  # noqa: ARG002
        """Make the next step; where ranks do not go in step, all up to the next one after which something is
        `due`, or until something is `asked` of a rank. Collective.
        """
        self.train_step()

    def train_step(self, batch: int | None = None) -> StepResult:
        """Make the next step, of `batch` sequences over all data ranks (default: the deck's). Collective."""
        ledger = self.engine.world.ledger
        started, communicating, payload = time.perf_counter(), ledger.seconds, ledger.bytes
        with ExitStack() as watching:
            for hook in self.hooks:
                watching.enter_context(hook.around_step(self.state.step + 1))
            batch = self.next_batch() if batch is None else batch
            result = self.step(self.state, batch, self._before_update)
        seconds = time.perf_counter() - started
        computing, payload = seconds - (ledger.seconds - communicating), ledger.bytes - payload
        done = StepDone(result, self.state, seconds, computing, payload)
        for hook in self.hooks:
            hook.after_step(done)
        return result

    def evaluate(self, batches: Batches, sequences: int) -> dict[str, float]:
        """Figures of the first `sequences` sequences, see Step. Collective."""
        if self.engine.stage.replica_sync.common_model_differs:
            self._before_update()  # the weights are others meanwhile
        return self.step.evaluate(batches, sequences)

    def _before_update(self) -> None:
        for hook in self.hooks:
            if type(hook).before_update is not Hook.before_update:
                hook.before_update()


MakeTrainer = Callable[[TrainerParts], Trainer]


def step_of(deck: Deck, engine: Engine, batches: Batches) -> Step:
    """What makes a step of an engine by its deck."""
    return Step(engine, batches, deck.batch.micro_size, deck.optimizer.clip, deck.run.seed)


def make_trainer(beginning: TrainerParts) -> Trainer:
    """The trainer of a run that learns from what there is."""
    return Trainer(beginning.deck, beginning.engine, beginning.corpus.train, beginning.fill())
