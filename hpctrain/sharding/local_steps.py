"""Replicas that make steps of their own, and outer steps between them.

Local SGD (arXiv 1805.09767) takes the mean of their weights every so many steps, post-local SGD (1808.07217)
after a warm-up in which gradients are summed in every step. DiLoCo (2311.08105) takes the difference of the
outer weights and that mean for a gradient, and makes a Nesterov step by it. Streaming DiLoCo (2501.18512)
does so with one fragment of the model after the other, while training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.memory.scratch import Flat, ScratchTensor
from hpctrain.sharding.bucket import Bucket, await_readers
from hpctrain.sharding.compression.codecs import Codec
from hpctrain.sharding.fragments import FragmentRange, FragmentSchedule
from hpctrain.sharding.outer_format import start_sum, sum_bytes
from hpctrain.sharding.replica_sync import SyncEveryStep, Weights
from hpctrain.sharding.state import MODEL, StateTensor, own_state

_SWAPPED = 1 << 20
"""Elements that are swapped at a time."""


@dataclass(frozen=True)
class OuterOptimizer:
    """v = momentum v + g; weights -= rate (g + momentum v), with g the outer weights less the replicas' mean.

    With rate 1 and momentum 0 the mean takes the place of the weights.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0

    def update(self, weights: Tensor, velocity: Tensor | None, gradient: Tensor) -> None:
        """In place."""
        if velocity is not None:
            velocity.mul_(self.momentum).add_(gradient)
            weights.sub_(velocity, alpha=self.learning_rate * self.momentum)
        weights.sub_(gradient, alpha=self.learning_rate)


class LocalSteps:
    """Lets replicas part for some steps, and has the outer model between them, in fp32, which a checkpoint
    holds as the model.

    Replicas take it as it is when it was updated, or, with `blend`, keep that share of their own weights.
    With a delay, what is on its way is waited for when it is due, or when state is asked for, which holds it.
    """

    differs = True

    def __init__(
        self,
        buckets: Sequence[Bucket],
        fragments: Sequence[Sequence[FragmentRange]],
        timing: FragmentSchedule,
        rule: OuterOptimizer,
        blend: float = 0.0,
        codec: Codec | None = None,
    ) -> None:
        self.buckets, self.fragments = list(buckets), fragments
        self.timing, self.rule, self.blend, self.codec = timing, rule, blend, codec
        self.outer = [_zeros(bucket) for bucket in buckets]
        self._velocity = [_zeros(bucket) for bucket in buckets] if rule.momentum else []
        self._sums = [_zeros(bucket) for bucket in buckets] if timing.delay else []
        self._works: dict[int, list[Work[Tensor]]] = {}
        self._begun: dict[int, int] = {}
        self._updates = 0

    @property
    def replicas(self) -> int:
        """How many there are."""
        return self.buckets[0].sharding.replicas.size

    def begin(self, weights: Weights) -> None:
        """See Outer: all begin with the outer model."""
        self._updates = weights.updates
        self._follow(weights)

    @property
    def under_way(self) -> dict[str, int]:
        """See Outer: of fragments, of how many, after how many updates they were sent."""
        return {f"{each}/{self.timing.fragments}": updates for each, updates in self._begun.items()}

    def resumed(self, weights: Weights, replicas: int, under_way: Mapping[str, int]) -> None:
        """See Outer: another number of replicas begins with the outer model, whatever theirs were. What was
        sent of other fragments, or takes effect at no time now, is left: it will be sent once more.
        """
        self._updates = weights.updates
        self._works.clear()
        names = {f"{each}/{self.timing.fragments}": each for each in range(self.timing.fragments)}
        self._begun = {names[name]: updates for name, updates in under_way.items() if name in names}
        if replicas != self.replicas:
            for master, outer in zip(weights.masters, self.outer, strict=True):
                _write(master, outer)
            weights.publish()

    @property
    def scratch_bytes(self) -> int:
        """See Outer: of all pieces that are under way at once, while training goes on."""
        timing, group = self.timing, self.buckets[0].sharding.replicas
        if not timing.delay:
            return 0
        at_once = min(timing.fragments, -(-timing.delay * timing.fragments // timing.local_steps))
        needs = (
            sum(sum_bytes(group, piece.lengths, self.codec) for piece in each) for each in self.fragments
        )
        return sum(sorted(needs)[-at_once:])

    def before_update(self, buckets: Sequence[Bucket]) -> None:
        """See Outer: a replica's gradients are those of its own tokens."""
        if self._updates < self.timing.warmup:
            SyncEveryStep().before_update(buckets)
            return
        for works in self._works.values():
            for work in works:
                work.test()
        if self.replicas > 1:
            for bucket in buckets:
                bucket.own_gradients.mul_(self.replicas)

    def after_update(self, weights: Weights) -> Mapping[str, Tensor]:
        """See Outer: of fragments that were synchronized, the norms of the outer gradient and of the
        difference of a replica from the outer model, the root of the mean over replicas.
        """
        self._updates, timing = weights.updates, self.timing
        if self._updates <= timing.warmup:
            self._follow(weights)
            return {}
        begin, due = timing.begin(self._updates), timing.due(self._updates)
        self._begun |= dict.fromkeys(begin, self._updates)
        due = [each for each in due if self._begun.get(each) == self._updates - timing.delay]
        for fragment in due:
            del self._begun[fragment]
        # On all ranks, those too that have no piece of a fragment.
        names = ("outer_gradient_norm", "replica_distance") if due else ()
        device = self.outer[0].device
        told = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
        if timing.delay > 1:
            # What comes first of two operations has half of the time, the other one the rest.
            for fragment in timing.begin(self._updates - -(-timing.delay // 2)):
                for work in self._works.get(fragment, []):
                    work.proceed()
        for fragment in due if timing.delay else []:
            works = self._works.pop(fragment, [])
            for index, piece in enumerate(self.fragments[fragment]):
                # None is under way of what was read from a checkpoint.
                gradient = works[index].wait() if works else self._gradient(piece)
                self._finish(piece, gradient, weights, told)
                gradient.zero_()
        for fragment in begin:
            pieces = self.fragments[fragment]
            if timing.delay:
                self._works[fragment] = [self._start(piece, weights) for piece in pieces]
                continue
            ahead = [self._start(piece, weights) for piece in pieces[:1]]
            for piece, following in zip(pieces, [*pieces, None][1:], strict=True):
                if following is not None:
                    ahead.append(self._start(following, weights))
                self._finish(piece, ahead.pop(0).wait(), weights, told)
        if told:
            weights.publish()
        return told

    @contextmanager
    def shown(self, weights: Weights) -> Iterator[None]:
        """Replace the weights by those that replicas have in common, during the block."""
        self._swap(weights)
        yield
        self._swap(weights)

    def state(self) -> Iterator[StateTensor]:
        """See Stateful: the outer model, its momentum, and the outer gradients that are under way, on all
        ranks there by then.
        """
        for works in self._works.values():
            for work in works:
                work.wait()
        kinds = {"outer/momentum": self._velocity, "streaming/outer_gradient": self._sums}
        for number, bucket in enumerate(self.buckets):
            yield from own_state(MODEL, self.outer[number], bucket, "always", False, apart=False)
            for kind, flats in kinds.items():
                if flats:
                    yield from own_state(kind, flats[number], bucket, "if stored", False, apart=False)

    def _start(self, piece: FragmentRange, weights: Weights) -> Work[Tensor]:
        """Start to sum what each replica's weights differ from the outer ones by, as its share of a mean."""
        gradient = self._gradient(piece)
        own = _read(weights.masters[piece.bucket][piece.span], gradient)
        torch.sub(self.outer[piece.bucket][piece.span], own, out=gradient).div_(self.replicas)
        replicas = self.buckets[piece.bucket].sharding.replicas
        return start_sum(replicas, gradient, piece.lengths, None if piece.exact else self.codec)

    def _finish(
        self, piece: FragmentRange, gradient: Tensor, weights: Weights, told: dict[str, Tensor]
    ) -> None:
        """The outer step of a piece, and what each replica takes of it."""
        outer = self.outer[piece.bucket][piece.span]
        velocity = self._velocity[piece.bucket][piece.span] if self._velocity else None
        self.rule.update(outer, velocity, gradient)
        master = weights.masters[piece.bucket][piece.span]
        own, first = _read(master, outer), piece.span.start
        counted = [slice(each.start - first, each.stop - first) for each in piece.counted]
        for name, parts in (
            ("outer_gradient_norm", (gradient[each] for each in counted)),
            ("replica_distance", (own[each] - outer[each] for each in counted)),
        ):
            for part in parts:
                told[name] += torch.linalg.vector_norm(part, dtype=torch.float64).square() / self.replicas
        _write(master, outer if self.blend == 0 else own.mul(self.blend).add_(outer, alpha=1 - self.blend))

    def _gradient(self, piece: FragmentRange) -> Tensor:
        """Where the outer gradient of a piece is: with a delay it has memory of its own, or else that of
        gradients, which the update has used.
        """
        if self._sums:
            return self._sums[piece.bucket][piece.span]
        gradients = self.buckets[piece.bucket].own_gradients[piece.span]
        return (
            gradients
            if gradients.dtype == torch.float32
            else torch.empty_like(gradients, dtype=torch.float32)
        )

    def _follow(self, weights: Weights) -> None:
        """The outer model is that of all replicas, which have the same."""
        for outer, master in zip(self.outer, weights.masters, strict=True):
            outer.copy_(_read(master, outer))

    def _swap(self, weights: Weights) -> None:
        """Let the outer weights and this replica's own change places."""
        await_readers(self.buckets)
        for flat, other in zip(weights.masters, self.outer, strict=True):
            for first in range(0, other.numel(), _SWAPPED):
                part, outer = flat[first : first + _SWAPPED], other[first : first + _SWAPPED]
                own = _read(part, outer).clone()
                _write(part, outer)
                outer.copy_(own)
        weights.publish()


def _zeros(bucket: Bucket) -> Tensor:
    """A value in fp32 for each of a bucket's own."""
    return bucket.sharding.group.empty((bucket.own.stop - bucket.own.start,), torch.float32).zero_()


def _read(flat: Flat, like: Tensor) -> Tensor:
    """The values where another tensor is, themselves if they are there."""
    values = flat.load() if isinstance(flat, ScratchTensor) else flat
    return values.to(like.device)


def _write(flat: Flat, values: Tensor) -> None:
    flat.copy_(values.cpu() if isinstance(flat, ScratchTensor) else values)
