"""Gathering of parameters that ZeRO-3 splits, for as long as a layer computes with them.

Each rank stores one slice of a bucket. Before a layer's forward pass the bucket is gathered, and the next one
begins to arrive while the layer computes. After the pass the gathered values are freed. The backward pass
gathers them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.work import Work
from hpctrain.errors import HpctrainError
from hpctrain.memory.activation_store import PackedActivation, Watch, unpack_saved
from hpctrain.parallel.residency import ParameterResidency, Result
from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.bucket import Bucket


class Gatherer(ParameterResidency):
    """Gathers a bucket when it is needed and the next one ahead, and frees it after use.

    The order in which a step uses its buckets is recorded. The next step of the same kind uses the same
    order, so it can gather the next bucket ahead. If slices are in files, the bucket after the next one is
    read ahead, too. A bucket that is needed twice in succession stays gathered in between. Buckets that are
    not split are always available.

    Args:
        buckets: All buckets of this rank.
        persistent_parameters: Parameters whose buckets stay gathered until the end of the step.

    Attributes:
        watch: Function that receives each tensor that autograd saves in `run_module`, except parameters; it
            returns what is saved instead. None if autograd saves the tensors.
    """

    gathers = True

    def __init__(self, buckets: Sequence[Bucket], persistent_parameters: Collection[Parameter] = ()) -> None:
        split_buckets = [bucket for bucket in buckets if bucket.sharding.zero == 3]
        self.watch: Watch | None = None
        self._bucket = {s.parameter: bucket for bucket in split_buckets for s in bucket.segments}
        self._persistent_buckets = {self._bucket[p] for p in persistent_parameters if p in self._bucket}
        self._use_counts: Counter[Bucket] = Counter()
        self._gathers_in_flight: dict[Bucket, Work[Tensor]] = {}
        self._orders: dict[Hashable, list[Bucket]] = {}
        self._known_order: list[Bucket] = []
        self._used_order: list[Bucket] = []

    @override
    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        self._known_order, self._used_order = self._orders.get(kind, []), []
        yield
        for bucket, work in self._gathers_in_flight.items():
            bucket.set_values(work.wait())
        for bucket in self._bucket.values():
            bucket.drop_fetched()
            if bucket.values is not None:
                bucket.release_values()
        self._gathers_in_flight.clear()
        self._use_counts.clear()
        self._orders[kind] = self._used_order
        self._known_order, self._used_order = [], []

    @override
    @contextmanager
    def in_memory(self, parameter: Parameter) -> Iterator[None]:
        bucket = self._bucket.get(parameter)
        if bucket is not None:
            self.enter(bucket)
        yield
        if bucket is not None:
            self.leave(bucket)

    @override
    def run_layer(self, parameter: Parameter, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        bucket = self._bucket.get(parameter)
        if bucket is None:
            return compute(x)
        recording = torch.is_grad_enabled()
        if recording:
            if not x.requires_grad and any(s.parameter.requires_grad for s in bucket.segments):
                x = x.detach().requires_grad_()  # so that the backward pass calls `leave`
            x = _InBackward.apply(x, self.leave, bucket)
        self.enter(bucket)
        y = compute(x)
        self.leave(bucket)
        if recording:
            y = _InBackward.apply(y, self.enter, bucket)
        return y

    @override
    def run_module(
        self,
        parameter: Parameter,
        compute: Callable[[], Result],
        inputs: Sequence[Tensor],
        tensors_of: Callable[[Result], Iterable[Tensor]],
    ) -> Result:
        """Return `compute()`, with the bucket gathered in its forward and backward pass.

        Collective over the group. In the backward pass the bucket is gathered from the first gradient of a
        result to the last one of an input. If no input depends on other layers, it remains until the end of
        the step. Views of parameters that autograd saves are made again from the values that are gathered by
        then.

        Raises:
            HpctrainError: The backward pass itself is differentiated.
        """
        bucket = self._bucket.get(parameter)
        if bucket is None:
            return compute()
        self.enter(bucket)
        if not torch.is_grad_enabled():
            result = compute()
            self.leave(bucket)
            return result
        with torch.autograd.graph.saved_tensors_hooks(partial(_pack_view, bucket, self.watch), unpack_saved):
            result = compute()
        self.leave(bucket)
        entered: list[bool] = []

        def enter(_: tuple[Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                name = parameter.shard.name
                raise HpctrainError(
                    "layout.zero = 3: does not support second derivatives: the loss depends on a gradient "
                    f"through blocks, among them {name} (use layout.zero = 2)"
                )
            if not entered:
                entered.append(True)
                self.enter(bucket)

        def leave(_: Sequence[Tensor | None]) -> None:
            if entered:
                entered.clear()  # another pass may follow, for example if a loss computes a gradient
                self.leave(bucket)

        for tensor in tensors_of(result):
            if tensor.grad_fn is not None:
                # A hook of the tensor itself would run only if its own gradient is needed.
                tensor.grad_fn.register_prehook(enter)
        # Hooks of leaves, such as another parameter, would remain for the next pass.
        if learning := [tensor for tensor in inputs if tensor.grad_fn is not None]:
            torch.autograd.graph.register_multi_grad_hook(learning, leave)
        return result

    def enter(self, bucket: Bucket) -> None:
        """Gather the bucket if necessary, and start to gather the one that is needed next. Collective."""
        if bucket.values is None:
            work = self._gathers_in_flight.pop(bucket, None) or bucket.start_gather()
            bucket.set_values(work.wait())
        self._use_counts[bucket] += 1
        self._used_order.append(bucket)
        following, after = self._bucket_after(), self._bucket_after(1)
        if following is not None and following.values is None and following not in self._gathers_in_flight:
            self._gathers_in_flight[following] = following.start_gather()
        if after is not None and after.values is None and after not in self._gathers_in_flight:
            after.start_fetch()

    def leave(self, bucket: Bucket) -> None:
        """Free the bucket, unless it is in use, needed next, or kept until the end of the step. Local."""
        self._use_counts[bucket] -= 1
        if self._use_counts[bucket] or bucket in self._persistent_buckets:
            return
        if self._bucket_after() is not bucket:
            bucket.release_values()

    def _bucket_after(self, skipped: int = 0) -> Bucket | None:
        """Return the bucket that is needed after `skipped` others, or None if the order is unknown."""
        index, known = len(self._used_order), self._known_order
        if index + skipped >= len(known) or known[index - 1] is not self._used_order[-1]:
            return None
        return known[index + skipped]


@dataclass(frozen=True)
class _View:
    """View of a bucket's parameter that autograd has saved; it begins at the parameter's element `offset`."""

    bucket: Bucket
    parameter: Parameter
    size: torch.Size
    stride: Sequence[int]
    offset: int

    def unpack(self) -> Tensor:
        """Return the view of the values that are gathered now."""
        assert self.bucket.values is not None, f"{self.parameter.shard.name} is not gathered in backward"
        data = self.parameter.data
        return data.as_strided(self.size, self.stride, data.storage_offset() + self.offset)


def _pack_view(bucket: Bucket, watch: Watch | None, tensor: Tensor) -> Tensor | PackedActivation:
    """Return what autograd saves in place of a tensor: a _View if the tensor is in the bucket's values."""
    values = bucket.values
    assert values is not None
    within = tensor.dtype == values.dtype and not tensor.is_meta
    if not within or tensor.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
        return tensor if watch is None else watch(tensor)
    at = tensor.storage_offset() - values.storage_offset()
    segment = next(s for s in bucket.segments if s.start <= at < s.start + s.length)
    return _View(bucket, segment.parameter, tensor.size(), tensor.stride(), int(at - segment.start))


class _InBackward(torch.autograd.Function):
    """Identity whose backward pass calls `action(bucket)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Callable[[Bucket], None], bucket: Bucket) -> Tensor:
        ctx.action, ctx.bucket = action, bucket
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.action(ctx.bucket)
        return gradient, None, None
