"""Group: one communicator of the mesh, and the only way to communicate.

Tensors are cut and joined along dim 0; `sizes` are rows of dim 0 per rank (uneven, zero allowed; equal
where not given), the same list on all ranks of the group. A tensor that is changed in place, and every
`output`, must be contiguous; other inputs are copied if they are not. A group of one rank does nothing:
what it returns without an `output` is its input itself.

All ranks call a group's operations in the same order. Started ones go on while this rank tests or waits
for any of them, in whatever order, but not while it computes or sits in a blocking call: what one rank
waits for before a blocking call, the others must wait for before it too. What starts an operation completes
it before it returns where `blocking` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from hpctrain.comm.calls import Call, Operation
from hpctrain.comm.device import on_host
from hpctrain.comm.ledger import Ledger, LedgerEntry
from hpctrain.comm.timeline import TimelineSpan
from hpctrain.comm.transport import Pending, Transport

Result = TypeVar("Result", bound="Tensor | None")


class Work(Generic[Result]):
    """An operation under way (or done), which keeps its tensors alive until it is waited for."""

    __slots__ = ("_call", "_entry", "_held", "_pending", "_result", "_span")

    def __init__(
        self,
        result: Result,
        pending: Pending | None = None,
        entry: LedgerEntry | None = None,
        held: set[Work[Any]] | None = None,
        span: TimelineSpan | None = None,
        call: Call | None = None,
    ) -> None:
        self._result = result
        self._call = call
        self._pending = pending
        self._entry = entry
        self._span = span
        self._held = held
        if pending is not None and held is not None:
            held.add(self)

    def wait(self) -> Result:
        """Complete the operation; its result, what the blocking call returns."""
        if self._pending is not None:
            began = perf_counter()
            if self._call is not None:
                calls = self._call.group.calls
                calls.waits, calls.current = began, self._call
            if self._held is None or len(self._held) == 1:
                self._pending.wait()
                self._done()
            else:  # others may wait for what this rank does next in its other operations
                while not self._go_on():
                    for work in list(self._held):
                        work._go_on()
            if self._call is not None:
                self._call.group.leave()
            self._count(began)
        return self._result

    def test(self) -> bool:
        """Let the operation make progress, without blocking; whether it is complete."""
        if self._pending is None:
            return True
        began = perf_counter()
        complete = self._go_on()
        self._count(began)
        return complete

    def _go_on(self) -> bool:
        if self._pending is not None and self._pending.test():
            self._done()
        return self._pending is None

    def _done(self) -> None:
        self._pending = None
        if self._call is not None:
            self._call.release()
        if self._held is not None:
            self._held.discard(self)
        if self._span is not None:
            self._span.end = perf_counter()

    def _count(self, began: float) -> None:
        now = perf_counter()
        if self._entry is not None:
            self._entry.seconds += now - began
        if self._span is not None:
            self._span.inside += now - began
            if self._pending is None:
                self._span.end = now


class Objects(Protocol):
    """How small Python values travel among `size` ranks, of which this is `rank`: a communicator does."""

    @property
    def rank(self) -> int:
        """This rank's place among them."""

    @property
    def size(self) -> int:
        """How many there are."""

    def allgather(self, value: Any, /) -> list[Any]:
        """Every rank's value."""

    def bcast(self, value: Any, root: int, /) -> Any:
        """Root's value."""


class Comparer(Protocol):
    """What comes before each call of a group whose ranks compare what they call."""

    def run(self, call: Call, transport: Transport) -> Pending | None:
        """Run the call once the ranks agree in it."""

    def agree(self, call: Call) -> None:
        """Return when the ranks agree in a call that no transport runs."""


class Group:
    """The ranks of one axis of the mesh, or of several joined ones, in the mesh's order.

    `ranks` are their ranks in the world, `rank` is this one's place among them. Tensors in host memory
    travel over `host`, those of a GPU over `accelerator`, small values over `objects`. `device` is where
    `empty` makes tensors. `held` are the operations of all groups that are under way on this rank. A
    `comparer`, where there is one, compares what the ranks call.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        ranks: tuple[int, ...],
        objects: Objects,
        host: Transport,
        accelerator: Transport,
        device: torch.device,
        ledger: Ledger,
        held: set[Work[Any]],
    ) -> None:
        self.axes = axes
        self.name = " x ".join(axes)
        self.ranks = ranks
        self.rank = objects.rank
        self.size = objects.size
        self.objects = objects
        self.host = host
        self.accelerator = accelerator
        self.device = device
        self.ledger = ledger
        self.calls = ledger.calls.group(self.name, ranks)
        self.comparer: Comparer | None = None
        self._held = held

    def __repr__(self) -> str:
        return f"Group({self.name}, rank {self.rank} of {self.size})"

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory that the transport likes best."""
        transport = self.host if on_host(self.device) else self.accelerator
        return transport.empty(shape, dtype, self.device)

    # Reductions

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Tensor:
        """Reduce over the ranks, in place on all of them; `tensor` itself."""
        return self.start_all_reduce(tensor, operation, True).wait()

    def start_all_reduce(
        self, tensor: Tensor, operation: Operation = "sum", blocking: bool = False
    ) -> Work[Tensor]:
        """Start `all_reduce`."""
        assert tensor.is_contiguous()
        if self.size == 1:
            return Work(tensor)
        call = Call("all_reduce", tensor, tensor, blocking, operation)
        return self._run(call, tensor)

    def reduce(self, tensor: Tensor, root: int = 0, operation: Operation = "sum") -> Tensor:
        """Reduce over the ranks, in place at `root`; the others' tensors stay as they are."""
        return self.start_reduce(tensor, root, operation, True).wait()

    def start_reduce(
        self, tensor: Tensor, root: int = 0, operation: Operation = "sum", blocking: bool = False
    ) -> Work[Tensor]:
        """Start `reduce`."""
        assert tensor.is_contiguous()
        if self.size == 1:
            return Work(tensor)
        call = Call(
            "reduce",
            tensor,
            tensor if self.rank == root else None,
            blocking,
            operation,
            root=root,
        )
        return self._run(call, tensor)

    def reduce_scatter(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        operation: Operation = "sum",
    ) -> Tensor:
        """Reduce over the ranks; this rank's rows of the result, in `output`.

        `output` may be this rank's own rows of `tensor`. The other rows of `tensor` stay as they are.
        """
        return self.start_reduce_scatter(tensor, output, sizes, operation, True).wait()

    def start_reduce_scatter(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        operation: Operation = "sum",
        blocking: bool = False,
    ) -> Work[Tensor]:
        """Start `reduce_scatter`."""
        if self.size == 1:
            return Work(_copy(tensor, output))
        began = perf_counter()
        tensor = tensor.contiguous()
        rows = self._share(tensor) if sizes is None else sizes[self.rank]
        counts = _elements(tensor, sizes)
        assert counts is None or sum(counts) == tensor.numel(), (self, tuple(tensor.shape), sizes)
        output = _output(output, tensor, rows)
        call = Call("reduce_scatter", tensor, output, blocking, operation, began=began, counts=counts)
        return self._run(call, output)

    # Movement

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Copy root's tensor into all others, in place; `tensor` itself."""
        return self.start_broadcast(tensor, root, True).wait()

    def start_broadcast(self, tensor: Tensor, root: int = 0, blocking: bool = False) -> Work[Tensor]:
        """Start `broadcast`."""
        assert tensor.is_contiguous()
        if self.size == 1:
            return Work(tensor)
        given, received = (tensor, None) if self.rank == root else (None, tensor)
        call = Call("broadcast", given, received, blocking, root=root)
        return self._run(call, tensor)

    def all_gather(
        self, tensor: Tensor, output: Tensor | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """All ranks' tensors, concatenated along dim 0. `tensor` may be its own rows of `output`."""
        return self.start_all_gather(tensor, output, sizes, True).wait()

    def start_all_gather(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        blocking: bool = False,
    ) -> Work[Tensor]:
        """Start `all_gather`."""
        if self.size == 1:
            return Work(_copy(tensor, output))
        began = perf_counter()
        tensor, rows, counts = self._part(tensor, sizes)
        output = _output(output, tensor, rows)
        call = Call("all_gather", tensor, output, blocking, began=began, bytes=output.nbytes, counts=counts)
        return self._run(call, output)

    def gather(
        self,
        tensor: Tensor,
        root: int = 0,
        output: Tensor | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Tensor | None:
        """All ranks' tensors, concatenated along dim 0, at `root`; None elsewhere."""
        return self.start_gather(tensor, root, output, sizes, True).wait()

    def start_gather(
        self,
        tensor: Tensor,
        root: int = 0,
        output: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        blocking: bool = False,
    ) -> Work[Tensor | None]:
        """Start `gather`."""
        if self.size == 1:
            return Work(_copy(tensor, output))
        began = perf_counter()
        tensor, rows, counts = self._part(tensor, sizes)
        output = _output(output, tensor, rows) if self.rank == root else None
        call = Call(
            "gather",
            tensor,
            output,
            blocking,
            began=began,
            bytes=self._total(tensor, counts),
            root=root,
            counts=counts,
        )
        return self._run(call, output)

    def scatter(
        self, tensor: Tensor | None, output: Tensor, root: int = 0, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Each rank's rows of root's tensor (None elsewhere), in `output`."""
        return self.start_scatter(tensor, output, root, sizes, True).wait()

    def start_scatter(
        self,
        tensor: Tensor | None,
        output: Tensor,
        root: int = 0,
        sizes: Sequence[int] | None = None,
        blocking: bool = False,
    ) -> Work[Tensor]:
        """Start `scatter`."""
        assert output.is_contiguous()
        assert self.rank != root or tensor is not None
        if self.size == 1:
            assert tensor is not None
            return Work(_copy(tensor, output))
        began = perf_counter()
        tensor = tensor.contiguous() if tensor is not None and self.rank == root else None
        counts = _elements(output, sizes)
        assert counts is None or counts[self.rank] == output.numel(), (self, tuple(output.shape), sizes)
        total = self._total(output, counts)
        assert tensor is None or (tensor.nbytes == total and tensor.dtype == output.dtype), self
        call = Call("scatter", tensor, output, blocking, began=began, bytes=total, root=root, counts=counts)
        return self._run(call, output)

    def all_to_all(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Hand the r-th piece of `tensor` to rank r; the pieces from all ranks, in rank order.

        Uneven pieces need both lists, which differ from rank to rank.
        """
        return self.start_all_to_all(tensor, output, send_sizes, receive_sizes, True).wait()

    def start_all_to_all(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        blocking: bool = False,
    ) -> Work[Tensor]:
        """Start `all_to_all`."""
        assert (send_sizes is None) == (receive_sizes is None), "uneven pieces need both lists"
        if self.size == 1:
            return Work(_copy(tensor, output))
        began = perf_counter()
        tensor = tensor.contiguous()
        send_counts, receive_counts = _elements(tensor, send_sizes), _elements(tensor, receive_sizes)
        assert send_counts is None or sum(send_counts) == tensor.numel(), (self, tensor.shape, send_sizes)
        rows = self._share(tensor) * self.size if receive_sizes is None else sum(receive_sizes)
        output = _output(output, tensor, rows)
        call = Call(
            "all_to_all",
            tensor,
            output,
            blocking,
            began=began,
            counts=send_counts,
            received=receive_counts,
        )
        return self._run(call, output)

    def send(self, tensor: Tensor, destination: int, tag: int = 0) -> None:
        """Send to one rank of the group. Tags are below 16384."""
        self.start_send(tensor, destination, tag, True).wait()

    def start_send(
        self, tensor: Tensor, destination: int, tag: int = 0, blocking: bool = False
    ) -> Work[None]:
        """Start `send`."""
        began = perf_counter()
        tensor = tensor.contiguous()
        call = Call("send", tensor, None, blocking, began=began, peer=destination, tag=tag)
        return self._run(call, None)

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Tensor:
        """Receive into all of `tensor`, in place; `tensor` itself."""
        return self.start_recv(tensor, source, tag, True).wait()

    def start_recv(self, tensor: Tensor, source: int, tag: int = 0, blocking: bool = False) -> Work[Tensor]:
        """Start `recv`."""
        assert tensor.is_contiguous()
        call = Call("recv", None, tensor, blocking, peer=source, tag=tag)
        return self._run(call, tensor)

    def barrier(self) -> None:
        """Return when every rank of the group has come here (the host; a GPU's streams run on)."""
        self.start_barrier(True).wait()

    def start_barrier(self, blocking: bool = False) -> Work[None]:
        """Start `barrier`."""
        if self.size == 1:
            return Work(None)
        return self._run(Call("barrier", blocking=blocking), None)

    # Small values

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's small, JSON-able value, in rank order. Not entered in the ledger."""
        if self.size == 1:
            return [value]
        self._agree(Call("all_gather_object"))
        values = self.objects.allgather(value)
        self.calls.leave()
        return values

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Root's small, JSON-able value. Not entered in the ledger."""
        if self.size == 1:
            return value
        self._agree(Call("broadcast_object", root=root))
        value = self.objects.bcast(value, root)
        self.calls.leave()
        return value

    # Parts of the above

    def _run(self, call: Call, result: Result) -> Work[Result]:
        self.calls.enter(call)
        transport = self._transport(call)
        pending = transport.run(call) if self.comparer is None else self.comparer.run(call, transport)
        ended, began = perf_counter(), call.began
        self.calls.leave()
        entry = self.ledger.enter(self.name, call.operation, call.payload, ended - began)
        timeline = self.ledger.timeline
        span = None
        if timeline is not None:
            span = timeline.record(self.name, call.operation, began, ended, call.payload)
        if pending is None:
            call.release()
            return Work(result)
        return Work(result, pending, entry, self._held, span, call)

    def _transport(self, call: Call) -> Transport:
        """What moves this memory; a barrier is the host's."""
        return self.host if call.on_host else self.accelerator

    def _agree(self, call: Call) -> None:
        """Enter a call of small values."""
        self.calls.enter(call)
        if self.comparer is not None:
            self.comparer.agree(call)

    def _part(self, tensor: Tensor, sizes: Sequence[int] | None) -> tuple[Tensor, int, list[int] | None]:
        """This rank's part of what is gathered; the rows of all, and the elements of each where uneven."""
        tensor = tensor.contiguous()
        counts = _elements(tensor, sizes)
        assert counts is None or counts[self.rank] == tensor.numel(), (self, tuple(tensor.shape), sizes)
        return tensor, tensor.shape[0] * self.size if sizes is None else sum(sizes), counts

    def _share(self, tensor: Tensor) -> int:
        rows, rest = divmod(tensor.shape[0], self.size)
        assert rest == 0, f"{self}: {tensor.shape[0]} rows do not divide; give sizes"
        return rows

    def _total(self, part: Tensor, counts: Sequence[int] | None) -> int:
        """Bytes of all ranks' parts."""
        return part.nbytes * self.size if counts is None else sum(counts) * part.itemsize


def _output(output: Tensor | None, like: Tensor, rows: int) -> Tensor:
    """A tensor of so many rows like those of `like`: the given one, if it has as many elements."""
    if output is None:
        return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
    assert output.is_contiguous(), output.stride()
    assert output.dtype == like.dtype, (output.dtype, like.dtype)
    held = like.shape[0]
    assert not held or output.numel() * held == rows * like.numel(), (output.shape, rows, like.shape)
    return output


def _elements(tensor: Tensor, rows: Sequence[int] | None) -> list[int] | None:
    """Elements per rank of so many rows; None, equal on all ranks, stays None."""
    if rows is None:
        return None
    row = prod(tensor.shape[1:])
    return [count * row for count in rows]


def _copy(tensor: Tensor, output: Tensor | None) -> Tensor:
    if output is None:
        return tensor
    if output.data_ptr() != tensor.data_ptr():
        output.detach().copy_(tensor)
    return output
