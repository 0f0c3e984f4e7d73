"""Optimizers update the parameters of buckets by a rule. They differ in where they keep the state.

An `UpdateRule` is the formula, such as AdamW. It receives an `ElementBatch`: master weights, further state
and gradients of some elements. An `Optimizer` owns the state of all elements that this rank updates, and
calls the rule. `ResidentOptimizer` keeps the state on the device that computes, `OffloadedOptimizer`
(`offload.py`) in host memory or files, and `MatrixOptimizer` (`matrix/`) distributes whole matrices.

With ZeRO each data rank updates its slice of a bucket, and `gather_updated` then gathers the new parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.memory.scratch import Flat, read_pieces
from hpctrain.parallel.shards import Shard, UpdateSettings
from hpctrain.sharding.bucket import Bucket, await_readers
from hpctrain.sharding.state import MASTER, MODEL, OPTIMIZER, UPDATED, StateTensor, owned_state

BucketState = Mapping[str, Flat]
"""State of the elements of a bucket that this rank updates (`Bucket.owned_slice`), by name.

Each is a flat fp32 tensor with one number for each element. MASTER, the master weights, is always among them.
"""

PIECE = 1 << 20
"""Elements that are computed at a time, to bound temporary memory."""

Agreement = Callable[[], AbstractContextManager[None]]
"""Makes a context in which an error on one rank is raised on all ranks (`World.agreement`)."""


@dataclass(frozen=True)
class ElementBatch:
    """Elements with the same update settings, with their state and gradients.

    All tensors are on one device and of one shape: flat, or for a MatrixRule the shape of a piece of a block.
    They are in fp32, except gradients of matrices, which have the dtype of the bucket's gradients. Autograd
    does not record what rules do with them, because none of them requires a gradient.

    Attributes:
        state: State by name, among it the master weights. The rule changes it in place.
        gradients: Reduced gradients, not yet divided by the gradient divisor.
        updates: Scalar tensor with the number of updates before this one. An elementwise rule adds 1.
        update_settings: The learning rate is multiplied by its `learning_rate_factor`. Weight decay, if they
            have it, takes the learning rate without this factor.
        shard: Shard of the parameter of a block; None for flat elements.
    """

    state: Mapping[str, Tensor]
    gradients: Tensor
    updates: Tensor
    update_settings: UpdateSettings
    shard: Shard | None = None

    def pieces(self) -> Iterator[ElementBatch]:
        """Yield PIECE elements at a time, for rules that need temporary memory."""
        for first in range(0, self.gradients.numel(), PIECE):
            piece = slice(first, first + PIECE)
            state = {name: flat[piece] for name, flat in self.state.items()}
            yield replace(self, state=state, gradients=self.gradients[piece])

    def decay_weights(self, amount: float) -> None:
        """Subtract this fraction of the master weights, if their settings include weight decay."""
        if self.update_settings.has_weight_decay and amount:
            self.state[MASTER].mul_(1 - amount)


class UpdateRule(Protocol):
    """Elementwise update rule of parameters.

    An update of an element needs only its own state and gradient, so tensors may be split anywhere. Rules
    that need whole matrices are a `MatrixRule`. All methods are local.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the optimizer state other than the master weights. It is initialized with zeros."""

    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements in place. The gradients are divided by `gradient_divisor` in place."""


@runtime_checkable
class AveragedRule(UpdateRule, Protocol):
    """Update rule whose master weights are an average, and whose gradients belong to other weights.

    The layers compute with these other weights in training (schedule-free optimizers).

    Attributes:
        offset_name: Name of the state that holds z - x, the latest iterate of the optimizer less the average.
        totals: Sums over all updates so far. A checkpoint stores them with the number of updates.
    """

    offset_name: ClassVar[str]
    totals: dict[str, float]

    def begin(self, learning_rate: float) -> None:
        """Prepare for an update, which follows in any number of parts."""

    def training_weights(self, masters: Tensor, offset: Tensor) -> Tensor:
        """Return the weights that layers compute with in training, in new memory."""


def training_weights(averaged: AveragedRule | None, state: Mapping[str, Tensor]) -> Tensor:
    """Return the weights that layers compute with in training: the master weights, unless a rule averages."""
    if averaged is None:
        return state[MASTER]
    return averaged.training_weights(state[MASTER], state[averaged.offset_name])


def are_masters(dtype: torch.dtype, updated_in_place: bool, rule: UpdateRule | None = None) -> bool:
    """Return True if parameters are their own master weights, so that no copy is needed.

    Args:
        dtype: dtype of the parameters.
        updated_in_place: True if the update is computed where the parameters are.
        rule: Update rule. If it averages, parameters differ from master weights.
    """
    return dtype == torch.float32 and updated_in_place and not isinstance(rule, AveragedRule)


class Optimizer(ABC):
    """State of the elements that this rank updates, and their update.

    Attributes:
        updates: Number of updates so far, as the bias correction of rules counts them.
        buckets: Buckets whose parameters are updated.
        states: State of each bucket.
    """

    updates: int

    def __init__(
        self,
        rule: UpdateRule | None,
        buckets: Sequence[Bucket],
        states: Sequence[BucketState],
        agreement: Agreement = nullcontext,
    ) -> None:
        """Store the buckets and their states.

        Args:
            rule: Rule that updates all elements, or None if there are several rules.
            buckets: Buckets whose parameters are updated.
            states: State of each bucket.
            agreement: Context of operations that may fail on one rank alone.
        """
        self.buckets, self.states, self._agreement = buckets, states, agreement
        self._averaged_rule = rule if isinstance(rule, AveragedRule) else None

    @abstractmethod
    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """Update the parameters. Collective over the ranks that share buckets.

        Gradient buffers in fp32 on the device of the update contain the divided gradients afterwards.

        Args:
            learning_rate: Learning rate of the step.
            gradient_divisor: Number by which the gradients are divided (loss scale over clip coefficient).
        """

    @property
    def masters(self) -> Sequence[Flat]:
        """Master weights of the elements that this rank updates, for each bucket."""
        return [state[MASTER] for state in self.states]

    @property
    def totals(self) -> dict[str, float]:
        """Sums over all updates that an AveragedRule needs. Checkpoints store them with `updates`."""
        return self._averaged_rule.totals if self._averaged_rule else {}

    @totals.setter
    def totals(self, totals: dict[str, float]) -> None:
        if self._averaged_rule and totals:
            self._averaged_rule.totals = totals

    def state(self) -> Iterator[StateTensor]:
        """Yield the parameters and their optimizer state.

        Master weights are stored as the parameters if these are in fp32 or an AveragedRule computes them.
        """
        for bucket, state in zip(self.buckets, self.states, strict=True):
            single = bucket.dtype == torch.float32 or self._averaged_rule is not None or not bucket.trained
            if not single:
                options = replace(UPDATED, resume_mode="never")
                yield from owned_state(MODEL, bucket.owned_values, bucket, options)
            for name, flat in state.items():
                weights = MODEL if single else MASTER
                kind = weights if name == MASTER else f"{OPTIMIZER}{name}"
                yield from owned_state(kind, flat, bucket, UPDATED)

    def copy_to_parameters(self, trained_only: bool = False, averages: bool = False) -> None:
        """Round the master weights, or the training weights of an AveragedRule, into the parameters.

        Then gather the parameters that other ranks have updated. Collective over the ranks that share
        buckets. `OffloadedOptimizer.step` does this itself, piece by piece.

        Args:
            trained_only: True to gather only the buckets that are trained.
            averages: True to use the master weights also if an AveragedRule trains with others.
        """
        averaged = None if averages else self._averaged_rule
        with self._agreement():
            for bucket, state in zip(self.buckets, self.states, strict=True):
                if state[MASTER] is not bucket.owned_values:
                    for first, piece in _weights(state, averaged):
                        bucket.owned_values[first : first + piece.numel()].copy_(piece)
        gather_updated([bucket for bucket in self.buckets if bucket.trained or not trained_only])

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Set the parameters to the averaged weights inside the context, and restore the same bits after it.

        This matters only for an AveragedRule, which trains with other weights. Collective.
        """
        if self._averaged_rule is None:
            yield
            return
        await_readers(self.buckets)
        self.copy_to_parameters(averages=True)
        yield
        await_readers(self.buckets)
        self.copy_to_parameters()


def _weights(state: BucketState, averaged: AveragedRule | None) -> Iterator[tuple[int, Tensor]]:
    """Yield the first element and the values of pieces of the weights that `copy_to_parameters` copies."""
    if averaged is None:
        yield from read_pieces(state[MASTER])
        return
    both = zip(read_pieces(state[MASTER]), read_pieces(state[averaged.offset_name]), strict=True)
    for (first, masters), (_, offset) in both:
        for at in range(0, masters.numel(), PIECE):
            piece = slice(at, at + PIECE)
            yield first + at, averaged.training_weights(masters[piece], offset[piece])


@dataclass(frozen=True)
class UpdatedElements:
    """Neighbouring elements of one bucket that this rank updates with the same settings.

    Attributes:
        bucket: The bucket.
        part: The elements, counted from the first that this rank updates.
        update_settings: Their settings.
        state: State of these elements by name.
    """

    bucket: Bucket
    part: slice
    update_settings: UpdateSettings
    state: Mapping[str, Tensor]

    def batch(self, updates: Tensor) -> ElementBatch:
        """Return the argument of `UpdateRule.update` for these elements. Local.

        The gradients are a view of the bucket's if these are in fp32, and else a copy in fp32.

        Args:
            updates: 0-dim tensor with the number of updates before this one; the rule adds 1.
        """
        gradients = self.bucket.owned_gradients[self.part].float()
        return ElementBatch(self.state, gradients, updates, self.update_settings)


def update_ranges(
    rule: UpdateRule,
    ranges: Sequence[UpdatedElements],
    updates: int,
    learning_rate: float,
    gradient_divisor: float,
) -> None:
    """Update elements of buckets by a rule. Local.

    If all gradients are in fp32, the rule is called once. Otherwise it is called for one range at a time, so
    that there is only one fp32 copy of gradients at a time.

    Args:
        rule: The rule.
        ranges: The elements.
        updates: Number of updates before this one.
        learning_rate: Learning rate of the step.
        gradient_divisor: Number by which the gradients are divided.
    """
    in_fp32 = all(each.bucket.gradient_dtype == torch.float32 for each in ranges)
    for range_group in [ranges] if in_fp32 and ranges else [[each] for each in ranges]:
        device = range_group[0].state[MASTER].device
        counts = torch.full((len(range_group),), float(updates), device=device).unbind()
        batches = [each.batch(count) for each, count in zip(range_group, counts, strict=True)]
        rule.update(batches, learning_rate, gradient_divisor)
        del batches  # before the next copy of gradients is made


class ResidentOptimizer(Optimizer):
    """Optimizer that keeps the state on the device and updates the elements of all buckets together."""

    def __init__(self, rule: UpdateRule, buckets: Sequence[Bucket]) -> None:
        states = [resident_state(rule, bucket) for bucket in buckets]
        super().__init__(rule, buckets, states)
        self.rule, self.updates = rule, 0
        self._ranges = [
            UpdatedElements(bucket, part, settings, {name: flat[part] for name, flat in state.items()})
            for bucket, state in zip(buckets, states, strict=True)
            for part, settings in (bucket.layout.owned_update_ranges if bucket.trained else ())
        ]

    @override
    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        if self._averaged_rule is not None:
            self._averaged_rule.begin(learning_rate)
        update_ranges(self.rule, self._ranges, self.updates, learning_rate, gradient_divisor)
        self.updates += 1
        self.copy_to_parameters(trained_only=True)


class IdleOptimizer(Optimizer):
    """Optimizer that never updates, because a model is only evaluated, or other ranks update it.

    It may hold the weights in `states` while they are initialized.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket] = (),
        states: Sequence[BucketState] = (),
        agreement: Agreement = nullcontext,
        rule: UpdateRule | None = None,
    ) -> None:
        super().__init__(rule, buckets, states, agreement)
        self.updates = 0

    @override
    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        raise AssertionError("this rank updates no parameters")


def gather_updated(buckets: Sequence[Bucket]) -> None:
    """Gather the parameters that other ranks have updated. Collective over the ranks that share buckets."""
    for work in [bucket.start_gather_updated() for bucket in buckets]:
        if work is not None:
            work.wait()


def resident_state(rule: UpdateRule, bucket: Bucket) -> dict[str, Tensor]:
    """Return new state on the device: master weights, and zeros for each name of the rule.

    A bucket that is not trained only has its parameters as master weights.
    """
    if not bucket.trained:
        assert isinstance(bucket.owned_values, Tensor)
        return {MASTER: bucket.owned_values}
    master = resident_master(rule, bucket)
    return {MASTER: master, **{name: torch.zeros(master.shape, device=master.device) for name in rule.names}}


def resident_master(rule: UpdateRule | None, bucket: Bucket) -> Tensor:
    """Return the master weights of the elements that this rank updates, for a new optimizer. Local.

    They are the parameters themselves if `are_masters`, and otherwise a new fp32 copy on the same device.
    """
    values = bucket.owned_values
    assert isinstance(values, Tensor)
    return values if are_masters(bucket.dtype, True, rule) else values.to(torch.float32, copy=True)
