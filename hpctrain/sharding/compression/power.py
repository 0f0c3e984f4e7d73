"""PowerSGD (Vogels et al., arXiv 1905.13727): a matrix of gradients travels as a product of two thin ones.

Of M [n, m], a rank's gradients and what it owes of earlier ones, P = M Q [n, r] is summed over the ranks,
its columns are made orthonormal, and Q = M' P [m, r] is summed: P Q' is the projection of M's sum on r
directions. That is a step of power iteration which begins with the Q of the step before, so that these follow
the largest ones of the gradients. What a rank's M has besides its share of the result is its residual, which
it adds to its next gradients (error feedback).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.work import SequentialWork, Work
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.communication import PowerSgdTable
from hpctrain.host.device import on_host
from hpctrain.model.initialize import fill_normal
from hpctrain.parallel.shard import Shard
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.matrices import FACTOR, Matrices
from hpctrain.sharding.state import StateTensor

RESIDUAL = "reducer/residual"

DEPENDENT = 1e-14
"""A column is none that has no more of its square length besides those before it: fp32's rounding."""

BLOCK, DEVICE_BLOCK = 1 << 17, 1 << 24
"""Elements of the result that are made at a time: on the host so many as stay in a core's cache."""


def orthonormal(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Of the columns of matrices, each [k, n, r] fp32, orthonormal ones that span the same.

    Cholesky QR twice, in fp64 (Fukaya et al. 2014), where one pass would lose what columns that are nearly
    parallel differ in. Columns that depend on those before them become zero, rows of zeros stay zero, and
    what is not finite is not finite afterwards.
    """
    if not stacks:
        return []
    rank = max(stack.shape[-1] for stack in stacks)
    wide = [stack.mT.double().contiguous() for stack in stacks]  # in rows, which products like better
    for _ in range(2):
        grams = [functional.pad(each @ each.mT, (0, rank - each.shape[1]) * 2) for each in wide]
        factors = _orthonormalizing(torch.cat(grams)).mT.split([len(gram) for gram in grams])
        ranks = [each.shape[1] for each in wide]
        wide = [factor[:, :r, :r] @ each for each, factor, r in zip(wide, factors, ranks, strict=True)]
    return [each.float().mT for each in wide]


def _orthonormalizing(grams: Tensor) -> Tensor:
    """Upper triangular T [k, r, r] for which T' G T is one, of G [k, r, r]; dependent columns of T are zero.

    Elimination beside the unit matrix. Every operation is one of elements, whose bits do not depend on how
    many matrices there are.
    """
    rank = grams.shape[-1]
    least = DEPENDENT * grams.diagonal(dim1=-2, dim2=-1)
    unit = torch.eye(rank, dtype=grams.dtype, device=grams.device).expand_as(grams)
    rows = torch.cat((grams, unit), -1)
    for j in range(rank):
        pivot, limit = rows[:, j, j], least[:, j]
        dependent = (pivot <= limit) & (limit < inf)
        scale = pivot.rsqrt().masked_fill(dependent, 0)
        rows[:, j].mul_(scale.unsqueeze(-1))
        rows[:, j + 1 :].sub_(rows[:, j, j + 1 : rank].unsqueeze(-1) * rows[:, j].unsqueeze(-2))
    return rows[:, :, rank:].mT


class Stack:
    """Matrices of one shape [n, m]: the residual of each, and the Q' [k, r, m] that it begins with.

    `sums` [k, n, m] is what each has to add to a step's sum, in the memory of the residuals. Where there is
    no `feedback` there are none, and it is there only while it is needed.
    """

    def __init__(self, members: Sequence[Matrices], feedback: bool, seed: int, device: torch.device) -> None:
        self.members, self.device = members, device
        first = members[0]
        self.count, self.n, self.m, self.rank = sum(m.count for m in members), first.n, first.m, first.rank
        self.elements = self.count * self.n * self.m
        shape = (self.count, self.n, self.m)
        self.residual = torch.zeros(shape, device=device) if feedback else None
        self.sums = torch.zeros(0, device=device)
        self.factor = torch.zeros(self.count, self.rank, self.m, device=device)
        for each, values in self.of_members(self.factor):
            if not values.is_meta:
                fill_normal(values, 0, each.first_factor, seed, 1.0)

    def of_members(self, values: Tensor) -> Iterator[tuple[Matrices, Tensor]]:
        """Each parameter's elements, flat, of values of all matrices, [k, ...]."""
        first = 0
        for each in self.members:
            yield each, values[first : first + each.count].view(-1)
            first += each.count

    def add(self, gradients: Tensor) -> Tensor:
        """`sums`, with the gradients of a bucket added to what is owed."""
        views = self._views(gradients)
        if self.residual is None:
            self.sums = torch.stack(views).float()
        else:
            self.sums = self.residual
            for own, view in zip(self.sums.unbind(), views, strict=True):
                own.add_(view)
        return self.sums

    def subtract(self, left: Tensor, right: Tensor, gradients: Tensor, share: float) -> None:
        """Put the products of `left` [k, n, r] and `right` [k, r, m] in place of the bucket's gradients; what
        `sums` has besides their `share` is owed.
        """
        block = BLOCK if on_host(self.device) else DEVICE_BLOCK
        rows = min(self.n, max(1, block // self.m))
        several = max(1, block // (rows * self.m)) if rows == self.n else 1
        views = self._views(gradients)
        for k in range(0, self.count, several):
            for row in range(0, self.n, rows):
                product = left[k : k + several, row : row + rows] @ right[k : k + several]
                for view, own in zip(views[k : k + several], product.unbind(), strict=True):
                    view[row : row + rows].copy_(own)
                if self.residual is not None:
                    self.residual[k : k + several, row : row + rows].sub_(product, alpha=share)
        self.sums = self.sums[:0]

    def _views(self, gradients: Tensor) -> list[Tensor]:
        """Each matrix in a bucket's gradients."""
        return [
            matrix
            for each in self.members
            for matrix in gradients[each.elements].view(each.count, self.n, self.m).unbind()
        ]


class PowerSgd:
    """Sums the gradients of a bucket's matrices by factors of `rank` columns, and all others exactly, in two
    all-reduces.

    What a new run begins with are numbers of the `seed`. Parameters that are not trained do not travel.
    """

    def __init__(self, bucket: Bucket, rank: int, seed: int, feedback: bool = True) -> None:
        self.bucket, self.group, self._feedback = bucket, bucket.sharding.group, feedback
        device = self.group.device
        trained = [Matrices.of(each, rank) for each in bucket.segments if each.parameter.requires_grad]
        alike: dict[object, list[Matrices]] = {}
        for each in trained:
            if each.rank:
                alike.setdefault(each.alike, []).append(each)
        self.stacks = [Stack(members, feedback, seed, device) for members in alike.values()]
        self._exact = [each for each in trained if not each.rank]
        # Nothing is owed of these but by a run that went on from one which sent them as factors, or so.
        self._owed = torch.zeros(
            sum(each.segment.length for each in self._exact) if feedback else 0, device=device
        )
        self._next: list[Tensor] = []
        most, longest = (max((s.factor.shape[d] for s in self.stacks), default=0) for d in (1, 2))
        self._fresh = torch.zeros(most, longest, device=device)
        if not self._fresh.is_meta:
            fill_normal(self._fresh.view(-1), 0, Shard.whole(FACTOR, (most, longest)), seed, 1.0)

    @staticmethod
    def of(deck: Deck, bucket: Bucket) -> PowerSgd:
        """That of a deck."""
        keys = deck.communication.compression
        assert isinstance(keys, PowerSgdTable)
        return PowerSgd(bucket, keys.rank, deck.run.seed, keys.error_feedback)

    @property
    def messages(self) -> tuple[int, int]:
        """Elements of the two all-reduces, in fp32."""
        exact = sum(each.segment.length for each in self._exact)
        first = sum(stack.count * stack.n * stack.rank for stack in self.stacks)
        return exact + first, sum(stack.factor.numel() for stack in self.stacks)

    @property
    def scratch_bytes(self) -> int:
        """Messages, factors in fp32 and fp64, a block of the result; and what reductions receive."""
        elements = sum(stack.elements for stack in self.stacks)
        held = 4 * sum(self.messages) + self._fresh.numel()
        held += min(elements, BLOCK if on_host(self.group.computes_on) else DEVICE_BLOCK)
        held += 0 if self._feedback else elements
        return 4 * held + max(self.group.host.scratch_bytes(each, 4) for each in self.messages)

    def begin(self, updates: int) -> None:
        """Begin a step."""

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """Start to sum the gradients of the bucket over the ranks of its group."""
        return SequentialWork(self._steps(gradients, sums), sums)

    def _steps(self, gradients: Tensor, sums: Tensor) -> Iterator[Work[Tensor]]:
        exact = [gradients[each.elements] for each in self._exact]
        left = [torch.bmm(stack.add(gradients), stack.factor.mT) for stack in self.stacks]
        message, parts = self._message([*left, *exact])
        message[message.numel() - self._owed.numel() :].add_(self._owed)
        self._owed.zero_()
        yield self.group.start_all_reduce(message)
        for whole, part in zip(exact, parts[len(left) :], strict=True):
            whole.copy_(part)
        if self.stacks:
            left = orthonormal(parts[: len(left)])
            right = [torch.bmm(each.mT, stack.sums) for stack, each in zip(self.stacks, left, strict=True)]
            message, parts = self._message(right)
            yield self.group.start_all_reduce(message)
            # In memory of their own: the last bits of products may depend on where it begins.
            self._next = [part.clone() for part in parts]
            for stack, p, q in zip(self.stacks, left, self._next, strict=True):
                stack.subtract(p, q, gradients, 1 / self.group.size)
        if sums is not gradients:
            own = gradients[self.bucket.slice]
            if own.data_ptr() != sums.data_ptr():
                sums.copy_(own)

    def _message(self, parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Tensors behind each other in one of fp32, and each in it."""
        message = self.group.empty((sum(part.numel() for part in parts),), torch.float32)
        pieces = message.split([part.numel() for part in parts])
        seen = [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
        for piece, part in zip(seen, parts, strict=True):
            piece.copy_(part)
        return message, seen

    def after_step(self, updated: bool, factor: float) -> None:
        """See Summation. What a skipped step owes is lost, and the next one begins with the same Q."""
        for stack in self.stacks:
            if stack.residual is not None and not updated:
                stack.residual.zero_()
            elif stack.residual is not None and factor != 1:
                stack.residual.mul_(factor)
        if updated and self._next:
            for stack, sums in zip(self.stacks, self._next, strict=True):
                # Unit columns keep tiny gradients from vanishing in products. What had none, or fewer
                # directions than Q has columns, tries others from here on, or it would never have more.
                lengths = torch.linalg.vector_norm(sums, dim=2, keepdim=True)
                fresh = self._fresh[: stack.rank, : stack.m]
                stack.factor.copy_(torch.where(lengths > 0, sums / lengths, fresh))
        self._next = []

    def state(self) -> Iterator[StateTensor]:
        """See Stateful: the residual is each rank's own, Q is common to all."""
        sharding = self.bucket.sharding
        group, replicas = sharding.group, sharding.replicas
        place = replicas.rank * group.size + group.rank, sharding.ranks
        for each, values in self._residuals():
            shard = each.segment.parameter.shard.stacked(*place)
            copy = each.segment.replication.copy(False, group, replicas)
            yield StateTensor(RESIDUAL, shard, values, 0, copy, True, "as a sum")
        for stack in self.stacks:
            for each, values in stack.of_members(stack.factor):
                shard = each.stored_factor
                if sharding.apart:
                    shard = shard.stacked(replicas.rank, replicas.size)
                replication = each.segment.replication
                copy = replication.copy(False, *sharding.parted)
                holders = tuple(group for group in replication.everyone if group not in sharding.parted)
                yield StateTensor(
                    FACTOR, shard, values, 0, copy, True, "if stored", False, sharding.apart, holders=holders
                )

    def _residuals(self) -> Iterator[tuple[Matrices, Tensor]]:
        """What is owed of each parameter."""
        for stack in self.stacks:
            if stack.residual is not None:
                yield from stack.of_members(stack.residual)
        if self._owed.numel():
            lengths = [each.segment.length for each in self._exact]
            yield from zip(self._exact, self._owed.split(lengths), strict=True)
