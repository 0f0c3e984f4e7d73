"""The reference of a policy: the model that its run starts from, which is kept in the run's folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from hpctrain import __version__
from hpctrain.checkpoint.entries import training_entries
from hpctrain.checkpoint.exchange.convert import MODEL_ONLY
from hpctrain.checkpoint.stored_deck import deck_state
from hpctrain.checkpoint.write import save
from hpctrain.data.batches import Batches
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import Engine
from hpctrain.engine.companions import reference_deck
from hpctrain.errors import InputOutputError
from hpctrain.post.rollout import AnswerRows
from hpctrain.sharding.state import MODEL, own_state
from hpctrain.train.shown import shown_engine
from hpctrain.train.step import Step, TrainState

FILE = "reference.h5"


def open_reference(deck: Deck, engine: Engine, state: TrainState, checkpoint: Path | None) -> Step | None:
    """What computes with the reference, in its own layout: None where nothing asks it. Collective.

    A run that begins writes it; one that goes on from a `checkpoint` reads it in the run's folder, or in the
    one that the checkpoint is of. InputOutputError on all ranks where that cannot be.
    """
    world, path = engine.world, Path(deck.run.dir) / FILE
    with world.agreement():
        own = reference_deck(deck, world.size)
    if own is None:
        return None
    if checkpoint is None:
        with world.agreement():
            if world.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
        held = (
            tensor
            for bucket in engine.buckets
            for tensor in own_state(MODEL, bucket.own_values, bucket, apart=False)
        )
        known = {MODEL_ONLY: True, **asdict(state), **deck_state(deck), "code_version": __version__}
        save(path, world.everyone, training_entries(held, writing=True), known)
    elif not world.everyone.broadcast_object(path.exists()):
        path = checkpoint.parent.parent / FILE
        with world.agreement():
            if world.rank == 0 and not path.exists():
                needed = "which a run writes at its start, and needs to go on"
                raise InputOutputError(f"{path}: is not there, {needed} (bring it back, or start anew)")
    shown = shown_engine(path, own, world)
    return Step(
        shown, Batches(AnswerRows([], own.batch.sequence), 0), own.batch.micro_size, 0.0, own.run.seed
    )
