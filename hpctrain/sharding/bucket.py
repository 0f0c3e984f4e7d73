"""Flat buffers that hold the parameters, gradients and optimizer state of neighbouring layers.

ZeRO (arXiv 1910.02054) splits these buffers over the ranks of the bucket's group, which train on different
tokens. Each rank owns one slice. `layout.zero` says what only the owner stores:

| `layout.zero` | optimizer state | gradients | parameters |
|---|---|---|---|
| 0 | on all ranks | on all ranks | on all ranks |
| 1 | slice | on all ranks | on all ranks |
| 2 | slice | slice | on all ranks |
| 3 | slice | slice | slice |

Example with 3 ranks and a bucket of 576 elements: rank 1 owns the elements 192 to 383. With stage 3 it stores
the parameters, gradients and moments of these only. All 576 parameters exist while a layer computes with
them, and all 576 gradients from the first addition of a step until they are reduced. Both live in buffers of
a pool that the buckets take in turns.

If the ranks of a group share a node, stages 1 to 3 may store the parameters once per node, in shared memory.
Each rank updates its slice there, and a gather is only a barrier. A rank may write its slice only when no
other rank computes with it any more. Before an update this is certain, because all ranks have agreed on the
norm of the gradients. Other code that changes weights between two forward passes calls `await_readers` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from hpctrain.comm.work import CombinedWork, Work
from hpctrain.host.device import on_host
from hpctrain.host.streams import StreamWork, empty_host_tensor
from hpctrain.memory.scratch import Flat, ScratchTensor, Transfer
from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.bucket_layout import BucketLayout, BucketSegment

FlatAllocator = Callable[[int, torch.dtype], Flat]
"""Function that allocates a flat buffer of zeros with this number of elements and dtype, in memory or in a
file.
"""

FlatType = TypeVar("FlatType", Tensor, Flat)


class Bucket:
    """Memory of one BucketLayout on this rank.

    Args:
        layout: Places of the parameters in the bucket.
        dtype: Format of the parameters.
        gradient_dtype: Format in which gradients are accumulated.
        trained: False if no parameter is trained: then there are no gradients.
        allocate: Function that allocates `owned_values` with ZeRO-3: on the device, on the host or in a file.
            None allocates on the device.

    Attributes:
        slice: Elements that this rank owns if ZeRO splits them.
        owned_slice: Elements whose optimizer state this rank stores: `slice`, or everything without ZeRO.
        values: Parameters, flat [length]. With ZeRO-3 it is None while they are not gathered.
        owned_values: Parameters of `owned_slice`.
        owned_gradients: Reduced gradients of `owned_slice`, after `GradientSynchronizer.finish`.
        sharers: Number of ranks that have the memory of the parameters in common; 1 if it is this rank's
            alone.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype = torch.float32,
        trained: bool = True,
        allocate: FlatAllocator | None = None,
    ) -> None:
        self.layout, self.sharding, self.dtype, self.trained = layout, layout.sharding, dtype, trained
        self.gradient_dtype = gradient_dtype
        self.segments, self.length = layout.segments, layout.length
        self.slice, self.owned_slice = layout.share, layout.owned_slice
        self.values: Tensor | None = None
        self._fetched_values: tuple[Tensor, Transfer] | None = None
        self._common = self._common_memory() if allocate is None else None
        self.sharers = 1 if self._common is None else self.sharding.group.sharers
        self.owned_values: Flat = self._allocate_values(allocate)
        self._gradients: Tensor | None = None
        self.owned_gradients = self._allocate_gradients()
        for segment in self.segments:
            parameter = segment.parameter
            if not trained:
                parameter.requires_grad_(False)
                continue
            parameter.open_gradient = self.open_gradients if self.sharding.zero > 1 else None
            parameter.lookup_gradients = tuple(
                torch.zeros(parameter.shape, dtype=gradient_dtype, device=self.sharding.group.device)
                for _ in range(parameter.separate_lookups)
            )
        self._gaps = layout.gaps
        self._addition_counts: dict[Parameter, int] = {}
        self._incomplete: set[Parameter] = set()
        self._passes = self._rounds = 1

    def _common_memory(self) -> Tensor | None:
        """Return memory for the parameters that ranks share, or None. Collective over the group.

        With ZeRO-3 all ranks of the group must share it. Otherwise a node would hold more than its slices.
        """
        group, zero = self.sharding.group, self.sharding.zero
        if zero == 0 or (zero == 3 and group.sharers < group.size):
            return None
        return group.common_zeros(self.length, self.dtype)

    def _allocate_values(self, allocate: FlatAllocator | None) -> Flat:
        """Allocate the parameters that this rank always holds, and return those that it owns."""
        if self.sharding.zero < 3:
            self.values = self._zeros(self.length, self.dtype) if self._common is None else self._common
            self._set_views(self.values)
            return self.values[self.owned_slice]
        self.release_values()
        if self._common is not None:
            return self._common[self.slice]
        share = self.slice.stop - self.slice.start
        return allocate(share, self.dtype) if allocate else self._zeros(share, self.dtype)

    def _allocate_gradients(self) -> Tensor:
        """Allocate the gradients that this rank always holds, and return those that it owns."""
        if not self.trained:
            return self._zeros(0, self.gradient_dtype)
        if self.sharding.zero > 1:
            return self._zeros(self.slice.stop - self.slice.start, self.gradient_dtype)
        self._gradients = self._zeros(self.length, self.gradient_dtype)
        self._set_gradient_views(self._gradients)
        return self._gradients[self.owned_slice]

    def _zeros(self, length: int, dtype: torch.dtype) -> Tensor:
        return self.sharding.group.empty((length,), dtype).zero_()

    # Parameters

    def start_gather(self) -> Work[Tensor]:
        """Start to gather the parameters, with ZeRO-3. Collective over the group.

        Returns:
            Handle whose result is the flat tensor [length] to pass to `set_values`.
        """
        group, owned = self.sharding.group, self._owned_in_memory()
        if self._common is not None:
            return group.start_all_gather(owned, self._common, self.layout.sizes)
        gathered = self.sharding.pool.take(self.length, self.dtype)
        if not on_host(gathered.device) and on_host(owned.device):
            return self._start_upload(owned, gathered)
        if self._fetched_values is not None:
            owned = gathered[self.slice].copy_(owned)
            self.drop_fetched()
        return group.start_all_gather(owned, gathered, self.layout.sizes)

    def _start_upload(self, source: Tensor, target: Tensor) -> Work[Tensor]:
        """Start to copy the owned values to a GPU and gather them there, on a separate stream."""
        works: list[Work[Tensor] | StreamWork] = []

        def move() -> None:
            part = target[self.slice].copy_(source, non_blocking=True)
            works.append(self.sharding.group.start_all_gather(part, target, self.layout.sizes))

        works.append(self.sharding.uploads.start(move, [target]))
        self.drop_fetched()  # torch keeps pinned memory until its copy is complete
        return CombinedWork(works, target)

    def _owned_in_memory(self) -> Tensor:
        """Return the owned values in memory. Values of a file remain loaded until `drop_fetched`."""
        if isinstance(self.owned_values, Tensor):
            return self.owned_values
        self.start_fetch()
        assert self._fetched_values is not None
        owned, transfer = self._fetched_values
        transfer.result()
        return owned

    def start_fetch(self) -> None:
        """Start to read this rank's slice from its file, ahead of the next `start_gather`. Local.

        It does nothing if the slice is in memory.
        """
        if isinstance(self.owned_values, ScratchTensor) and self._fetched_values is None:
            length, device = self.owned_values.numel(), self.sharding.group.device
            if on_host(device):
                memory = self.sharding.pool.take(length, self.dtype)
            else:
                memory = empty_host_tensor((length,), self.dtype, device)
            self._fetched_values = memory, self.owned_values.start_read(memory)

    def drop_fetched(self) -> None:
        """Discard what `start_fetch` has read, because the values may change. Local."""
        if self._fetched_values is not None:
            memory, transfer = self._fetched_values
            transfer.result()
            if not memory.is_pinned():
                self.sharding.pool.give(memory)
            self._fetched_values = None

    def set_values(self, gathered: Tensor) -> None:
        """Make the parameters views of the gathered values, flat [length]. Local."""
        self.values = gathered
        self._set_views(gathered)

    def release_values(self) -> None:
        """Return the gathered values to the pool, with ZeRO-3. Local.

        Afterwards the parameters keep their shapes, but have NaN for all elements.
        """
        if self.values is not None:
            if self.values is not self._common:
                self.sharding.pool.give(self.values)
            self.values = None
        # One element that is expanded to the shape: it takes no memory, and NaN shows up in any result.
        none = torch.full((), torch.nan, dtype=self.dtype, device=self.sharding.group.device)
        for segment in self.segments:
            segment.parameter.data = none.expand(segment.parameter.shard.local)

    def start_gather_updated(self) -> Work[Tensor] | None:
        """Start to gather the slices that other ranks have updated, with ZeRO-1 and 2.

        Collective over the group.

        Returns:
            Handle; None if there is nothing to gather.
        """
        if self.sharding.zero in (0, 3) or self.sharding.group.size == 1:
            return None
        assert self.values is not None
        owned = self.values[self.owned_slice]
        return self.sharding.group.start_all_gather(owned, self.values, self.layout.sizes)

    def _set_views(self, full: Tensor) -> None:
        for segment in self.segments:
            segment.parameter.data = segment.view(full)

    # Gradients

    @property
    def gradients(self) -> Tensor:
        """Gradients of all parameters, flat [length], allocated if necessary."""
        self.open_gradients()
        assert self._gradients is not None
        return self._gradients

    def open_gradients(self) -> None:
        """Allocate the gradients of all parameters if there are none, as ZeRO-2 and 3 do in each step. Local.

        New gradients count as zero until a layer adds to them.
        """
        if self._gradients is None:
            self._gradients = self.sharding.pool.take(self.length, self.gradient_dtype)
            for gap in self._gaps:
                self._gradients[gap].zero_()
            for segment in self.segments:
                segment.parameter.reset_gradient()
            self._set_gradient_views(self._gradients)

    def final_gradients(self) -> Tensor:
        """Return the gradients of all parameters, flat [length], with zeros where no layer has added any.

        A Reducer calls it when all additions of a step, or of a micro-batch, are done. Local.
        """
        gradients = self.gradients
        for segment in self.segments:
            segment.parameter.zero_stale_gradient()
        return gradients

    def take_gradients(self) -> None:
        """Detach the gradients from the parameters. The caller returns their memory to the pool. Local."""
        self._gradients = None
        self._set_gradient_views(None)

    def merge_lookups(self) -> None:
        """Add the gradients of embedding lookups, which tied parameters accumulate separately.

        So the result does not depend on the order in which the uses of a parameter add theirs. Local.
        """
        for segment in self.segments:
            for lookups in segment.parameter.lookup_gradients:
                if not lookups.is_meta:  # in plans they have no values
                    segment.view(self.gradients).add_(lookups)
                    lookups.zero_()

    def _set_gradient_views(self, full: Tensor | None) -> None:
        for segment in self.segments:
            segment.parameter.gradient = segment.view(full) if full is not None else None

    # Counting additions

    def start_step(self, passes: int, each_pass: bool = False) -> None:
        """Zero the gradients, and expect the additions of some backward passes, in any order. Local.

        Args:
            passes: Number of backward passes (micro-batches) of the step.
            each_pass: True if gradients are reduced, and so must be final, after each backward pass. By
                default they are final after the last one.
        """
        if self._gradients is not None:  # padding is reduced with the rest, in every step
            for gap in self._gaps:
                self._gradients[gap].zero_()
        for segment in self.segments:
            segment.parameter.reset_gradient()
            for lookups in segment.parameter.lookup_gradients:
                lookups.zero_()
        self._addition_counts = {s.parameter: 0 for s in self.segments if s.parameter.requires_grad}
        self._rounds, self._passes = (passes, 1) if each_pass else (1, passes)
        self._incomplete = set(self._addition_counts)

    def count_addition(self, parameter: Parameter) -> bool:
        """Record one addition to the gradient of a parameter. Return True if the bucket is then final. Local.

        Final means that layers have made all additions of the step, or of a micro-batch if `each_pass`.
        """
        self._addition_counts[parameter] += 1
        if self._addition_counts[parameter] == self._passes * parameter.uses:
            self._incomplete.discard(parameter)
            if not self._incomplete:
                self._rounds -= 1
                if self._rounds:
                    # Some parameters may already have additions of the next pass.
                    self._passes += 1
                    counts = self._addition_counts.items()
                    self._incomplete = {p for p, n in counts if n < self._passes * p.uses}
                    assert self._incomplete, "a layer added twice before the others added once"
                return True
        return False

    @property
    def is_final(self) -> bool:
        """True if all additions of the step are done."""
        return not self._incomplete

    def incomplete_parameter(self) -> Parameter:
        """Return a parameter that misses additions to its gradient."""
        return next(iter(self._incomplete))

    # Parts of the bucket

    def owned_segments(self, flat: FlatType) -> Iterator[tuple[BucketSegment, FlatType, int]]:
        """Yield the elements of each parameter that this rank owns.

        Args:
            flat: Tensor with one value for each element of `owned_slice`.

        Yields:
            The segment; its elements in `flat`, which may be none; the index of the first of them in the
            parameter's local tensor.
        """
        yield from self.segments_within(flat, self.owned_slice)

    def segments_within(self, flat: FlatType, part: slice) -> Iterator[tuple[BucketSegment, FlatType, int]]:
        """Yield the elements of each parameter within a part of the bucket, like `owned_segments`.

        Args:
            flat: Tensor with one value for each element of the part.
            part: Part of the bucket.
        """
        for segment in self.segments:
            first = min(max(segment.start, part.start), part.stop)
            last = max(min(segment.start + segment.length, part.stop), first)
            elements = flat[first - part.start : last - part.start]
            yield segment, elements, max(0, min(first - segment.start, segment.length))

    def gather_owned(self, values: Flat) -> Tensor:
        """Gather a tensor of which each rank has the elements that it owns, and return all, flat [length].

        Checks use it to compare layouts. With ZeRO it is collective over the group.

        Args:
            values: Flat tensor with one value for each element of `owned_slice`, such as `owned_values`.
        """
        values = values.load() if isinstance(values, ScratchTensor) else values
        if self.sharding.zero == 0:
            return values
        return self.sharding.group.all_gather(values, sizes=self.layout.sizes)


def await_readers(buckets: Iterable[Bucket]) -> None:
    """Wait until no other rank computes with the memory that it shares with this one. Collective.

    Afterwards the weights of these buckets may be changed.
    """
    for group in dict.fromkeys(bucket.sharding.group for bucket in buckets if bucket.sharers > 1):
        group.barrier()
