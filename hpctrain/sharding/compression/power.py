"""PowerSGD (Vogels et al., arXiv 1905.13727) sends a matrix of gradients as a product of two thin ones.

M [n, m] is a rank's matrix of gradients plus its residual. P = M Q [n, r] is summed over the ranks, and its
columns are made orthonormal. Then Q = M' P [m, r] is summed. P Q' is the projection of the sum of all M on r
directions. This is one step of power iteration that begins with the Q of the previous step, so the directions
converge to the largest ones of the gradients. The difference between a rank's M and its share of the result
is its residual, which it adds to its next gradients (error feedback).

Example: a matrix of 4096 x 4096 elements takes 64 MiB in fp32. With r = 4, P and Q take 64 KiB each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from hpctrain.comm.work import SequentialWork, Work
from hpctrain.host.device import on_host
from hpctrain.model.parameters.initialize import fill_normal
from hpctrain.parallel.shards import Shard
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.matrices import FACTOR, Matrices
from hpctrain.sharding.reducer import GradientReduction, rescale_residuals
from hpctrain.sharding.state import StateOptions, StateTensor, rank_state, segment_state

RESIDUAL = "reducer/residual"

DEPENDENT = 1e-14
"""Relative square norm below which a column counts as dependent on earlier columns: rounding of fp32."""

ELEMENTS_AT_ONCE, ELEMENTS_AT_ONCE_ON_GPU = 1 << 17, 1 << 24
"""Number of elements of the result that are computed at a time, on CPUs and on GPUs.

On CPUs they fit into a core's cache.
"""


def orthonormal(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return orthonormal columns that span the same spaces as the columns of matrices, each [k, n, r] fp32.

    It uses Cholesky QR twice, in fp64 (Fukaya et al. 2014); a single pass is inaccurate if columns are nearly
    parallel. Columns that depend on earlier ones become zero, rows of zeros remain zero, and values that are
    not finite remain so.
    """
    if not stacks:
        return []
    rank = max(stack.shape[-1] for stack in stacks)
    wide = [stack.mT.double().contiguous() for stack in stacks]  # as rows, for which products are faster
    for _ in range(2):
        grams = [functional.pad(each @ each.mT, (0, rank - each.shape[1]) * 2) for each in wide]
        factors = _orthonormalizing(torch.cat(grams)).mT.split([len(gram) for gram in grams])
        ranks = [each.shape[1] for each in wide]
        wide = [factor[:, :r, :r] @ each for each, factor, r in zip(wide, factors, ranks, strict=True)]
    return [each.float().mT for each in wide]


def _orthonormalizing(grams: Tensor) -> Tensor:
    """Return upper triangular T [k, r, r] for which T' G T is the unit matrix, for G [k, r, r].

    Dependent columns of T are zero. It is an elimination next to a unit matrix. All operations are
    element-wise, so the bits do not depend on the number of matrices.
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


def block_elements(device: torch.device) -> int:
    """Return the number of elements of the result that are computed at a time."""
    return ELEMENTS_AT_ONCE if on_host(device) else ELEMENTS_AT_ONCE_ON_GPU


class MatrixStack:
    """Matrices of one shape [n, m] with their residuals and factors.

    Attributes:
        factor: Q' of each matrix, [k, r, m].
        residual: Residual of each matrix, [k, n, m]; None without `feedback`.
        sums: Gradients plus residuals, [k, n, m], in the memory of the residuals. Without `feedback` they
            exist only while they are needed.
    """

    def __init__(self, members: Sequence[Matrices], feedback: bool, seed: int, device: torch.device) -> None:
        self.members, self.device = members, device
        first = members[0]
        self.count, self.n, self.m = sum(m.count for m in members), first.n, first.m
        self.factor_columns = first.factor_columns
        self.elements = self.count * self.n * self.m
        shape = (self.count, self.n, self.m)
        self.residual = torch.zeros(shape, device=device) if feedback else None
        self.sums = torch.zeros(0, device=device)
        self.factor = torch.zeros(self.count, self.factor_columns, self.m, device=device)
        for each, values in self.of_members(self.factor):
            if not values.is_meta:
                fill_normal(values, 0, each.first_factor, seed, 1.0)

    def of_members(self, values: Tensor) -> Iterator[tuple[Matrices, Tensor]]:
        """Yield the matrices of each parameter, with their part of a tensor of all k matrices, flat.

        Args:
            values: Tensor [k, ...], such as `factor` or `residual`.
        """
        first = 0
        for each in self.members:
            yield each, values[first : first + each.count].view(-1)
            first += each.count

    def add_to_residuals(self, gradients: Tensor) -> Tensor:
        """Set `sums` to the residuals plus the gradients of a bucket, and return it.

        The residuals share this memory, so they change, too. Without `feedback` the sums are the gradients.
        """
        views = self._views(gradients)
        if self.residual is None:
            self.sums = torch.stack(views).float()
        else:
            self.sums = self.residual
            for residual, view in zip(self.sums.unbind(), views, strict=True):
                residual.add_(view)
        return self.sums

    def store_products(self, left: Tensor, right: Tensor, gradients: Tensor, share: float) -> None:
        """Replace the bucket's gradients by the products of the factors, and update the residuals.

        Args:
            left: P, [k, n, r].
            right: Summed Q', [k, r, m].
            gradients: Gradients of the bucket, which become the products.
            share: Share of the products that is subtracted from `sums`; the rest remains as residual.
        """
        block = block_elements(self.device)
        rows = min(self.n, max(1, block // self.m))
        several = max(1, block // (rows * self.m)) if rows == self.n else 1
        views = self._views(gradients)
        for k in range(0, self.count, several):
            for row in range(0, self.n, rows):
                product = left[k : k + several, row : row + rows] @ right[k : k + several]
                for view, matrix in zip(views[k : k + several], product.unbind(), strict=True):
                    view[row : row + rows].copy_(matrix)
                if self.residual is not None:
                    self.residual[k : k + several, row : row + rows].sub_(product, alpha=share)
        self.sums = self.sums[:0]

    def _views(self, gradients: Tensor) -> list[Tensor]:
        """Return a view of each matrix in a bucket's gradients."""
        return [
            matrix
            for each in self.members
            for matrix in gradients[each.elements].view(each.count, self.n, self.m).unbind()
        ]


class PowerSgd(GradientReduction):
    """Sum of a bucket's gradients by factors of matrices, in two all-reduces.

    Other gradients are summed exactly. Parameters that are not trained are not sent.

    Args:
        bucket: The bucket.
        rank: Largest number of columns of factors.
        seed: Seed of the initial factors.
        feedback: True if residuals are kept.
    """

    def __init__(self, bucket: Bucket, rank: int, seed: int, feedback: bool = True) -> None:
        self.bucket, self.group, self.feedback = bucket, bucket.sharding.group, feedback
        device = self.group.device
        trained = [Matrices.of(each, rank) for each in bucket.segments if each.parameter.requires_grad]
        batches: dict[object, list[Matrices]] = {}
        for each in trained:
            if each.factor_columns:
                batches.setdefault(each.batch_key, []).append(each)
        self.stacks = [MatrixStack(members, feedback, seed, device) for members in batches.values()]
        self._exact = [each for each in trained if not each.factor_columns]
        # Residuals of parameters that are sent in full: nonzero only after a resume of a run that sent them
        # as factors.
        residual_length = sum(each.segment.length for each in self._exact) if feedback else 0
        self._exact_residual = torch.zeros(residual_length, device=device)
        self._next: list[Tensor] = []
        most, longest = (max((s.factor.shape[d] for s in self.stacks), default=0) for d in (1, 2))
        self.fresh = torch.zeros(most, longest, device=device)
        if not self.fresh.is_meta:
            fill_normal(self.fresh.view(-1), 0, Shard.replicated(FACTOR, (most, longest)), seed, 1.0)

    @property
    def messages(self) -> tuple[int, int]:
        """Number of fp32 elements of each of the two all-reduces."""
        exact = sum(each.segment.length for each in self._exact)
        first = sum(stack.count * stack.n * stack.factor_columns for stack in self.stacks)
        return exact + first, sum(stack.factor.numel() for stack in self.stacks)

    @override
    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        return SequentialWork(self._steps(gradients), sums)

    def _steps(self, gradients: Tensor) -> Iterator[Work[Tensor]]:
        """Yield the two all-reduces, and compute before and after them. The gradients become the sums."""
        exact = [gradients[each.elements] for each in self._exact]
        left = [torch.bmm(stack.add_to_residuals(gradients), stack.factor.mT) for stack in self.stacks]
        message, parts = self._message([*left, *exact])
        message[message.numel() - self._exact_residual.numel() :].add_(self._exact_residual)
        self._exact_residual.zero_()
        yield self.group.start_all_reduce(message)
        for gradient, part in zip(exact, parts[len(left) :], strict=True):
            gradient.copy_(part)
        if self.stacks:
            left = orthonormal(parts[: len(left)])
            right = [torch.bmm(each.mT, stack.sums) for stack, each in zip(self.stacks, left, strict=True)]
            message, parts = self._message(right)
            yield self.group.start_all_reduce(message)
            # Copy them: the last bits of products may depend on the alignment of memory.
            self._next = [part.clone() for part in parts]
            for stack, p, q in zip(self.stacks, left, self._next, strict=True):
                stack.store_products(p, q, gradients, 1 / self.group.size)

    def _message(self, parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the tensors, concatenated in fp32, and views of each of them in the result."""
        message = self.group.empty((sum(part.numel() for part in parts),), torch.float32)
        pieces = message.split([part.numel() for part in parts])
        views = [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
        for piece, part in zip(views, parts, strict=True):
            piece.copy_(part)
        return message, views

    @override
    def end_step(self, updated: bool, scale_ratio: float) -> None:
        # After a skipped step residuals are discarded, and the next step begins with the same Q.
        rescale_residuals((stack.residual for stack in self.stacks), updated, scale_ratio)
        if updated and self._next:
            for stack, sums in zip(self.stacks, self._next, strict=True):
                # Unit columns prevent tiny gradients from vanishing in products. Columns that became zero
                # continue with new random directions: otherwise they would remain zero for ever.
                lengths = torch.linalg.vector_norm(sums, dim=2, keepdim=True)
                fresh = self.fresh[: stack.factor_columns, : stack.m]
                stack.factor.copy_(torch.where(lengths > 0, sums / lengths, fresh))
        self._next = []

    @override
    def state(self) -> Iterator[StateTensor]:
        # Each rank has residuals of its own. All ranks share Q.
        for each, values in self._residuals():
            yield rank_state(RESIDUAL, each.segment, values, self.bucket)
        for stack in self.stacks:
            for each, values in stack.of_members(stack.factor):
                options = StateOptions(changes_in_step=False, shape=each.stored_factor, owned_only=False)
                yield segment_state(FACTOR, each.segment, values, 0, self.bucket, options)

    def _residuals(self) -> Iterator[tuple[Matrices, Tensor]]:
        """Yield the residual of each parameter."""
        for stack in self.stacks:
            if stack.residual is not None:
                yield from stack.of_members(stack.residual)
        if self._exact_residual.numel():
            lengths = [each.segment.length for each in self._exact]
            yield from zip(self._exact, self._exact_residual.split(lengths), strict=True)
