"""The optimizer: what belongs to parameters, by name, and what updates them by a rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.memory.scratch import Flat, read_pieces
from hpctrain.parallel.shard import Shard, UpdateSettings
from hpctrain.sharding.bucket import Bucket, await_readers
from hpctrain.sharding.bucket_layout import UpdateRange
from hpctrain.sharding.state import MASTER, MODEL, OPTIMIZER, StateTensor, own_state

BucketState = Mapping[str, Flat]
"""What belongs to the elements of a bucket that are this rank's (`Bucket.own`), by name: flat, fp32, a value
for each, which lies where the element lies in its Shard. MASTER are the weights that are updated, which
all of them have."""

_PIECE = 1 << 20
"""Elements whose weights are computed at a time, which takes memory."""

Agreement = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class ElementBatch:
    """Elements that are updated alike: state by name and gradients, fp32 tensors of one shape on one device,
    flat or, of a MatrixRule, in the shape of a piece of a block.

    `updates` is a scalar there that counts the updates before this one; the rule adds it. They are moved by
    `treatment.rate` times the learning rate, but what decays does so by the learning rate itself times the
    weight decay. Of a block, `shard` is its parameter's.
    """

    state: Mapping[str, Tensor]
    gradients: Tensor
    updates: Tensor
    treatment: UpdateSettings
    shard: Shard | None = None


def by_treatment(parts: Sequence[ElementBatch]) -> dict[UpdateSettings, list[ElementBatch]]:
    """Those that are updated alike together, decayed ones first."""
    found: dict[UpdateSettings, list[ElementBatch]] = {}
    for part in sorted(parts, key=lambda part: (not part.treatment.decayed, part.treatment.rate)):
        found.setdefault(part.treatment, []).append(part)
    return found


class UpdateRule(Protocol):
    """Elementwise update rule of parameters.

    An update of an element needs only its own state and gradient, so tensors may be split anywhere. Rules
    that need whole matrices are a `MatrixRule`.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the optimizer state other than the master weights. It is initialized with zeros."""

    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements in place. The gradients are divided by `gradient_divisor` in place."""


@runtime_checkable
class Averaged(UpdateRule, Protocol):
    """Update rule whose master weights are an average, and whose gradients belong to other weights.

    The layers compute with these other weights in training (schedule-free optimizers).

    Attributes:
        lead: Name of the state that holds the difference between both weights.
        totals: Sums over all updates so far. A checkpoint stores them with the number of updates.
    """

    lead: ClassVar[str]
    totals: dict[str, float]

    def begin(self, learning_rate: float) -> None:
        """Prepare for an update, which follows in any number of parts."""

    def computed(self, masters: Tensor, lead: Tensor) -> Tensor:
        """Return the weights that layers compute with in training, in new memory."""


def computed(averaged: Averaged | None, state: Mapping[str, Tensor]) -> Tensor:
    """The weights that layers compute with, by this rule, or else the masters, of some elements' state."""
    return averaged.computed(state[MASTER], state[averaged.lead]) if averaged else state[MASTER]


def is_master(dtype: torch.dtype, updated_there: bool, rule: UpdateRule | None = None) -> bool:
    """Whether parameters of this format are the master weights themselves: in fp32, where the update is
    computed where they lie, if gradients are theirs.
    """
    return dtype == torch.float32 and updated_there and not isinstance(rule, Averaged)


class Optimizer(ABC):
    """Updates the parameters of buckets by a rule, wherever it has its `states`, one for each bucket.

    The `rule` is that of elements, if one updates them all.
    `updates` counts those done so far, as the bias correction does. `agreement` surrounds what may fail on
    one rank alone (`World.agreement`).
    """

    updates: int

    def __init__(
        self,
        rule: UpdateRule | None,
        buckets: Sequence[Bucket],
        states: Sequence[BucketState],
        agreement: Agreement = nullcontext,
    ) -> None:
        self.buckets, self.states, self._agreement = buckets, states, agreement
        self._averaged = rule if isinstance(rule, Averaged) else None

    @abstractmethod
    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """Update with gradients divided by `gradient_divisor` (loss scale over clip coefficient).

        Gradient buffers in fp32 that lie where the update is computed hold the divided gradients afterwards.
        """

    def rehearse(self) -> None:  # noqa: B027
        """Send what a step sends before its weights are published, without values; of a plan's buckets."""

    @property
    def masters(self) -> Sequence[Flat]:
        """The weights that are updated, of each bucket this rank's own."""
        return [state[MASTER] for state in self.states]

    @property
    def working_bytes(self) -> int:
        """Host memory that state which lies elsewhere passes through."""
        return 0

    @property
    def totals(self) -> dict[str, float]:
        """What the rule has learned of all updates, if it learns anything; stored beside their number."""
        return self._averaged.totals if self._averaged else {}

    @totals.setter
    def totals(self, totals: dict[str, float]) -> None:
        if self._averaged and totals:
            self._averaged.totals = totals

    def state(self) -> Iterator[StateTensor]:
        """The parameters too; where these are fp32, or only computed with, the master weights, wherever they
        lie, stand for them.
        """
        for bucket, state in zip(self.buckets, self.states, strict=True):
            single = bucket.dtype == torch.float32 or self._averaged is not None or not bucket.trained
            if not single:
                yield from own_state(MODEL, bucket.own_values, bucket, "never", False)
            for name, flat in state.items():
                weights = MODEL if single else MASTER
                kind = weights if name == MASTER else f"{OPTIMIZER}{name}"
                yield from own_state(kind, flat, bucket, "always", False)

    def publish(self, updated: bool = False) -> None:
        """Copy the master weights, or what else is computed with, into the parameters, where these are whole
        on all ranks; of what is trained alone where it was `updated`. Collective.
        """
        self._publish(self._averaged, updated)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The parameters are the model's within, and the same bits as before afterwards. Collective."""
        if self._averaged is None:
            yield
            return
        await_readers(self.buckets)
        self._publish(None)
        yield
        await_readers(self.buckets)
        self.publish()

    def _publish(self, averaged: Averaged | None, updated: bool = False) -> None:
        """Copy what is computed with by this rule, or else the master weights, into the parameters."""
        with self._agreement():
            for bucket, state in zip(self.buckets, self.states, strict=True):
                if state[MASTER] is not bucket.own_values:
                    for first, piece in _weights(state, averaged):
                        bucket.own_values[first : first + piece.numel()].copy_(piece)
        refresh([bucket for bucket in self.buckets if bucket.trained or not updated])


def _weights(state: BucketState, averaged: Averaged | None) -> Iterator[tuple[int, Tensor]]:
    """First element and values of all pieces of a bucket's own weights: see `Optimizer._publish`."""
    if averaged is None:
        yield from read_pieces(state[MASTER])
        return
    both = zip(read_pieces(state[MASTER]), read_pieces(state[averaged.lead]), strict=True)
    for (first, masters), (_, lead) in both:
        for at in range(0, masters.numel(), _PIECE):
            piece = slice(at, at + _PIECE)
            yield first + at, averaged.computed(masters[piece], lead[piece])


@dataclass(frozen=True)
class _Part:
    """Elements of one bucket's own that are updated alike, and views of their state."""

    bucket: Bucket
    treated: UpdateRange
    state: Mapping[str, Tensor]
    updates: Tensor


class ResidentOptimizer(Optimizer):
    """Keeps the state where it is updated, and updates all buckets in one call."""

    def __init__(self, rule: UpdateRule, buckets: Sequence[Bucket]) -> None:
        states = [resident_state(rule, bucket) for bucket in buckets]
        super().__init__(rule, buckets, states)
        self.rule = rule
        self._parts = [
            _Part(bucket, treated, {name: flat[treated.part] for name, flat in state.items()}, updates)
            for bucket, state in zip(buckets, states, strict=True)
            for treated in (bucket.layout.own_treated if bucket.trained else ())
            for updates in [torch.zeros((), device=state[MASTER].device)]
        ]
        self._updates = 0
        single = all(bucket.gradient_dtype == torch.float32 for bucket in buckets)
        # Of another type, one bucket after the other has its gradients in fp32, for as long.
        by_bucket = [list(parts) for _, parts in groupby(self._parts, lambda part: part.bucket)]
        self._together = [self._parts] if single else by_bucket

    @property
    @override
    def updates(self) -> int:
        return int(self._parts[0].updates.item()) if self._parts else self._updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates = count
        for part in self._parts:
            part.updates.fill_(count)

    @override
    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        if self._averaged is not None:
            self._averaged.begin(learning_rate)
        for parts in self._together:
            elements = [
                ElementBatch(part.state, gradients.float(), part.updates, part.treated.treatment)
                for part in parts
                for gradients in [part.bucket.own_gradients[part.treated.part]]
            ]
            self.rule.update(elements, learning_rate, gradient_divisor)
            del elements
        self._updates += 1
        self.publish(updated=True)


def refresh(buckets: Sequence[Bucket]) -> None:
    """Bring the other ranks' slices, which they have updated, into whole values. Collective."""
    for work in [bucket.start_refresh() for bucket in buckets]:
        if work is not None:
            work.wait()


def resident_state(rule: UpdateRule, bucket: Bucket) -> dict[str, Tensor]:
    """Where the update is computed: of the rule's names zeros; of what is not trained the values alone."""
    values = bucket.own_values
    assert isinstance(values, Tensor)
    if not bucket.trained:
        return {MASTER: values}
    master = values if is_master(bucket.dtype, True, rule) else values.to(torch.float32, copy=True)
    return {MASTER: master, **{name: torch.zeros(master.shape, device=master.device) for name in rule.names}}
