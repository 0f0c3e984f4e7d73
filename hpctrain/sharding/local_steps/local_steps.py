"""Replicas that make steps of their own, and outer steps that bring them together.

- Local SGD (arXiv 1805.09767) averages the replicas' weights every few steps.
- Post-local SGD (arXiv 1808.07217) does so after a warm-up, in which gradients are summed in every step.
- DiLoCo (arXiv 2311.08105) treats the difference between the outer weights and the average as a gradient, and
  makes a step of Nesterov momentum with it.
- Streaming DiLoCo (arXiv 2501.18512) synchronizes one fragment of the model after another while training
  continues.

Example with 2 replicas, 1 parameter and learning rate 1 without momentum: the outer weight is 1.0, and after
10 local steps the replicas have 0.8 and 0.6. The outer gradient is 1.0 - 0.7 = 0.3, so the new outer weight
is 0.7, from which both continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.work import Work
from hpctrain.memory.scratch import Flat, ScratchTensor
from hpctrain.sharding.bucket import Bucket, await_readers
from hpctrain.sharding.compression.codecs import Codec
from hpctrain.sharding.local_steps.fragments import FragmentRange, FragmentSchedule
from hpctrain.sharding.local_steps.outer_format import start_sum
from hpctrain.sharding.replica_sync import ReplicaSync, SyncEveryStep, Weights
from hpctrain.sharding.state import MODEL, UPDATED, StateOptions, StateTensor, owned_state

_SWAP_ELEMENTS = 1 << 20
"""Number of elements that are exchanged at a time."""


@dataclass(frozen=True)
class OuterOptimizer:
    """Nesterov momentum over outer gradients.

    v = momentum v + g; weights -= learning_rate (g + momentum v), where g is the outer weights minus the mean
    of the replicas' weights. With learning rate 1 and momentum 0, the mean replaces the weights.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0

    def update(self, weights: Tensor, velocity: Tensor | None, gradient: Tensor) -> None:
        """Update the outer weights and the velocity (None without momentum) in place."""
        if velocity is not None:
            velocity.mul_(self.momentum).add_(gradient)
            weights.sub_(velocity, alpha=self.learning_rate * self.momentum)
        weights.sub_(gradient, alpha=self.learning_rate)


class LocalSteps(ReplicaSync):
    """Replica synchronization of Local SGD and DiLoCo.

    It stores the outer model in fp32. A checkpoint contains it as the model, and the weights of each replica
    besides. With a delay, sums that are in flight are awaited when they are due, or when `state` is called.

    Args:
        buckets: Buckets of this rank.
        fragments: Ranges of each fragment.
        schedule: When fragments are synchronized.
        rule: Outer optimizer.
        blend: Share of its own weights that a replica keeps when it receives the outer weights.
        codec: Format in which differences are exchanged; None is fp32.
    """

    common_model_differs = True

    def __init__(
        self,
        buckets: Sequence[Bucket],
        fragments: Sequence[Sequence[FragmentRange]],
        schedule: FragmentSchedule,
        rule: OuterOptimizer,
        blend: float = 0.0,
        codec: Codec | None = None,
    ) -> None:
        self.buckets, self.fragments = list(buckets), fragments
        self.schedule, self.rule, self.blend, self.codec = schedule, rule, blend, codec
        self.outer = [_zeros(bucket) for bucket in buckets]
        self._velocity = [_zeros(bucket) for bucket in buckets] if rule.momentum else []
        self._sums = [_zeros(bucket) for bucket in buckets] if schedule.delay else []
        self._works: dict[int, list[Work[Tensor]]] = {}
        self._sent_after: dict[int, int] = {}
        self._updates = 0

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.buckets[0].sharding.replicas.size

    @override
    def begin(self, weights: Weights) -> None:
        self._updates = weights.updates
        self._copy_to_outer(weights)

    @override
    @property
    def in_flight(self) -> dict[str, int]:
        """Number of updates after which each fragment in flight was sent, by "fragment/fragments"."""
        return {f"{each}/{self.schedule.fragments}": updates for each, updates in self._sent_after.items()}

    @override
    def resume(self, weights: Weights, replicas: int, in_flight: Mapping[str, int]) -> None:
        self._updates = weights.updates
        self._works.clear()
        names = {f"{each}/{self.schedule.fragments}": each for each in range(self.schedule.fragments)}
        self._sent_after = {names[name]: updates for name, updates in in_flight.items() if name in names}
        if replicas != self.replicas:
            for master, outer in zip(weights.masters, self.outer, strict=True):
                _write(master, outer)
            weights.copy_to_parameters()

    @override
    def before_update(self, buckets: Sequence[Bucket]) -> None:
        if self._updates < self.schedule.warmup:
            SyncEveryStep().before_update(buckets)
            return
        for works in self._works.values():
            for work in works:
                work.test()
        if self.replicas > 1:
            for bucket in buckets:
                # The loss was divided by the tokens of all replicas.
                bucket.owned_gradients.mul_(self.replicas)

    @override
    def after_update(self, weights: Weights) -> Mapping[str, Tensor]:
        """Update the outer weights of fragments that are due after this update, and start to exchange others.

        Replicas receive the new outer weights. The schedule says which fragments are due and which begin.
        Collective over the replicas.

        Returns:
            If fragments were synchronized, the square sums of `outer_gradient_norm`, and of
            `replica_distance`, the distance of a replica from the outer model, averaged over replicas.
        """
        self._updates, schedule = weights.updates, self.schedule
        if self._updates <= schedule.warmup:
            self._copy_to_outer(weights)
            return {}
        begin, due = schedule.begin(self._updates), schedule.due(self._updates)
        self._sent_after |= dict.fromkeys(begin, self._updates)
        due = [each for each in due if self._sent_after.get(each) == self._updates - schedule.delay]
        for fragment in due:
            del self._sent_after[fragment]
        # Also on ranks that have no part of a fragment.
        names = ("outer_gradient_norm", "replica_distance") if due else ()
        device = self.outer[0].device
        metrics = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
        if schedule.delay:
            self._exchange_ahead(begin, due, weights, metrics)
        else:
            for fragment in begin:
                self._exchange_now(self.fragments[fragment], weights, metrics)
        if metrics:
            weights.copy_to_parameters()
        return metrics

    def _exchange_ahead(
        self, begin: Sequence[int], due: Sequence[int], weights: Weights, metrics: dict[str, Tensor]
    ) -> None:
        """Complete the fragments that are due, and start to average those that begin."""
        if self.schedule.delay > 1:
            # The first of two operations gets half of the time, the second one the rest.
            for fragment in self.schedule.begin(self._updates - -(-self.schedule.delay // 2)):
                for work in self._works.get(fragment, []):
                    work.proceed()
        for fragment in due:
            works = self._works.pop(fragment, [])
            for index, piece in enumerate(self.fragments[fragment]):
                # After a resume there is no work: the gradient was read from the checkpoint.
                gradient = works[index].wait() if works else self._gradient(piece)
                self._finish(piece, gradient, weights, metrics)
                gradient.zero_()
        for fragment in begin:
            self._works[fragment] = [self._start(piece, weights) for piece in self.fragments[fragment]]

    def _exchange_now(
        self, pieces: Sequence[FragmentRange], weights: Weights, metrics: dict[str, Tensor]
    ) -> None:
        """Average a fragment and make its outer step. The next range is averaged while one is updated."""
        ahead = [self._start(piece, weights) for piece in pieces[:1]]
        for piece, following in zip(pieces, [*pieces, None][1:], strict=True):
            if following is not None:
                ahead.append(self._start(following, weights))
            self._finish(piece, ahead.pop(0).wait(), weights, metrics)

    @override
    @contextmanager
    def common_weights(self, weights: Weights) -> Iterator[None]:
        self._swap(weights)
        yield
        self._swap(weights)

    def state(self) -> Iterator[StateTensor]:
        """Yield the outer model, its momentum, and the outer gradients in flight.

        Collective: it waits for those in flight, so that all ranks have received them.
        """
        for works in self._works.values():
            for work in works:
                work.wait()
        kinds = {"outer/momentum": self._velocity, "streaming/outer_gradient": self._sums}
        for number, bucket in enumerate(self.buckets):
            yield from owned_state(MODEL, self.outer[number], bucket, replace(UPDATED, diverging=False))
            for kind, flats in kinds.items():
                if flats:
                    options = StateOptions(changes_in_step=False, diverging=False)
                    yield from owned_state(kind, flats[number], bucket, options)

    def _start(self, piece: FragmentRange, weights: Weights) -> Work[Tensor]:
        """Start to average the differences between the outer weights and those of each replica."""
        gradient = self._gradient(piece)
        local = _read(weights.masters[piece.bucket][piece.span], gradient)
        torch.sub(self.outer[piece.bucket][piece.span], local, out=gradient).div_(self.replicas)
        replicas = self.buckets[piece.bucket].sharding.replicas
        return start_sum(replicas, gradient, piece.lengths, None if piece.exact else self.codec)

    def _finish(
        self, piece: FragmentRange, gradient: Tensor, weights: Weights, metrics: dict[str, Tensor]
    ) -> None:
        """Make the outer step of a range, and copy the result into this replica's weights."""
        outer = self.outer[piece.bucket][piece.span]
        velocity = self._velocity[piece.bucket][piece.span] if self._velocity else None
        self.rule.update(outer, velocity, gradient)
        master = weights.masters[piece.bucket][piece.span]
        local = _read(master, outer)
        for part in piece.norm_slices:
            metrics["outer_gradient_norm"] += self._mean_square_sum(gradient[part])
            metrics["replica_distance"] += self._mean_square_sum(local[part] - outer[part])
        _write(master, outer if self.blend == 0 else local.mul(self.blend).add_(outer, alpha=1 - self.blend))

    def _mean_square_sum(self, values: Tensor) -> Tensor:
        """Return what this replica's values add to the mean over replicas of a sum of squares, fp64 0-dim."""
        norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
        return norm.square() / self.replicas

    def _gradient(self, piece: FragmentRange) -> Tensor:
        """Return memory for the outer gradient of a range.

        With a delay it is separate memory. Otherwise it is that of gradients, which the update does not need
        any more.
        """
        if self._sums:
            return self._sums[piece.bucket][piece.span]
        gradients = self.buckets[piece.bucket].owned_gradients[piece.span]
        in_fp32 = gradients.dtype == torch.float32
        return gradients if in_fp32 else torch.empty_like(gradients, dtype=torch.float32)

    def _copy_to_outer(self, weights: Weights) -> None:
        """Copy the weights, which are equal in all replicas, into the outer model."""
        for outer, master in zip(self.outer, weights.masters, strict=True):
            outer.copy_(_read(master, outer))

    def _swap(self, weights: Weights) -> None:
        """Exchange the outer weights with those of this replica."""
        await_readers(self.buckets)
        for flat, other in zip(weights.masters, self.outer, strict=True):
            for first in range(0, other.numel(), _SWAP_ELEMENTS):
                part, outer = flat[first : first + _SWAP_ELEMENTS], other[first : first + _SWAP_ELEMENTS]
                local = _read(part, outer).clone()
                _write(part, outer)
                outer.copy_(local)
        weights.copy_to_parameters()


def _zeros(bucket: Bucket) -> Tensor:
    """Return fp32 zeros, one for each element of the bucket that this rank owns."""
    owned = bucket.owned_slice
    return bucket.sharding.group.empty((owned.stop - owned.start,), torch.float32).zero_()


def _read(flat: Flat, like: Tensor) -> Tensor:
    """Return the values on the device of another tensor, without a copy if they are there."""
    values = flat.load() if isinstance(flat, ScratchTensor) else flat
    return values.to(like.device)


def _write(flat: Flat, values: Tensor) -> None:
    flat.copy_(values.cpu() if isinstance(flat, ScratchTensor) else values)
