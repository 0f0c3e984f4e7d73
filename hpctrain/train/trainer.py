"""The trainer: the engine of a run, its samples and its hooks.

The run, its replay, the layout check and the training benchmarks all make their steps with a trainer. So the
code that is checked and measured is the code that trains, including all hooks.
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
    """Values from which the trainer of a run is made.

    Attributes:
        deck: The deck.
        engine: Engine of the deck, without state.
        corpus: Training data.
        checkpoint: Checkpoint from which the run resumes, if any.
        load_state: Collective function that loads the state of the engine and of its auxiliary models, from
            the checkpoint or from the model that the run starts from. It returns the counters of the
            checkpoint; None for a new run.
        placement: Placement of this rank's model.
    """

    deck: Deck
    engine: Engine
    corpus: Corpus
    checkpoint: Path | None
    load_state: Callable[[], TrainState | None]
    placement: ModelPlacement


class Trainer:
    """An engine, the samples that it learns from, its progress, and its hooks in their order.

    Attributes:
        deck: The deck.
        engine: The engine.
        state: Counters of the steps and samples so far.
        step: Makes one step.
        activations: First hook, which measures the memory of activations.
        hooks: All hooks.
    """

    def __init__(self, deck: Deck, engine: Engine, batches: Batches, state: TrainState | None = None) -> None:
        self.deck, self.engine = deck, engine
        self.state = TrainState() if state is None else state
        self.step = self.make_step(batches)
        self.activations = ActivationPeak(engine)
        self.hooks: list[Hook] = [self.activations]
        if deck.stability.corruption != "off":
            from hpctrain.train.corruption import Guard
            from hpctrain.train.repeated_micro_batch import Repetition

            full = deck.stability.corruption == "full"
            again = Repetition(engine, self.step, self.state, self.next_batch) if full else None
            self.step.guard = guard = Guard(engine, self.state, deck.stability.corruption_every, again)
            self.hooks.append(guard)

    def close(self) -> None:
        """Release the resources of the trainer. It must not be used afterwards."""

    def make_step(self, batches: Batches) -> Step:
        """Return the object that makes the steps."""
        return step_of(self.deck, self.engine, batches)

    @property
    def can_stop(self) -> bool:
        """True if a run that stops now resumes with the same bits."""
        return True

    @property
    def extra_state(self) -> Mapping[str, object]:
        """Entries of a checkpoint's state that only this kind of trainer stores."""
        return {}

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        """Names of the metrics of an evaluation."""
        return self.engine.objective.metrics

    @property
    def world(self) -> World:
        """Communicators of the run's ranks."""
        return self.engine.world

    def next_batch(self) -> int:
        """Return the number of sequences of the next step."""
        return batch_at(self.deck.batch, self.state.step)

    def next_unused_sample(self, samples: int) -> int:
        """Return the first sample that a run can use next if it must skip the first `samples` samples."""
        return samples

    @property
    def guard(self) -> StepGuard | None:
        """Checks for silent faults; None if there are none."""
        return self.step.guard

    @property
    def computing_ranks(self) -> int:
        """Number of ranks that compute gradients."""
        return self.world.size

    @property
    def rank_description(self) -> str:
        """Number and layout of the ranks, for messages."""
        return f"{counted(self.world.size, 'rank')} ({sizes_text(self.engine.mesh.sizes)})"

    @property
    def outcome_lines(self) -> list[str]:
        """Lines about the end of a run that only this kind of trainer prints, on rank 0."""
        return []

    def other_memory(self) -> OtherMemory:
        """Return the memory outside of the engine and its auxiliary models."""
        return OtherMemory()

    @property
    def stage(self) -> int:
        """Index of this rank's stage in a memory plan."""
        return self.engine.mesh.coordinate("pipeline")

    def stragglers(self, factor: float) -> TimeComparison:
        """Return a comparison that finds ranks slower than `factor` times the median. Collective."""
        return StragglerDetector(self.engine.mesh, factor, work_of(self.engine.stage.models))

    def advance(self, is_due: Callable[[int], bool], is_requested: Callable[[], bool]) -> None:  # noqa: ARG002
        """Make the next step, or several if ranks train asynchronously. Collective.

        Args:
            is_due: Tells whether all ranks must synchronize after a step. Asynchronous ranks train up to
                there.
            is_requested: Tells whether this rank has received a request, such as a signal. Asynchronous ranks
                then synchronize earlier.
        """
        self.train_step()

    def train_step(self, batch: int | None = None) -> StepResult:
        """Make the next step and call the hooks. Collective.

        Args:
            batch: Number of sequences over all data ranks; None for that of the deck.
        """
        ledger = self.engine.world.ledger
        started, communicating, payload = time.perf_counter(), ledger.seconds, ledger.bytes
        with ExitStack() as watching:
            for hook in self.hooks:
                watching.enter_context(hook.around_step(self.state.step + 1))
            batch = self.next_batch() if batch is None else batch
            result = self.step(self.state, batch, self._before_update)
        seconds = time.perf_counter() - started
        compute_seconds = seconds - (ledger.seconds - communicating)
        done = StepDone(result, self.state, seconds, compute_seconds, ledger.bytes - payload)
        for hook in self.hooks:
            hook.after_step(done)
        return result

    def evaluate(self, batches: Batches, sequences: int) -> dict[str, float]:
        """Return the metrics of the first `sequences` sequences (see `Step.evaluate`). Collective."""
        if self.engine.stage.replica_sync.common_model_differs:
            self._before_update()  # the evaluation uses other weights
        return self.step.evaluate(batches, sequences)

    def _before_update(self) -> None:
        for hook in self.hooks:
            if type(hook).before_update is not Hook.before_update:
                hook.before_update()


MakeTrainer = Callable[[TrainerParts], Trainer]
"""Function that makes the trainer of a run. Collective."""


def step_of(deck: Deck, engine: Engine, batches: Batches) -> Step:
    """Return the Step of an engine, with the settings of its deck."""
    return Step(engine, batches, deck.batch.micro_size, deck.optimizer.clip, deck.run.seed)


def make_trainer(parts: TrainerParts) -> Trainer:
    """Return the trainer of a run on a fixed data set."""
    return Trainer(parts.deck, parts.engine, parts.corpus.train, parts.load_state())
