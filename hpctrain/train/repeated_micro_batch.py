"""Check that two ranks compute the same bits from the same micro-batch.

It finds faults that checks of products and messages miss. Each rank of the data axis computes a micro-batch
of the next step, then that of the next rank. Losses and gradients before any reduction must have the same
bits. If ranks compute on each other's tokens, as with experts, or the next rank has other weights, each rank
computes its own micro-batch twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpctrain.audit.bits import word_sum
from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.engine.built_engine import Engine
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.train.step import Step, TrainState


class Repetition:
    """Comparison of repeated micro-batches between two steps.

    Attributes:
        engine: The engine.
        step: Step of the run.
        state: Counters of the run.
        batch: Returns the number of sequences of the next step.
    """

    def __init__(self, engine: Engine, step: Step, state: TrainState, batch: Callable[[], int]) -> None:
        self.engine, self.step, self.state, self.batch = engine, step, state, batch

    def compare(self) -> list[DetectedFault]:
        """Return a fault for each loss or gradient that differs when it is repeated. Collective.

        Afterwards gradients, and state that the passes of a step change, must be reset by the caller. Nothing
        is compared if no samples are available yet.
        """
        if not self.step.has_samples:
            return []
        engine, step, state, batch = self.engine, self.step, self.state, self.batch()
        number, shares = step.share
        if engine.mesh.size("pipeline") == 1:
            batch = min(batch, shares * step.micro_size)  # one micro-batch each
        local = self._pass(state, batch, 0)
        _, replicas = engine.stage.replica
        # The next rank of the same replica, since other replicas may have other weights.
        alone = shares == replicas or engine.mesh.size("expert") > 1
        shift = 0 if alone else replicas
        other = self._pass(state, batch, shift)
        rows = engine.mesh.group("data").all_gather_object([number, local, other])
        ranks = dict(zip((row[0] for row in rows), engine.mesh.group("data").ranks, strict=True))
        row_by_share = {(row[0] + shift) % shares: row for row in rows}
        repeated = row_by_share[number]
        segments = [segment for bucket in engine.stage.buckets for segment in bucket.segments]
        names = ["losses", *(f"gradient/{segment.parameter.shard.name}" for segment in segments)]
        both = tuple(sorted({ranks[number], ranks[repeated[0]]}))
        return [
            DetectedFault("micro-batch", name, "backward", both, "differs when computed again")
            for name, one, two in zip(names, local, repeated[2], strict=True)
            if one != two
        ]

    def _pass(self, state: TrainState, batch: int, shift: int) -> list[int]:
        """Return fingerprints of the losses and of each gradient of a share of the samples."""
        engine, step = self.engine, self.step
        prints: dict[BucketSegment, int] = {}

        def keep(bucket: Bucket) -> None:
            for segment in bucket.segments:  # elements between segments are undefined
                prints[segment] = int(word_sum(segment.view(bucket.gradients).view(-1)))

        with (
            _temporary_attribute(step, "shift", shift),
            _temporary_attribute(step, "choices", lambda *_: None),
            _temporary_attribute(engine.stage.synchronizer, "before_reduction", keep),
        ):
            sums, _ = step.accumulate(state, batch)
        engine.stage.synchronizer.end_step(False, 1.0)
        if engine.stage.statistics is not None:
            engine.stage.statistics.reduce(engine.world.everyone)
        every = (segment for bucket in engine.stage.buckets for segment in bucket.segments)
        return [int(word_sum(sums)), *(prints.get(segment, 0) for segment in every)]


@contextmanager
def _temporary_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute to another value during the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
