"""Start and continuation of runs: `hpctrain run` and `hpctrain resume`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.names import checkpoints
from hpctrain.checkpoint.stored_deck import require_trusted, stored_deck
from hpctrain.checkpoint.verify_checksums import verify
from hpctrain.comm.world import World
from hpctrain.deck.check import check_world
from hpctrain.deck.code import trust_of
from hpctrain.deck.replicas import fit_continued_replicas, fit_initial_replicas
from hpctrain.deck.schema import Deck
from hpctrain.errors import EXIT_DONE, HpctrainError
from hpctrain.report.terminal import columns, fit
from hpctrain.text import command
from hpctrain.train.automatic_layout import choose_layout
from hpctrain.train.mirror_hook import require_neighbour
from hpctrain.train.mirror_recovery import MirrorRecovery, recover_mirror
from hpctrain.train.rate_change import rate_change
from hpctrain.train.resume_check import keep_vocabulary, require_resumable
from hpctrain.train.run_construction import open_run
from hpctrain.train.signals import Signals
from hpctrain.train.start import require_training_state
from hpctrain.train.startup import prepare_ranks, read_deck_on_all_ranks
from hpctrain.train.stored_choices import with_stored_choices
from hpctrain.train.trainer import MakeTrainer, make_trainer
from hpctrain.watch.checkpoint_target import find_checkpoint
from hpctrain.watch.folder import clear_folder, clear_other_folder, must_replace_run, refuse_other_folder
from hpctrain.watch.statuses import is_done


def run_deck(
    world: World,
    source: Path | Deck,
    overrides: Sequence[str],
    fresh: bool = False,
    resumes: bool = False,
    routing_path: Path | None = None,
    trainer_factory: MakeTrainer = make_trainer,
) -> int:
    """Train a deck: `hpctrain run`. Collective.

    Args:
        world: The world.
        source: Path of the deck, or a deck that a script has made.
        overrides: `--set` arguments.
        fresh: True to delete an earlier run in the folder.
        resumes: True to resume from the newest valid checkpoint in the folder, if any, with this deck.
        routing_path: Routing file to follow (see `open_run`).
        trainer_factory: Function that makes the trainer.

    Returns:
        The exit code.
    """
    with Signals() as signals:
        world.ledger.activity = "reading the deck"
        # A resumed run derives the number of replicas from the number of ranks, which is checked later.
        deck = read_deck_on_all_ranks(world, source, overrides, None if resumes else world.size)
        deck, layout_note = choose_layout(world, deck)
        with world.agreement():
            folder = Path(deck.run.dir)
        recovery = recover_mirror(world, folder) if resumes else MirrorRecovery()
        with world.agreement():
            has_checkpoint = resumes and bool(checkpoints(folder / "checkpoints"))
            replica_note = ""
            if resumes and not has_checkpoint:
                deck, replica_note = fit_initial_replicas(deck, world.size)
                check_world(deck, world.size)
        if any(world.everyone.all_gather_object(has_checkpoint)):
            path = find_checkpoint(world, folder)
            state = read_state(path, world.everyone)
            source_checkpoint = _ResumedCheckpoint(path, state, True, (layout_note, *recovery.sentences))
            return _resume_from(world, deck, source_checkpoint, signals, routing_path, trainer_factory)
        with world.agreement():
            if world.rank == 0:
                must_replace_run(deck, fresh, resumes)  # raises errors before the run is built
        core_note = prepare_ranks(world, deck)
        if not recovery.mirrored:  # otherwise a job continues on the nodes that are left
            require_neighbour(world, deck)
        needed = [] if routing_path is None else [str(routing_path)]

        def prepare_folder() -> str:
            return clear_folder(deck, fresh, resumes, needed)

        run = open_run(world, deck, None, prepare_folder, routing_path, trainer_factory)
        return run.train(signals, (core_note, replica_note, layout_note, *recovery.sentences))


def resume(
    world: World,
    target: Path,
    overrides: Sequence[str],
    strict: bool = False,
    routing_path: Path | None = None,
    trainer_factory: MakeTrainer = make_trainer,
) -> int:
    """Resume a run: `hpctrain resume`. Collective.

    Args:
        world: The world.
        target: A checkpoint, or a run folder, which stands for its newest valid checkpoint.
        overrides: `--set` arguments. They may allow code that the stored deck names.
        strict: True to refuse a run whose newest checkpoint is damaged.
        routing_path: Routing file to follow (see `open_run`).
        trainer_factory: Function that makes the trainer.

    Returns:
        The exit code.
    """
    with Signals() as signals:
        world.ledger.activity = "looking for a checkpoint"
        recovery = recover_mirror(world, target)
        path = find_checkpoint(world, target, strict)
        state = read_state(path, world.everyone)
        with world.agreement():
            require_training_state(path, state, overrides)
            trust = trust_of(overrides)
            deck = stored_deck(state, path, [f"run.dir={path.parent.parent}", *overrides], trust)
            require_trusted(deck, path, trust)
        deck, layout_note = choose_layout(world, deck)
        sets_replicas = deck.sources.place("layout.local_steps.replicas").override is not None
        notes = layout_note, *recovery.sentences
        checkpoint = _ResumedCheckpoint(path, state, not sets_replicas, notes)
        return _resume_from(world, deck, checkpoint, signals, routing_path, trainer_factory)


@dataclass(frozen=True)
class _ResumedCheckpoint:
    """Checkpoint that a run resumes from.

    Attributes:
        path: Path of the checkpoint.
        state: Its state.
        fits_replicas: True if the number of replicas follows from the number of ranks.
        notes: Sentences to print at the start.
    """

    path: Path
    state: Mapping[str, Any]
    fits_replicas: bool
    notes: Sequence[str]


def _resume_from(
    world: World,
    deck: Deck,
    checkpoint: _ResumedCheckpoint,
    signals: Signals,
    routing_path: Path | None,
    trainer_factory: MakeTrainer,
) -> int:
    """Train from a checkpoint on. Return the exit code. Collective.

    If all steps of the run are done, only the checkpoint is verified.

    Raises:
        HpctrainError: The deck changes a key that a resumed run must keep, or ends before the checkpoint.
        InputOutputError: The checkpoint is damaged.
    """
    path, state = checkpoint.path, checkpoint.state
    is_run_done = False
    with world.agreement():
        trained_deck = stored_deck(state, path)
        step = int(state.get("step", 0))
        replica_note, ranks = "", int(state.get("ranks", world.size))
        if checkpoint.fits_replicas:
            deck, replica_note = fit_continued_replicas(deck, trained_deck, ranks, world.size)
        updates, samples = int(state.get("updates", step)), int(state.get("samples", 0))
        require_resumable(deck, trained_deck, path, updates, samples)
        deck = keep_vocabulary(deck, trained_deck)
        _require_later_end(deck, step, path)
        if world.rank == 0 and deck.run.steps == step:
            is_run_done = is_done(Path(deck.run.dir))
    if world.everyone.broadcast_object(is_run_done):
        verify(path, world.everyone)
        if world.rank == 0:
            continuation = command("resume", deck.run.dir, "--set", "run.steps=N")
            sentence = f"{deck.run.dir}: all {step} steps are done; continue with {continuation}"
            print(*fit(sentence, columns()), sep="\n", flush=True)
        return EXIT_DONE
    with world.agreement():
        deck = with_stored_choices(deck, trained_deck, state, path)
        if world.rank == 0:
            refuse_other_folder(deck, path)
    core_note, rate_note = prepare_ranks(world, deck), rate_change(deck, trained_deck, step)
    if not trained_deck.checkpoint.mirror:  # otherwise a run continues on the nodes that are left
        require_neighbour(world, deck)
    run = open_run(world, deck, path, lambda: clear_other_folder(deck, path), routing_path, trainer_factory)
    return run.train(signals, (core_note, rate_note, replica_note, *checkpoint.notes))


def _require_later_end(deck: Deck, step: int, path: Path) -> None:
    """Raise HpctrainError if the deck ends the run before the step of the checkpoint."""
    if deck.run.steps >= step:
        return
    sentence = f"is below the step of {path}, {step}; a resumed run requires a later one"
    if deck.run.tokens is not None:
        sentence = f"ends a run at step {deck.run.steps}, which {sentence}"
    raise HpctrainError(deck.problem("run.steps" if deck.run.tokens is None else "run.tokens", sentence))
