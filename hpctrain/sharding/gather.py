"""Parameters of which a rank keeps a slice, gathered for as long as a layer computes with them (ZeRO-3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.errors import HpctrainError
from hpctrain.memory.activation_store import PackedActivation, Watch
from hpctrain.parallel.residency import ParameterResidency, Result
from hpctrain.parallel.shard import Parameter
from hpctrain.sharding.bucket import Bucket


class Gatherer(ParameterResidency):
    """Gathers a bucket when it is needed, the next one ahead, and frees it after use.

    Slices that lie in files are read one more ahead.

    A step needs its buckets in the same order as the last one of its kind: that order is recorded, and the
    second step of a kind knows what to gather ahead. A bucket that is needed twice in a row stays between,
    those of the parameters in `lasting` stay until the end of the step. What is not cut is always there.
    `watch`, if set, is told of what autograd saves where layers are surrounded, but for parameters.
    """

    gathers = True

    def __init__(self, buckets: Sequence[Bucket], lasting: Collection[Parameter] = ()) -> None:
        cut = [bucket for bucket in buckets if bucket.sharding.zero == 3]
        self.watch: Watch | None = None
        self._bucket = {s.parameter: bucket for bucket in cut for s in bucket.segments}
        self._lasting = {self._bucket[parameter] for parameter in lasting if parameter in self._bucket}
        self._holds: Counter[Bucket] = Counter()
        self._coming: dict[Bucket, Work[Tensor]] = {}
        self._orders: dict[Hashable, list[Bucket]] = {}
        self._known: list[Bucket] = []
        self._seen: list[Bucket] = []

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """One step of a kind; steps of a kind use parameters in one order. Nothing is gathered after it."""
        self._known, self._seen = self._orders.get(kind, []), []
        yield
        for bucket, work in self._coming.items():
            bucket.show_values(work.wait())
        for bucket in self._bucket.values():
            bucket.drop_fetched()
            if bucket.values is not None:
                bucket.hide_values()
        self._coming.clear()
        self._holds.clear()
        self._orders[kind] = self._seen
        self._known, self._seen = [], []

    @contextmanager
    def held(self, parameter: Parameter) -> Iterator[None]:
        """Gathered within."""
        bucket = self._bucket.get(parameter)
        if bucket is not None:
            self.enter(bucket)
        yield
        if bucket is not None:
            self.leave(bucket)

    def around(self, parameter: Parameter, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`compute(x)`, gathered in its forward and again in its backward."""
        bucket = self._bucket.get(parameter)
        if bucket is None:
            return compute(x)
        recording = torch.is_grad_enabled()
        if recording:
            if not x.requires_grad and any(s.parameter.requires_grad for s in bucket.segments):
                x = x.detach().requires_grad_()  # so that the end of its backward is seen
            x = _InBackward.apply(x, self.leave, bucket)
        self.enter(bucket)
        y = compute(x)
        self.leave(bucket)
        if recording:
            y = _InBackward.apply(y, self.enter, bucket)
        return y

    def surround(
        self,
        parameter: Parameter,
        compute: Callable[[], Result],
        inputs: Sequence[Tensor],
        tensors_of: Callable[[Result], Iterable[Tensor]],
    ) -> Result:
        """See ParameterResidency: gathered in forward, and from the first gradient of a result to the last of
        an input; where no input is a result of others, until the end of the step.

        What autograd saves of a parameter, perhaps as a view, is found again in what is gathered by then.
        """
        bucket = self._bucket.get(parameter)
        if bucket is None:
            return compute()
        self.enter(bucket)
        if not torch.is_grad_enabled():
            result = compute()
            self.leave(bucket)
            return result
        with torch.autograd.graph.saved_tensors_hooks(partial(_packed, bucket, self.watch), _unpacked):
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
                entered.clear()  # another pass may come, as where a loss takes a gradient
                self.leave(bucket)

        for tensor in tensors_of(result):
            if tensor.grad_fn is not None:
                # Not of the tensor: what is done with it may ask for its gradient, and for no more.
                tensor.grad_fn.register_prehook(enter)
        # Hooks of what is no result of this pass, such as another parameter, would stay for the next one.
        if learning := [tensor for tensor in inputs if tensor.grad_fn is not None]:
            torch.autograd.graph.register_multi_grad_hook(learning, leave)
        return result

    def enter(self, bucket: Bucket) -> None:
        """Have the bucket gathered, and start to gather the one that will be needed next."""
        if bucket.values is None:
            work = self._coming.pop(bucket, None) or bucket.start_gather()
            bucket.show_values(work.wait())
        self._holds[bucket] += 1
        self._seen.append(bucket)
        following = self._following()
        if following is not None and following.values is None and following not in self._coming:
            self._coming[following] = following.start_gather()
        after = self._following(1)
        if after is not None and after.values is None and after not in self._coming:
            after.start_fetch()

    def leave(self, bucket: Bucket) -> None:
        """Free the bucket, unless it is still in use, lasting, or needed next."""
        self._holds[bucket] -= 1
        if not self._holds[bucket] and bucket not in self._lasting and self._following() is not bucket:
            bucket.hide_values()

    def _following(self, but: int = 0) -> Bucket | None:
        """What will be needed next, or `but` so many later, as far as the recorded order holds."""
        index = len(self._seen)
        if index + but >= len(self._known) or self._known[index - 1] is not self._seen[-1]:
            return None
        return self._known[index + but]


def make_residency(
    buckets: Sequence[Bucket],
    blocks: Sequence[Sequence[Parameter]],
    lasting: int,
    others: Sequence[Parameter] = (),
) -> ParameterResidency:
    """How layers come to the parameters of these buckets; of the blocks, each named by a parameter of each of
    its units, the last `lasting` stay gathered, and so do those of the `others`.
    """
    if all(bucket.sharding.zero < 3 for bucket in buckets):
        return ParameterResidency()
    last = [p for block in blocks[max(0, len(blocks) - lasting) :] for p in block]
    return Gatherer(buckets, [*last, *others])


@dataclass(frozen=True)
class _View:
    """What autograd has saved of a bucket's parameter: a view of it that begins at its element `offset`."""

    bucket: Bucket
    parameter: Parameter
    size: torch.Size
    stride: Sequence[int]
    offset: int


def _packed(bucket: Bucket, watch: Watch | None, tensor: Tensor) -> Tensor | PackedActivation | _View:
    """What is kept of a tensor: of one that lies in the bucket's values, where."""
    values = bucket.values
    assert values is not None
    within = tensor.dtype == values.dtype and not tensor.is_meta
    if not within or tensor.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
        return tensor if watch is None else watch(tensor)
    at = tensor.storage_offset() - values.storage_offset()
    segment = next(s for s in bucket.segments if s.start <= at < s.start + s.length)
    return _View(bucket, segment.parameter, tensor.size(), tensor.stride(), int(at - segment.start))


def _unpacked(kept: Tensor | PackedActivation | _View) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if not isinstance(kept, _View):
        return kept.unpack()
    assert kept.bucket.values is not None, f"{kept.parameter.shard.name} is not gathered in backward"
    data = kept.parameter.data
    return data.as_strided(kept.size, kept.stride, data.storage_offset() + kept.offset)


class _InBackward(torch.autograd.Function):
    """Passes x on; when its gradient comes, the action is done with the bucket."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Callable[[Bucket], None], bucket: Bucket) -> Tensor:
        ctx.action, ctx.bucket = action, bucket
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.action(ctx.bucket)
        return gradient, None, None
