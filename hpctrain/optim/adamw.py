"""AdamW (arXiv 1711.05101) on the buckets' flat buffers, with fp32 master weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hpctrain.memory.scratch import Flat
from hpctrain.sharding.bucket import Bucket

Kept_co = TypeVar("Kept_co", bound=Flat, covariant=True)


@dataclass(frozen=True)
class Moments(Generic[Kept_co]):
    """The optimizer state of the elements of one bucket that are this rank's (`Bucket.own`), flat, fp32.

    `master` is the bucket's own `own_values` where those are fp32 and lie where the update is computed.
    """

    master: Kept_co
    exp_avg: Kept_co
    exp_avg_sq: Kept_co


class Optimizer(Protocol):
    """What updates the parameters of buckets, wherever it keeps its state."""

    buckets: Sequence[Bucket]

    @property
    def moments(self) -> Sequence[Moments[Flat]]:
        """The state, by bucket."""

    @property
    def working_bytes(self) -> int:
        """Host memory that state which lies elsewhere passes through."""

    @property
    def updates(self) -> int:
        """Updates done so far; what the bias correction counts."""

    @updates.setter
    def updates(self, count: int) -> None: ...

    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """Update with gradients divided by `gradient_divisor` (loss scale over clip coefficient)."""

    def publish(self) -> None:
        """Copy the master weights into the parameters, where these are whole on all ranks. Collective."""


@dataclass(frozen=True)
class _Part:
    """The decayed or the other elements of one bucket's own: their place there, and views of their state."""

    bucket: Bucket
    place: slice
    weight_decay: float
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    updates: Tensor


class AdamW:
    """Torch's fused AdamW, one call for all buckets; weight decay on their decayed part only.

    Its kernel, not its class: that imports torch's compiler, which takes a second and memory on every rank.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
    ) -> None:
        self.buckets = buckets
        self._betas, self._epsilon = betas, epsilon
        self._moments = [_moments(bucket) for bucket in buckets]
        self._parts = [
            part
            for bucket, moments in zip(buckets, self._moments, strict=True)
            for part in _parts(bucket, moments, weight_decay)
        ]

    @property
    def moments(self) -> Sequence[Moments[Tensor]]:
        """The state, by bucket."""
        return self._moments

    @property
    def working_bytes(self) -> int:
        """None: the state is where it is updated."""
        return 0

    @property
    def updates(self) -> int:
        """Updates done so far; what the bias correction counts."""
        return int(self._parts[0].updates.item())

    @updates.setter
    def updates(self, count: int) -> None:
        for part in self._parts:
            part.updates.fill_(count)

    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """Update with gradients divided by `gradient_divisor` (loss scale over clip coefficient).

        Gradient buffers in fp32 hold the divided gradients afterwards.
        """
        if all(bucket.gradient_dtype == torch.float32 for bucket in self.buckets):
            self._update(self._parts, learning_rate, gradient_divisor)
        else:
            # One bucket after the other has its gradients in fp32, for as long.
            for bucket in self.buckets:
                parts = [part for part in self._parts if part.bucket is bucket]
                self._update(parts, learning_rate, gradient_divisor)
        self.publish()

    def publish(self) -> None:
        """Copy the master weights into the parameters, where these are whole on all ranks. Collective."""
        works = []
        for bucket, moments in zip(self.buckets, self.moments, strict=True):
            if moments.master is not bucket.own_values:
                assert isinstance(bucket.own_values, Tensor)
                bucket.own_values.copy_(moments.master)
            works.append(bucket.start_refresh())
        for work in works:
            if work is not None:
                work.wait()

    def _update(self, parts: Sequence[_Part], learning_rate: float, gradient_divisor: float) -> None:
        for weight_decay in {part.weight_decay for part in parts}:
            alike = [part for part in parts if part.weight_decay == weight_decay]
            fused_update(
                [part.master for part in alike],
                [part.bucket.own_gradients[part.place].float() for part in alike],
                [part.exp_avg for part in alike],
                [part.exp_avg_sq for part in alike],
                [part.updates for part in alike],
                learning_rate,
                weight_decay,
                self._betas,
                self._epsilon,
                gradient_divisor,
            )


@torch.no_grad()
def fused_update(
    masters: list[Tensor],
    gradients: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    updates: list[Tensor],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float,
    gradient_divisor: float = 1.0,
) -> None:
    """One AdamW update (arXiv 1711.05101) in place, by torch's fused kernel.

    The lists are of equal length; masters, gradients and moments of one number are fp32 tensors of one shape,
    `updates` scalars that count the updates before this one. The gradients are divided afterwards.
    """
    device = masters[0].device
    adamw(
        masters,
        gradients,
        exp_avg,
        exp_avg_sq,
        [],
        updates,
        fused=True,
        # The kernel divides by it while it reads: no pass over the gradients is added.
        grad_scale=torch.tensor(gradient_divisor, device=device),
        found_inf=torch.zeros((), device=device),
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=learning_rate,
        weight_decay=weight_decay,
        eps=epsilon,
        maximize=False,
    )


def decay_ranges(bucket: Bucket) -> tuple[slice, slice]:
    """The decayed and the other elements of the bucket's own."""
    own = bucket.own
    border = min(max(bucket.decayed - own.start, 0), own.stop - own.start)
    return slice(0, border), slice(border, own.stop - own.start)


def _parts(bucket: Bucket, moments: Moments[Tensor], weight_decay: float) -> Iterator[_Part]:
    """Those of the bucket that have elements."""
    for place, decay in zip(decay_ranges(bucket), (weight_decay, 0.0), strict=True):
        master = moments.master[place]
        if master.numel():
            updates = torch.zeros((), device=master.device)
            exp_avg, exp_avg_sq = moments.exp_avg[place], moments.exp_avg_sq[place]
            yield _Part(bucket, place, decay, master, exp_avg, exp_avg_sq, updates)


def _moments(bucket: Bucket) -> Moments[Tensor]:
    values = bucket.own_values
    assert isinstance(values, Tensor)
    master = values if values.dtype == torch.float32 else values.float()
    return Moments(master, torch.zeros_like(master), torch.zeros_like(master))
