"""Buckets: flat buffers of neighbouring layers' parameters, gradients and optimizer state.

A bucket's buffers live whole on every rank of its data x context group, or cut into one slice a rank
(ZeRO, arXiv 1910.02054): optimizer state from ZeRO-1 on, gradients from ZeRO-2 on, parameters with ZeRO-3.
What is cut is whole for a while: gradients from the first addition of a step until they are summed,
parameters while they are gathered.

Where a bucket is cut over ranks of one node, its parameters lie there once, whole, in memory that these ranks
have in common: each updates its slice, and to gather it takes as long as to wait for each other. A rank may
write its slice only when no other one computes with it any more. An update comes after all ranks have agreed
on the norm of the gradients; what else changes weights between two forward passes asks `await_readers` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import CombinedWork, Work
from hpctrain.host.device import StreamWork, empty_host_tensor, on_host
from hpctrain.memory.accounts import storage_bytes
from hpctrain.memory.scratch import Flat, ScratchTensor, Transfer
from hpctrain.parallel.shard import Parameter
from hpctrain.sharding.bucket_layout import BucketLayout, BucketSegment

Store = Callable[[int, torch.dtype], Flat]
"""Makes zeros of a length and type somewhere."""

FlatType = TypeVar("FlatType", Tensor, Flat)


class Bucket:
    """One BucketLayout in memory.

    `own` is that of the layout, `slice` its share; `own_values` and `own_gradients` are the own elements.
    `values` is None with ZeRO-3 while not gathered. `sharers` ranks have the memory of the values in common.
    With ZeRO-3 `store`, if given, makes the memory of `own_values`: on the device, on the host, or in a file.
    Without `trained` there are no gradients, and the parameters ask for none.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype = torch.float32,
        trained: bool = True,
        store: Store | None = None,
    ) -> None:
        self.layout, self.sharding, self.dtype, self.trained = layout, layout.sharding, dtype, trained
        self.gradient_dtype = gradient_dtype
        self.segments, self.length = layout.segments, layout.length
        self.slice, self.own = layout.share, layout.own
        group, zero = self.sharding.group, self.sharding.zero
        share = self.slice.stop - self.slice.start

        self.values: Tensor | None = None
        self.own_values: Flat
        self._fetched: tuple[Tensor, Transfer] | None = None
        # With ZeRO-3 a part of a group that has all in common would have more than its slices.
        once = zero > 0 and store is None and (zero < 3 or group.sharers == group.size)
        self._common = group.common_zeros(self.length, dtype) if once else None
        self.sharers = 1 if self._common is None else group.sharers
        if zero < 3:
            self.values = _zeros(group, self.length, dtype) if self._common is None else self._common
            self.own_values = self.values[self.own]
            self._show(self.values)
        elif self._common is not None:
            self.own_values = self._common[self.slice]
            self.hide_values()
        else:
            self.own_values = store(share, dtype) if store else _zeros(group, share, dtype)
            self.hide_values()
        self._gradients: Tensor | None = None
        self.own_gradients = _zeros(group, 0, gradient_dtype)
        if trained and zero < 2:
            self._gradients = _zeros(group, self.length, gradient_dtype)
            self.own_gradients = self._gradients[self.own]
            self._show_gradients(self._gradients)
        elif trained:
            self.own_gradients = _zeros(group, share, gradient_dtype)
        for segment in self.segments:
            parameter = segment.parameter
            if not trained:
                parameter.requires_grad_(False)
                continue
            parameter.open_gradient = self.open_gradients if zero > 1 else None
            if parameter.apart:
                parameter.lookups = torch.zeros(parameter.shape, dtype=gradient_dtype, device=group.device)
        self._added: dict[Parameter, int] = {}
        self._behind: set[Parameter] = set()
        self._passes = self._rounds = 1

    # Parameters

    def start_gather(self) -> Work[Tensor]:
        """Start to make the values whole, with ZeRO-3; hand the result to `show_values`."""
        group, own = self.sharding.group, self._own_in_memory()
        if self._common is not None:
            return group.start_all_gather(own, self._common, self.layout.sizes)
        whole = self.sharding.pool.take(self.length, self.dtype)
        if not on_host(whole.device) and on_host(own.device):
            return self._start_upload(own, whole)
        if self._fetched is not None:
            own = whole[self.slice].copy_(own)
            self.drop_fetched()
        return group.start_all_gather(own, whole, self.layout.sizes)

    def _start_upload(self, source: Tensor, target: Tensor) -> Work[Tensor]:
        """Start to copy the own values to a GPU and gather them there, while its current stream goes on."""
        works: list[Work[Tensor] | StreamWork] = []

        def move() -> None:
            part = target[self.slice].copy_(source, non_blocking=True)
            works.append(self.sharding.group.start_all_gather(part, target, self.layout.sizes))

        works.append(self.sharding.uploads.start(move, [target]))
        self.drop_fetched()  # torch keeps pinned memory until its copy is complete
        return CombinedWork(works, target)

    def _own_in_memory(self) -> Tensor:
        """The own values, of a file as they have been read: until `drop_fetched`."""
        if isinstance(self.own_values, Tensor):
            return self.own_values
        self.start_fetch()
        assert self._fetched is not None
        own, transfer = self._fetched
        transfer.result()
        return own

    def start_fetch(self) -> None:
        """Start to read this rank's slice where it lies in a file, for the `start_gather` that comes."""
        if isinstance(self.own_values, ScratchTensor) and self._fetched is None:
            length, device = self.own_values.numel(), self.sharding.group.device
            memory = (
                self.sharding.pool.take(length, self.dtype)
                if on_host(device)
                else empty_host_tensor((length,), self.dtype, device)
            )
            self._fetched = memory, self.own_values.start_read(memory)

    def drop_fetched(self) -> None:
        """Forget what `start_fetch` has read: the values may change."""
        if self._fetched is not None:
            memory, transfer = self._fetched
            transfer.result()
            if not memory.is_pinned():
                self.sharding.pool.give(memory)
            self._fetched = None

    def show_values(self, whole: Tensor) -> None:
        """Let the parameters be views into these whole values."""
        self.values = whole
        self._show(whole)

    def hide_values(self) -> None:
        """Take the whole values away from the parameters, with ZeRO-3."""
        if self.values is not None:
            if self.values is not self._common:
                self.sharding.pool.give(self.values)
            self.values = None
        # One element seen as many: of the right shape, yet without memory. Who computes with it sees it.
        none = torch.full((), torch.nan, dtype=self.dtype, device=self.sharding.group.device)
        for segment in self.segments:
            segment.parameter.data = none.expand(segment.parameter.shard.local)

    def start_refresh(self) -> Work[Tensor] | None:
        """Start to bring the other ranks' slices, which they have updated, into whole values."""
        if self.sharding.zero in (0, 3) or self.sharding.group.size == 1:
            return None
        assert self.values is not None
        return self.sharding.group.start_all_gather(self.values[self.own], self.values, self.layout.sizes)

    def _show(self, whole: Tensor) -> None:
        for segment in self.segments:
            segment.parameter.data = segment.view(whole)

    # Gradients

    @property
    def gradients(self) -> Tensor:
        """The whole gradients, opened if they are not there."""
        self.open_gradients()
        assert self._gradients is not None
        return self._gradients

    def open_gradients(self) -> None:
        """Have whole gradients; those that were not there begin from zero."""
        if self._gradients is None:
            self._gradients = self.sharding.pool.take(self.length, self.gradient_dtype)
            for gap in self.layout.gaps:
                self._gradients[gap].zero_()
            for segment in self.segments:
                segment.parameter.forget_gradient()
            self._show_gradients(self._gradients)

    def final_gradients(self) -> Tensor:
        """The whole gradients, zero by now where nothing was added."""
        whole = self.gradients
        for segment in self.segments:
            assert segment.parameter.gradient is not None
        return whole

    def take_gradients(self) -> None:
        """Take the whole gradients away from the parameters; who does gives them to the pool in the end."""
        self._gradients = None
        self._show_gradients(None)

    def merge_lookups(self) -> None:
        """Add what was kept apart of gradients with two sources, so that their order does not matter."""
        for segment in self.segments:
            lookups = segment.parameter.lookups
            if lookups is not None and not lookups.is_meta:  # a plan's have no values
                segment.view(self.gradients).add_(lookups)
                lookups.zero_()

    def _show_gradients(self, whole: Tensor | None) -> None:
        for segment in self.segments:
            segment.parameter.gradient = segment.view(whole) if whole is not None else None

    # Counting additions

    def start(self, passes: int, each: bool = False) -> None:
        """Zero gradients; expect the additions of `passes` backward passes (micro-batches), in any order.

        The gradients are final after all of them, with `each` after every one.
        """
        if self._gradients is not None:  # what is nobody's is summed with the rest, again and again
            for gap in self.layout.gaps:
                self._gradients[gap].zero_()
        for segment in self.segments:
            segment.parameter.forget_gradient()
            if segment.parameter.lookups is not None:
                segment.parameter.lookups.zero_()
        self._added = {s.parameter: 0 for s in self.segments if s.parameter.requires_grad}
        self._rounds, self._passes = (passes, 1) if each else (1, passes)
        self._behind = set(self._added)

    def added(self, parameter: Parameter) -> bool:
        """Note one addition; true when the bucket's gradients are final."""
        self._added[parameter] += 1
        if self._added[parameter] == self._passes * parameter.uses:
            self._behind.discard(parameter)
            if not self._behind:
                self._rounds -= 1
                if self._rounds:
                    # Some parameters may be ahead by a pass already.
                    self._passes += 1
                    self._behind = {p for p, n in self._added.items() if n < self._passes * p.uses}
                    assert self._behind, "a layer added twice before the others added once"
                return True
        return False

    @property
    def final(self) -> bool:
        """Whether all additions of the step are there."""
        return not self._behind

    def missing(self) -> Parameter:
        """A parameter of which additions are missing."""
        return next(iter(self._behind))

    # Slices

    def owned(self, flat: FlatType) -> Iterator[tuple[BucketSegment, FlatType, int]]:
        """Each parameter's elements within `own`, of a flat tensor of that length: the segment, the
        elements, and the place of the first of them in the parameter's local piece.
        """
        yield from self.cut(flat, self.own)

    def cut(self, flat: FlatType, part: slice) -> Iterator[tuple[BucketSegment, FlatType, int]]:
        """As `owned`, of any part of the bucket that `flat` holds; parameters outside it have no elements."""
        for segment in self.segments:
            first = min(max(segment.start, part.start), part.stop)
            last = max(min(segment.start + segment.length, part.stop), first)
            elements = flat[first - part.start : last - part.start]
            yield segment, elements, max(0, min(first - segment.start, segment.length))

    def gathered(self, own: Flat) -> Tensor:
        """All elements of a flat tensor of which every rank holds its `own`. Collective over the group."""
        own = own.load() if isinstance(own, ScratchTensor) else own
        if self.sharding.zero == 0:
            return own
        return self.sharding.group.all_gather(own, sizes=self.layout.sizes)


def _zeros(group: Group, length: int, dtype: torch.dtype) -> Tensor:
    return group.empty((length,), dtype).zero_()


def await_readers(buckets: Iterable[Bucket]) -> None:
    """Return when no other rank computes with what this one has of these buckets any more: their weights may
    be changed. Collective.
    """
    for group in dict.fromkeys(bucket.sharding.group for bucket in buckets if bucket.sharers > 1):
        group.barrier()


def value_bytes(buckets: Sequence[Bucket]) -> int:
    """Bytes of the parameters that these buckets hold throughout: of those in common, this rank's part."""
    by_sharers: dict[int, list[Flat]] = {}
    for bucket in buckets:
        by_sharers.setdefault(bucket.sharers, []).append(bucket.own_values)
    return sum(-(-storage_bytes(values) // sharers) for sharers, values in by_sharers.items())


def gradient_bytes(buckets: Sequence[Bucket]) -> int:
    """Bytes of the gradients that these buckets hold throughout."""
    lookups = (segment.parameter.lookups for bucket in buckets for segment in bucket.segments)
    return storage_bytes([*(bucket.own_gradients for bucket in buckets), *lookups])


def pool_bytes(buckets: Iterable[Bucket]) -> int:
    """Bytes of the memory that these buckets take turns in."""
    return sum(sharding.pool.bytes for sharding in {bucket.sharding for bucket in buckets})
