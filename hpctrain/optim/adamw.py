"""AdamW (arXiv 1711.05101) on the buckets' flat buffers, with fp32 master weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.scratch import Flat

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
    def updates(self) -> int:
        """Updates done so far; what the bias correction counts."""

    @updates.setter
    def updates(self, count: int) -> None: ...

    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """Update with gradients divided by `gradient_divisor` (loss scale over clip coefficient)."""

    def publish(self) -> None:
        """Copy the master weights into the parameters, where these are whole on all ranks. Collective."""


class AdamW:
    """Torch's fused AdamW, one call for all buckets; weight decay on their decayed part only."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
    ) -> None:
        self.buckets = buckets
        self._moments = [_moments(bucket) for bucket in buckets]
        self._steps: list[Tensor] = []
        self._of_bucket: dict[Bucket, list[tuple[slice, Tensor]]] = {bucket: [] for bucket in buckets}
        groups = [
            {"params": self._parameters(decayed=True), "weight_decay": weight_decay},
            {"params": self._parameters(decayed=False), "weight_decay": 0.0},
        ]
        self._torch = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=betas,
            eps=epsilon,
            fused=True,
        )
        self._adopt_state()

    @property
    def moments(self) -> Sequence[Moments[Tensor]]:
        """The state, by bucket."""
        return self._moments

    @property
    def updates(self) -> int:
        """Updates done so far; what the bias correction counts."""
        return int(self._steps[0].item())

    @updates.setter
    def updates(self, count: int) -> None:
        for step in self._steps:
            step.fill_(count)

    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """Update with gradients divided by `gradient_divisor` (loss scale over clip coefficient).

        Gradient buffers in fp32 hold the divided gradients afterwards.
        """
        for group in self._torch.param_groups:
            group["lr"] = learning_rate
        device = self.buckets[0].own_values.device
        # The fused kernel divides by grad_scale while it reads: no pass over the gradients is added.
        self._torch.grad_scale = torch.tensor(gradient_divisor, device=device)  # type: ignore[attr-defined]
        self._torch.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        if all(bucket.gradient_dtype == torch.float32 for bucket in self.buckets):
            self._torch.step()
        else:
            self._step_by_bucket()
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

    def _step_by_bucket(self) -> None:
        """Update one bucket after the other, each with its gradients in fp32 for as long."""
        for bucket in self.buckets:
            for part, parameter in self._of_bucket[bucket]:
                parameter.grad = bucket.own_gradients[part].float()
            self._torch.step()
            for _, parameter in self._of_bucket[bucket]:
                parameter.grad = None

    def _parameters(self, decayed: bool) -> list[Tensor]:
        parameters = []
        for bucket, moments in zip(self.buckets, self.moments, strict=True):
            part = decay_ranges(bucket)[0 if decayed else 1]
            parameter = moments.master[part]
            if parameter.numel():
                if bucket.gradient_dtype == torch.float32:
                    parameter.grad = bucket.own_gradients[part]
                self._of_bucket[bucket].append((part, parameter))
                parameters.append(parameter)
        return parameters

    def _adopt_state(self) -> None:
        """Give torch's optimizer slices of the flat moments as its state."""
        flat = [
            (moments, part)
            for decayed in (0, 1)
            for bucket, moments in zip(self.buckets, self.moments, strict=True)
            if moments.master[part := decay_ranges(bucket)[decayed]].numel()
        ]
        parameters = [p for group in self._torch.param_groups for p in group["params"]]
        for parameter, (moments, part) in zip(parameters, flat, strict=True):
            step = torch.zeros((), device=parameter.device)
            self._steps.append(step)
            self._torch.state[parameter] = {
                "step": step,
                "exp_avg": moments.exp_avg[part],
                "exp_avg_sq": moments.exp_avg_sq[part],
            }


def decay_ranges(bucket: Bucket) -> tuple[slice, slice]:
    """The decayed and the other elements of the bucket's own."""
    own = bucket.own
    border = min(max(bucket.decayed - own.start, 0), own.stop - own.start)
    return slice(0, border), slice(border, own.stop - own.start)


def _moments(bucket: Bucket) -> Moments[Tensor]:
    values = bucket.own_values
    assert isinstance(values, Tensor)
    master = values if values.dtype == torch.float32 else values.float()
    return Moments(master, torch.zeros_like(master), torch.zeros_like(master))
