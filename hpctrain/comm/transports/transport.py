"""Interface of transports, which run the calls of a Group on flat memory, and the handles of what they start.

The Group handles shapes, default arguments and the ledger. A transport gets contiguous tensors and treats
them as flat; its counts and offsets are numbers of elements. Operations that consist of several messages are
written as generators: they yield each TransportWork that they start, and go on when it is complete (`Steps`).
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call

USER_TAGS = 2**14
"""Message tags below are those of callers; transports use those from here to 2**15 - 1."""

ElementRange = tuple[int, int]
"""Index of the first element, and number of elements."""

Steps = Iterator["TransportWork | None"]
"""Generator that starts operations and yields the handle of each. Resume it only when that is complete.

None stands for an operation that is already complete.
"""


class Transport:
    """Runs calls among the `size` ranks of a group, of which this process is `rank`.

    A transport that carries out operations itself has a method for each of them, with the name of the
    operation and the arguments and result of `run`: all_reduce, reduce, reduce_scatter, all_gather, gather,
    scatter, all_to_all, broadcast, send, recv and barrier. Others override `run` and use such a transport.
    """

    rank: int
    size: int
    sharers = 1
    """Number of ranks, including this one, that get the same memory from `common_zeros`."""
    sums_in_rank_order = True
    """True if sums have the bits of an addition in rank order."""
    completes_on_stream = False
    """True if waiting for a handle makes the current stream of a GPU wait, and not the host."""

    def run(self, call: Call) -> TransportWork | None:
        """Run or start a call of a Group. Collective; "send" and "recv" are local.

        One of `call.tensor` and `call.output` may be this rank's piece of the other one, without a copy. For
        bool, "sum" and "max" mean "or", and "min" means "and".

        Returns:
            None if the call is blocking. Then the result can be used; on a GPU, by later work of the current
            stream. Otherwise the handle of the started operation, which keeps the memory alive.
        """
        work: TransportWork | None = getattr(self, call.operation)(call)
        return work

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of this shape that this transport can use without a copy. Local.

        If the transport has no special memory, the tensor is an ordinary one.
        """
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def common_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:  # noqa: ARG002
        """Return zeros that are the same memory on `sharers` ranks. Collective.

        Other ranks may read what a rank wrote there after a barrier, or after an `all_gather` into the whole
        tensor in which each rank gives its own piece. They may overwrite it only after another one of these.
        Neither copies anything.

        Returns:
            Tensor [length]; None on all ranks if there is no such memory.
        """
        return None

    def crosses_links_once(self, call: Call) -> bool:  # noqa: ARG002
        """Return True if the ranks of a node share the traffic of this call with other nodes. Local.

        Then each byte passes the link of a node once per direction, and not once for each rank of the node.
        The result is the same on all ranks of the group.
        """
        return False

    def adds_at_owner(self, call: Call) -> bool:  # noqa: ARG002
        """Return True if in this all-reduce each piece is added by one rank for all ranks. Local.

        The pieces are those of `reduction.equal_counts`, and rank r adds piece r. False means that several
        ranks add each piece, or that it is unknown which one does, as in MPI's own sums.

        Args:
            call: An all_reduce.
        """
        return False

    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:  # noqa: ARG002
        """Return the CPU memory, in bytes, that a started sum allocates and keeps allocated for later sums.

        Args:
            elements: Number of elements of each rank's input tensor.
            itemsize: Bytes per element.
            scattered: True for a reduce-scatter.
        """
        return 0


class WrappedTransport(Transport):
    """Transport that adds something to the calls of the transport `inner`."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size, self.sharers = inner.rank, inner.size, inner.sharers
        self.sums_in_rank_order = inner.sums_in_rank_order
        self.completes_on_stream = inner.completes_on_stream

    @override
    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.empty(shape, dtype, device)

    @override
    def common_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        return self.inner.common_zeros(length, dtype, device)

    @override
    def crosses_links_once(self, call: Call) -> bool:
        return self.inner.crosses_links_once(call)

    @override
    def adds_at_owner(self, call: Call) -> bool:
        return self.inner.adds_at_owner(call)

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        return self.inner.scratch_bytes(elements, itemsize, scattered)


class TransportWork(Protocol):
    """Operation that has been started and may not be complete yet."""

    def wait(self) -> None:
        """Wait until the operation is complete; return at once if it already is.

        Until then this rank may make no progress in its other started operations; `Work.wait` sees to that.
        """

    def test(self) -> bool:
        """Let the operation make progress, without waiting. Return True if it is complete. Local."""


class SteppedWork:
    """Operation that consists of several, each of which is started when the one before is complete.

    The constructor starts the first one; `test` and `wait` start the next ones.

    Args:
        steps: Iterator that starts the operations and yields them.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._current: TransportWork | None = None
        self._complete = False
        self._start_next()

    def _start_next(self) -> None:
        for work in self._steps:
            if work is not None:
                self._current = work
                return
        self._current = None
        self._complete = True

    def wait(self) -> None:
        """Run the remaining operations one after another, and wait for each of them."""
        while self._current is not None:
            self._current.wait()
            self._start_next()

    def test(self) -> bool:
        """Start the next operations as far as those before are complete, without waiting.

        Return True if all are.
        """
        while self._current is not None and self._current.test():
            self._start_next()
        return self._complete


class ConditionWork:
    """Handle that is complete when a condition holds, which other operations bring about."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.test = condition

    def wait(self) -> None:
        """Call the condition repeatedly until it returns True."""
        wait_until(self.test)


class ParallelWork:
    """Operations that make progress at the same time; the steps of one may wait for those of another."""

    def __init__(self, parts: Sequence[TransportWork]) -> None:
        self._parts = parts

    def test(self) -> bool:
        """Test each operation once, which may start its next steps. Return True if all are complete.

        Does not wait.
        """
        complete = [part.test() for part in self._parts]
        return all(complete)

    def wait(self) -> None:
        """Test all operations in turn until all are complete.

        Pauses in between leave the core to other ranks.
        """
        wait_until(self.test, 0, 10, 200e-6)


def wait_until(
    test: Callable[[], bool], spins: int = 100, yields: int = 10_000, pause: float = 50e-6
) -> None:
    """Call `test` until it returns True: first without a pause, then yielding the core, then sleeping.

    Args:
        test: Function that is called repeatedly.
        spins: Number of calls after which the core is yielded between two calls.
        yields: Number of calls after which the thread sleeps between two calls.
        pause: Length of that sleep, in seconds.
    """
    calls = 0
    while not test():
        calls += 1
        if calls > yields:
            time.sleep(pause)
        elif calls > spins:
            os.sched_yield()


def run_steps(steps: Steps, blocking: bool) -> TransportWork | None:
    """Run steps to their end and return None, or start them and return a handle. Collective if the steps are.

    Args:
        steps: Steps of one operation: an iterator of handles, which may be empty and is used up.
        blocking: True to wait for each step in turn and return None. False to run the steps up to the first
            handle, and to return a handle in any case, whose `test` and `wait` run the others.
    """
    if not blocking:
        return SteppedWork(steps)
    for work in steps:
        if work is not None:
            work.wait()
    return None


def flat_view(tensor: Tensor | None) -> Tensor:
    """Return a flat view [elements] of a tensor, on the same memory and outside of autograd. Local.

    Args:
        tensor: A contiguous tensor. None raises an AssertionError.
    """
    assert tensor is not None
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def offsets_of(counts: Sequence[int]) -> list[int]:
    """Return each rank's first index, by rank, if the ranks' `counts[rank]` elements follow each other."""
    return list(accumulate(counts, initial=0))[:-1]


def ranges_of_ranks(counts: Sequence[int] | None, tensor: Tensor, size: int) -> list[ElementRange]:
    """Return the (first index, number of elements) of each rank's piece of a tensor. Local.

    Args:
        counts: Number of elements of each rank's piece; None if the ranks have equal pieces.
        tensor: Tensor that the pieces form, one behind the other. It is used only if `counts` is None.
        size: Number of ranks, used only if `counts` is None. Elements beyond equal pieces are in none.
    """
    if counts is None:
        share = tensor.numel() // size
        return [(rank * share, share) for rank in range(size)]
    return list(zip(offsets_of(counts), counts, strict=True))


class PieceExchange(NamedTuple):
    """Pieces that a rank exchanges with each rank of a group. Ranges without elements are not sent.

    Attributes:
        source: Contiguous tensor that this rank sends from.
        sends: For each receiving rank, the range of `source` that it gets.
        target: Contiguous tensor that this rank receives into.
        receives: For each sending rank, the range of `target` that it fills.
    """

    source: Tensor
    sends: list[ElementRange]
    target: Tensor
    receives: list[ElementRange]

    def received_ranges(self, rank: int) -> Iterator[tuple[int, ElementRange]]:
        """Yield the other ranks from which `rank` receives, with their ranges of `target`. Local."""
        return self._other_ranks(self.receives, rank, -1)

    def sent_ranges(self, rank: int) -> Iterator[tuple[int, ElementRange]]:
        """Yield the other ranks to which `rank` sends, with their ranges of `source`. Local."""
        return self._other_ranks(self.sends, rank, 1)

    def copy_local_piece(self, rank: int) -> None:
        """Copy the piece that `rank`, which is this rank, keeps for itself. Local."""
        source, target = flat_view(self.source), flat_view(self.target)
        (begin, length), (position, _) = self.sends[rank], self.receives[rank]
        source_piece, target_piece = source[begin : begin + length], target[position : position + length]
        if length and source_piece.data_ptr() != target_piece.data_ptr():
            target_piece.copy_(source_piece)

    @staticmethod
    def _other_ranks(
        ranges: list[ElementRange], rank: int, direction: int
    ) -> Iterator[tuple[int, ElementRange]]:
        # Each rank begins with its neighbor, so that no rank gets the messages of all others at once.
        size = len(ranges)
        for peer in ((rank + direction * step) % size for step in range(1, size)):
            if ranges[peer][1]:
                yield peer, ranges[peer]


class PairwiseTransport(Transport, ABC):
    """Transport that sends pieces of different sizes as messages between pairs of ranks.

    Args:
        rank: This rank in the group.
        size: Number of ranks of the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._operations = 0

    @abstractmethod
    def exchange(self, pieces: PieceExchange, tag: int) -> TransportWork:
        """Start to send a piece to each rank, and to receive a piece from each rank.

        Collective; does not wait. The piece that this rank keeps is copied at once.

        Args:
            pieces: Tensors, and the ranges for each rank.
            tag: Tag of `next_tag`, the same on all ranks.

        Returns:
            Handle, which keeps both tensors alive.
        """

    def next_tag(self) -> int:
        """Return a message tag for the `exchange` and `share` of one operation. Local: nothing is sent.

        Tags are numbered from USER_TAGS to 2 USER_TAGS - 1, then from USER_TAGS again. All ranks call it once
        per operation, in the same order, so that they get the same tag.
        """
        self._operations += 1
        return USER_TAGS + self._operations % USER_TAGS

    def move_pairwise(self, call: Call) -> TransportWork | None:
        """Run or start a call without a reduction as messages between pairs of ranks. Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        work = self.exchange(pairwise_ranges(call, self.size), self.next_tag())
        if not call.blocking:
            return work
        work.wait()
        return None


def pairwise_ranges(call: Call, size: int) -> PieceExchange:
    """Return what this rank sends to and receives from each rank in a call without a reduction. Local.

    Nothing is sent. The source is `call.tensor` and the target `call.output`; if the call has only one of
    them, as a broadcast, it is both. The piece that a rank keeps for itself is among the ranges. Ranks with
    which nothing is exchanged have the range (0, 0).

    Args:
        call: A broadcast, all_gather, gather, scatter or all_to_all, with its tensors. Others are treated as
            an all_to_all, which is wrong for "send" and "recv". A call without tensors raises an
            AssertionError.
        size: Number of ranks of the group.
    """
    source, target = call.memory, call.tensor if call.output is None else call.output
    assert source is not None and target is not None
    nothing = [(0, 0)] * size

    def to_root(tensor: Tensor) -> list[ElementRange]:
        return [(0, tensor.numel() if call.root in (peer, -1) else 0) for peer in range(size)]

    def pieces(tensor: Tensor | None, counts: Sequence[int] | None) -> list[ElementRange]:
        return nothing if tensor is None else ranges_of_ranks(counts, tensor, size)

    match call.operation:
        case "broadcast" if call.output is None:
            return PieceExchange(source, [(0, source.numel())] * size, target, nothing)
        case "broadcast":
            return PieceExchange(source, nothing, target, to_root(target))
        case "all_gather" | "gather":
            return PieceExchange(source, to_root(source), target, pieces(call.output, call.counts))
        case "scatter":
            return PieceExchange(source, pieces(call.tensor, call.counts), target, to_root(target))
    received = pieces(call.output, call.receive_counts)
    return PieceExchange(source, pieces(call.tensor, call.counts), target, received)
