"""Construction of a run from a deck: its data, engine, trainer and checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.world import World
from hpctrain.data.corpus import Corpus, open_corpus, resolve_vocabulary
from hpctrain.data.held_out import HeldOut, open_held_out
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import REFERENCE_KINDS
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.engine.layout.model_placement import place_models
from hpctrain.model.shape import ModelShape
from hpctrain.plan.partitioned_engine import build_partition_within_memory
from hpctrain.plan.server_plan import build_role_within_memory
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.corpus_comparison import compare_corpus, known_corpus
from hpctrain.train.gpu_memory import warn_of_missing_memory
from hpctrain.train.layout_verification import verify_layout
from hpctrain.train.reference_scores import add_reference
from hpctrain.train.routing import RoutingRecorder, read_routing_file
from hpctrain.train.server.server_checkpoints import ServedCheckpoints
from hpctrain.train.server.server_trainer import ServedTrainer
from hpctrain.train.start import source_notes, start_from_source
from hpctrain.train.startup import RunFolder, configure_rank
from hpctrain.train.step import TrainState
from hpctrain.train.step_seconds import plan_seconds
from hpctrain.train.time_limit import TimeLimit
from hpctrain.train.trainer import MakeTrainer, TrainerParts, make_trainer
from hpctrain.train.training_loop import Run


@dataclass(frozen=True)
class _RunInputs:
    """Opened data and settings of a run, from which it is built.

    Attributes:
        deck: The deck, with the size of the vocabulary.
        corpus: Training data.
        held_out: Sets for evaluation.
        checkpoint: Checkpoint to resume from, if any.
        folder_preparation: Preparation of the run folder.
        time_limit: Time limit, if any.
        notes: Sentences about the data.
    """

    deck: Deck
    corpus: Corpus
    held_out: tuple[HeldOut, ...]
    checkpoint: Path | None
    folder_preparation: _FolderPreparation
    time_limit: TimeLimit | None
    notes: Sequence[str]


@dataclass
class _FolderPreparation:
    """Preparation of the run folder, which is called as soon as the deck is known to fit. Collective.

    Attributes:
        world: The world.
        prepare: Function of rank 0 that prepares the folder and returns a sentence; None to do nothing.
        note: The sentence, on rank 0 after the call.
    """

    world: World
    prepare: Callable[[], str] | None
    note: str = ""

    def __call__(self) -> None:
        """Prepare the folder on rank 0."""
        with self.world.agreement():
            if self.prepare is not None and self.world.rank == 0:
                self.note = self.prepare()


def open_run(
    world: World,
    deck: Deck,
    checkpoint: Path | None = None,
    prepare_folder: Callable[[], str] | None = None,
    routing_path: Path | None = None,
    trainer_factory: MakeTrainer = make_trainer,
) -> Run:
    """Build the run of a deck, from its start or from a checkpoint. Collective.

    Args:
        world: The world.
        deck: The deck.
        checkpoint: Checkpoint to resume from, if any.
        prepare_folder: Called on rank 0 to prepare the run folder, once the deck is known to fit. It returns
            a sentence to print. None, as in a replay, leaves the folder alone until the run trains.
        routing_path: Routing file; tokens of its samples go to the experts that it names.
        trainer_factory: Function that makes the trainer.

    Raises:
        HpctrainError: The deck cannot run on these ranks, or the routing file does not fit; raised on all
            ranks.
    """
    time_limit = TimeLimit.find(deck, os.environ, time.monotonic())
    configure_rank(world, deck)
    world.compare_calls(deck.communication.check)
    corpus = open_corpus(deck, world)
    deck = resolve_vocabulary(deck, corpus)
    world.ledger.activity = "opening the files for evaluation"
    held_out = open_held_out(deck, world, corpus)
    notes = compare_corpus(world, deck, corpus, checkpoint)
    if checkpoint is None:
        notes += source_notes(world, deck)
    preparation = _FolderPreparation(world, prepare_folder)
    inputs = _RunInputs(deck, corpus, held_out, checkpoint, preparation, time_limit, notes)
    if deck.communication.server is not None:
        return _build_served_run(world, inputs)
    return _build_run(world, inputs, routing_path, trainer_factory)


def _build_run(
    world: World, inputs: _RunInputs, routing_path: Path | None, trainer_factory: MakeTrainer
) -> Run:
    """Build the run of a deck without servers. Collective."""
    corpus, held_out, checkpoint = inputs.corpus, inputs.held_out, inputs.checkpoint
    world.ledger.activity = "planning the layout"
    deck = choose_functions(inputs.deck, world)
    placement = place_models(deck, world)
    predicted_seconds, seconds_note = plan_seconds(world, deck, is_resumed=checkpoint is not None)
    routing_file = None
    if routing_path is not None:
        shape = ModelShape.of(deck, deck.model.vocabulary or 0)
        routing_file = read_routing_file(world, routing_path, shape)
    world.ledger.activity = "comparing the layout with one rank"
    layout_note = verify_layout(deck, world, placement.mesh) if deck.stability.verify_layout else ""
    world.ledger.activity = "building the model"
    engine, memory_plan = build_partition_within_memory(deck, placement, inputs.folder_preparation)
    warn_of_missing_memory(world, placement.mesh, memory_plan.stages[placement.stage].memory)
    checkpoints = Checkpoints(deck, engine, known_corpus(world, deck, corpus, checkpoint), world)
    folder = RunFolder(world, deck)
    source_note = ""

    def load_state() -> TrainState | None:
        nonlocal source_note
        world.ledger.activity = "loading the model"
        if checkpoint is not None:
            return checkpoints.restore(checkpoint)
        with placement.agreement():
            if deck.model.source is not None and not placement.idle:
                source_note = start_from_source(deck, engine)
        if inputs.folder_preparation.prepare is not None:
            folder.lock()  # a reference may be written now
        return None

    world.ledger.activity = "preparing the trainer"
    try:
        trainer = trainer_factory(TrainerParts(deck, engine, corpus, checkpoint, load_state, placement))
        checkpoints.extra_state = {**checkpoints.extra_state, **trainer.extra_state}
        if deck.objective.kind in REFERENCE_KINDS:
            held_out, reference_state = add_reference(trainer.step, corpus, held_out, folder.path, checkpoint)
            checkpoints.extra_state = {**checkpoints.extra_state, **reference_state}
    except BaseException:
        folder.close()
        raise
    routing: RoutingRecorder | None = None
    recorded_samples = 0 if deck.model.experts is None else deck.model.experts.record_routing
    if recorded_samples or routing_file is not None:
        routing = RoutingRecorder(engine, trainer.state, recorded_samples, routing_file)
        trainer.step.choices = routing.choices
    routing_note = routing.sentence(routing_path) if routing is not None and routing_path is not None else ""
    return Run(
        deck,
        corpus,
        trainer,
        checkpoints,
        folder,
        memory_plan,
        inputs.time_limit,
        (
            inputs.folder_preparation.note,
            layout_note,
            source_note,
            *checkpoints.notes,
            routing_note,
            *inputs.notes,
            seconds_note,
        ),
        routing,
        predicted_seconds,
        held_out,
    )


def _build_served_run(world: World, inputs: _RunInputs) -> Run:
    """Build the run of a deck with servers. Collective."""
    deck, corpus, checkpoint = inputs.deck, inputs.corpus, inputs.checkpoint
    world.ledger.activity = "building the model"
    engine, memory_plan = build_role_within_memory(deck, world, inputs.folder_preparation)
    extra_state = known_corpus(world, deck, corpus, checkpoint)
    trainer = ServedTrainer(deck, world, engine, corpus.train)
    checkpoints = ServedCheckpoints(deck, engine, extra_state, world, trainer.roles)
    if checkpoint is not None:
        trainer.set_state(checkpoints.restore(checkpoint))
    source = deck.model.source if checkpoint is None else None
    source_note = checkpoints.start_from(deck) if source is not None else ""
    notes = (inputs.folder_preparation.note, source_note, *checkpoints.notes, *inputs.notes)
    folder = RunFolder(world, deck)
    return Run(
        deck,
        corpus,
        trainer,
        checkpoints,
        folder,
        memory_plan,
        inputs.time_limit,
        notes,
        held_out=inputs.held_out,
    )
