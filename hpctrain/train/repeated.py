"""A rank's micro-batch that its neighbour computes, too: what no check of a product or a message sees.

The ranks of the data axis each compute a first micro-batch of the step, then that of the next one. Losses and
gradients before any sum over ranks must be the same bits, as nodes compute alike. Where ranks compute on each
other's tokens, as experts do, or the next one has other weights, being of another replica, each computes its
own twice.
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
    """The comparison, between steps of a run that is in a `state`, whose next one is of `batch` sequences."""

    def __init__(self, engine: Engine, step: Step, state: TrainState, batch: Callable[[], int]) -> None:
        self.engine, self.step, self.state, self.batch = engine, step, state, batch

    def compare(self) -> list[DetectedFault]:
        """What neighbours have otherwise than this rank had it; collective. Leaves gradients, and whatever
        the passes of a step themselves change, to be begun anew. Nothing where there are no samples yet.
        """
        if not self.step.has_samples:
            return []
        engine, step, state, batch = self.engine, self.step, self.state, self.batch()
        number, shares = step.share
        if engine.mesh.size("pipeline") == 1:
            batch = min(batch, shares * step.micro_size)  # one micro-batch each
        own = self._pass(state, batch, 0)
        _, replicas = engine.stage.replica
        # The next rank of the same replica, as others may have other weights.
        alone = shares == replicas or engine.mesh.size("expert") > 1
        shift = 0 if alone else replicas
        other = self._pass(state, batch, shift)
        told = engine.mesh.group("data").all_gather_object([number, own, other])
        ranks = dict(zip((row[0] for row in told), engine.mesh.group("data").ranks, strict=True))
        theirs = {(row[0] + shift) % shares: row for row in told}
        with_this = theirs[number]
        segments = [segment for bucket in engine.stage.buckets for segment in bucket.segments]
        names = ["losses", *(f"gradient/{segment.parameter.shard.name}" for segment in segments)]
        both = tuple(sorted({ranks[number], ranks[with_this[0]]}))
        return [
            DetectedFault("micro-batch", name, "backward", both, "differs when computed again")
            for name, one, two in zip(names, own, with_this[2], strict=True)
            if one != two
        ]

    def _pass(self, state: TrainState, batch: int, shift: int) -> list[int]:
        """Fingerprints of losses and of each parameter's gradient of a share's micro-batches."""
        engine, step = self.engine, self.step
        found: dict[BucketSegment, int] = {}

        def keep(bucket: Bucket) -> None:
            for segment in bucket.segments:  # what lies between them is nobody's, and may be anything
                found[segment] = int(word_sum(segment.view(bucket.gradients).view(-1)))

        with (
            _set(step, "shift", shift),
            _set(step, "choices", lambda *_: None),
            _set(engine.stage.synchronizer, "before_reduction", keep),
        ):
            sums, _ = step.accumulate(state, batch)
        engine.stage.synchronizer.end_step(False, 1.0)
        if engine.stage.statistics is not None:
            engine.stage.statistics.reduce(engine.world.everyone)
        every = (segment for bucket in engine.stage.buckets for segment in bucket.segments)
        return [int(word_sum(sums)), *(found.get(segment, 0) for segment in every)]


@contextmanager
def _set(owner: object, name: str, value: object) -> Iterator[None]:
    """An attribute has another value within."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
