"""Reference of a policy: the model that its run started from, which is stored in the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hpctrain.train.inference_engine import load_inference_engine
from hpctrain.train.reference_scores import require_same_reference
from hpctrain.train.step import Step, TrainState
from hpctrain.train.token_scores import log_probabilities_of

REFERENCE_FILE = "reference.h5"


@dataclass(frozen=True)
class Reference:
    """Reference model of a run.

    Attributes:
        log_probabilities: Yields the reference's log-probabilities of sequences, as `log_probabilities_of`
            does; None on ranks that do not hold it.
        identity: Hash of its tensors, which does not depend on the layout.
        engine: Engine of the reference, if it has one of its own on this rank.
    """

    log_probabilities: Callable[[Batches], Iterator[Tensor]] | None
    identity: str
    engine: Engine | None = None


def open_reference(
    deck: Deck, placement: ModelPlacement, step: Step, state: TrainState, checkpoint: Path | None
) -> Reference | None:
    """Return the reference of a run, or None if the objective needs none. Collective.

    A new run stores the reference. A resumed run reads it from its folder, or else from the folder of the
    checkpoint. If the policy only trains adapters, the reference may be the policy with its initial adapters.
    Otherwise the reference is a model of its own, in a layout of its own.

    Args:
        deck: Deck of the run.
        placement: Models that this rank holds.
        step: Step of the policy.
        state: Counters of the run.
        checkpoint: Checkpoint that the run resumes from; None for a new run.

    Raises:
        InputOutputError: On all ranks if the reference cannot be written or read, or is not the one that the
            checkpoint names.
    """
    world, path = placement.run_world, Path(deck.run.dir) / REFERENCE_FILE
    with world.agreement():
        model_deck = reference_deck(deck, world.size)
    shares_policy = shares_reference(deck)
    if model_deck is None and not shares_policy:
        return None
    buckets = [bucket for bucket in step.engine.stage.buckets if bucket.trained or not shares_policy]
    if checkpoint is None:
        _store_reference(path, world, buckets, {**asdict(state), **deck_state(deck)})
    elif not world.everyone.broadcast_object(path.exists()):
        path = checkpoint.parent.parent / REFERENCE_FILE
        with world.agreement():
            if world.rank == 0 and not path.exists():
                needed = "which a run writes at its start and requires to resume"
                raise InputOutputError(f"{path}: is missing, {needed} (restore it, or start again)")
    identity = _check_identity(path, world, checkpoint)
    sampling = make_token_sampling(deck)
    if model_deck is None:
        initial_values = _load_initial_values(path, world, buckets)
        if placement.idle:
            return Reference(None, identity)
        return Reference(partial(_initial_log_probabilities, step, sampling, initial_values), identity)
    reference_world = placement.world_of(REFERENCE)
    with placement.agreement():
        if reference_world is None:
            return Reference(None, identity)
        engine = load_inference_engine(path, model_deck, reference_world)
    rows = Batches(AnswerRows([], model_deck.batch.sequence), 0)
    reference_step = Step(engine, rows, model_deck.batch.micro_size, 0.0, model_deck.run.seed)
    return Reference(partial(log_probabilities_of, reference_step, sampling=sampling), identity, engine)


def _store_reference(
    path: Path, world: World, buckets: Sequence[Bucket], state: Mapping[str, object]
) -> None:
    """Write the current parameters of the policy to the reference's file. Collective."""
    with world.agreement():
        if world.rank == 0:  # the folder of a replay does not exist yet
            path.parent.mkdir(parents=True, exist_ok=True)
    tensors = (
        tensor for bucket in buckets for tensor in owned_state(MODEL, bucket.owned_values, bucket, COMMON)
    )
    contents = {MODEL_ONLY: True, **state, "code_version": __version__}
    save(path, world.everyone, training_entries(tensors, writing=True), contents)


def _check_identity(path: Path, world: World, checkpoint: Path | None) -> str:
    """Return the identity of the stored reference. Collective.

    Raises:
        InputOutputError: The checkpoint belongs to another reference.
    """
    everyone = world.everyone
    identity = blake2b(examine(path, everyone).sums.tobytes(), digest_size=8).hexdigest()
    require_same_reference(world, path, identity, checkpoint)
    return identity


_BucketValues = Sequence[tuple[Bucket, Tensor]]
"""Values of the parameters that this rank owns in each bucket."""


def _load_initial_values(path: Path, world: World, buckets: Sequence[Bucket]) -> _BucketValues:
    """Read the initial values of the parameters that this rank owns. Collective."""
    values = [(bucket, torch.zeros_like(_owned_values(bucket))) for bucket in buckets]
    tensors = (each for bucket, flat in values for each in owned_state(MODEL, flat, bucket, COMMON))
    load(path, world.everyone, training_entries(tensors))
    return values


def _initial_log_probabilities(
    step: Step, sampling: TokenSampling, initial_values: _BucketValues, batches: Batches
) -> Iterator[Tensor]:
    """Yield log-probabilities under the policy with its initial parameters. Collective.

    The current parameters are restored before the first result.
    """
    current_values = [(bucket, _owned_values(bucket).clone()) for bucket, _ in initial_values]
    _set_parameters(initial_values)
    log_probabilities = list(log_probabilities_of(step, batches, sampling))
    _set_parameters(current_values)
    yield from log_probabilities


def _set_parameters(values: _BucketValues) -> None:
    """Set the parameters of buckets on all ranks that hold them. Collective."""
    buckets = [bucket for bucket, _ in values]
    await_readers(buckets)
    for bucket, owned in values:
        _owned_values(bucket).copy_(owned)
    gather_updated(buckets)


def _owned_values(bucket: Bucket) -> Tensor:
    values = bucket.owned_values
    assert isinstance(values, Tensor), "adapters are in memory, not on disk"
    return values
