"""The reference of a policy: the model that its run starts from, which is kept in the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from hpctrain import __version__
from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.exchange.convert import MODEL_ONLY
from hpctrain.checkpoint.load import load
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import training_entries
from hpctrain.checkpoint.stored_deck import deck_state
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.deck.auxiliary_decks import reference_deck, shares_reference
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.rank_partition import REFERENCE
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.layout.model_placement import ModelPlacement
from hpctrain.errors import InputOutputError
from hpctrain.objective.factory import make_token_sampling
from hpctrain.objective.token_sampling import TokenSampling
from hpctrain.optim.optimizer import gather_updated
from hpctrain.post.rollout import AnswerRows
from hpctrain.sharding.bucket import Bucket, await_readers
from hpctrain.sharding.state import COMMON, MODEL, owned_state
from hpctrain.train.inference_engine import shown_engine
from hpctrain.train.reference_scores import require_same_reference
from hpctrain.train.scored import log_probabilities_of
from hpctrain.train.step import Step, TrainState

FILE = "reference.h5"


@dataclass(frozen=True)
class Reference:
    """What gives the reference's log-probabilities of sequences, see `log_probabilities_of`, on ranks that
    have it; its identity; and the engine that it has of its own, if it has one.
    """

    scored: Callable[[Batches], Iterator[Tensor]] | None
    identity: str
    engine: Engine | None = None


def open_reference(
    deck: Deck, seat: ModelPlacement, step: Step, state: TrainState, checkpoint: Path | None
) -> Reference | None:
    """What computes with the reference: None where nothing asks it. Collective.

    In its own layout it is a model of its own; of a policy whose adapters are trained alone it is the policy
    with those that it had at the start (`step` makes its steps).

    A run that begins writes it; one that goes on from a `checkpoint` reads it in the run's folder, or in the
    one that the checkpoint is of. InputOutputError on all ranks where that cannot be, or is another one.
    """
    engine = step.engine
    world, path = seat.run_world, Path(deck.run.dir) / FILE
    with world.agreement():
        own = reference_deck(deck, world.size)
    shared = shares_reference(deck)
    if own is None and not shared:
        return None
    buckets = [bucket for bucket in engine.stage.buckets if bucket.trained or not shared]
    if checkpoint is None:
        with world.agreement():
            if world.rank == 0:  # a replay has a folder of its own, which is not there yet
                path.parent.mkdir(parents=True, exist_ok=True)
        held = (
            tensor for bucket in buckets for tensor in owned_state(MODEL, bucket.owned_values, bucket, COMMON)
        )
        known = {MODEL_ONLY: True, **asdict(state), **deck_state(deck), "code_version": __version__}
        save(path, world.everyone, training_entries(held, writing=True), known)
    elif not world.everyone.broadcast_object(path.exists()):
        path = checkpoint.parent.parent / FILE
        with world.agreement():
            if world.rank == 0 and not path.exists():
                needed = "which a run writes at its start and requires to resume"
                raise InputOutputError(f"{path}: is missing, {needed} (restore it, or start again)")
    identity = _identity(path, world, checkpoint)
    if own is None:
        start = _start(path, world, buckets)
        scored = None if seat.idle else partial(_with_start, step, make_token_sampling(deck), start)
        return Reference(scored, identity)
    there = seat.world_of(REFERENCE)
    with seat.agreement():
        if there is None:
            return Reference(None, identity)
        shown = shown_engine(path, own, there)
    rows = Batches(AnswerRows([], own.batch.sequence), 0)
    other = Step(shown, rows, own.batch.micro_size, 0.0, own.run.seed)
    return Reference(
        partial(log_probabilities_of, other, sampling=make_token_sampling(deck)), identity, shown
    )


def _identity(path: Path, world: World, checkpoint: Path | None) -> str:
    """By what the reference there is known: checksums of its tensors, which are those of any layout.
    Collective; InputOutputError where the checkpoint knows another one.
    """
    everyone = world.everyone
    found = blake2b(examine(path, everyone).sums.tobytes(), digest_size=8).hexdigest()
    require_same_reference(world, path, found, checkpoint)
    return found


_Values = Sequence[tuple[Bucket, Tensor]]


def _start(path: Path, world: World, buckets: Sequence[Bucket]) -> _Values:
    """This rank's values of what is trained, as they were when the run began. Collective."""
    begun = [(bucket, torch.zeros_like(_own(bucket))) for bucket in buckets]
    tensors = (each for bucket, flat in begun for each in owned_state(MODEL, flat, bucket, COMMON))
    load(path, world.everyone, training_entries(tensors))
    return begun


def _with_start(step: Step, sampling: TokenSampling, start: _Values, batches: Batches) -> Iterator[Tensor]:
    """Log-probabilities by the policy as it was at its start; then it has its bits again. Collective."""
    buckets = [bucket for bucket, _ in start]
    present = [(bucket, _own(bucket).clone()) for bucket in buckets]
    _put(start)
    found = list(log_probabilities_of(step, batches, sampling))
    _put(present)
    yield from found


def _put(values: _Values) -> None:
    buckets = [bucket for bucket, _ in values]
    await_readers(buckets)
    for bucket, own in values:
        _own(bucket).copy_(own)
    gather_updated(buckets)


def _own(bucket: Bucket) -> Tensor:
    values = bucket.owned_values
    assert isinstance(values, Tensor), "adapters lie where they are computed with"
    return values
