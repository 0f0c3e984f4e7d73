"""Group of ranks, through which all packages communicate.

Operations that split or join tensors do so along dim 0; a row is one index of it. `sizes[r]` is the number of
rows of rank r, and all ranks pass the same list. Sizes may differ and may be 0; None means that all ranks
have equally many rows. Tensors that are changed in place, and every `output`, must be contiguous. Other
inputs are copied if they are not. In a group of one rank, an operation without an `output` returns its input.

All ranks of a group call its collective operations in the same order. `start_x` starts the operation x and
returns a `Work`. Until its `wait` has returned, or its `test` has returned True, do not change the tensors
that were passed, and do not read what the operation writes. `x` starts and waits, and returns the result. It
calls `start_x` with `blocking=True`: the transport may then complete the operation before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from math import prod
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Protocol

import torch
from torch import Tensor

from hpctrain.comm.calls import Call, Reduction
from hpctrain.comm.error_messages import error_reason
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.transports.transport import Transport
from hpctrain.comm.work import Result, StartedWork, Work
from hpctrain.host.device import on_host

if TYPE_CHECKING:
    from hpctrain.comm.call_check import CallComparer

Arguments = ParamSpec("Arguments")
Sizes = Sequence[int] | None


def blocking_form(
    start: Callable[Concatenate[Group, Arguments], Work[Result]],
) -> Callable[Concatenate[Group, Arguments], Result]:
    """Return the method that calls the method `start` with `blocking=True`, waits, and returns the result.

    Its docstring is that of `start`.
    """

    @wraps(start)
    def run(group: Group, /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        work: Work[Result] = getattr(group, start.__name__)(*arguments, blocking=True, **options)
        return work.wait()

    return run


class ObjectCommunicator(Protocol):
    """Interface of a communicator that exchanges small Python objects between `size` ranks."""

    @property
    def rank(self) -> int:
        """Rank of this process in the communicator."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def allgather(self, value: Any, /) -> list[Any]:
        """Return the objects of all ranks, by rank. Collective."""

    def bcast(self, value: Any, root: int, /) -> Any:
        """Return the object of the rank `root`. Collective."""


class GroupTransports(NamedTuple):
    """Means by which the ranks of a group communicate.

    Attributes:
        objects: Communicator for small Python objects.
        host: Transport of tensors in host memory.
        accelerator: Transport of tensors in GPU memory.
    """

    objects: ObjectCommunicator
    host: Transport
    accelerator: Transport


class Group:
    """Ranks along one axis of the mesh, or along several joined axes, in the mesh's order.

    `start_x` starts the operation x and returns a `Work`. `x` takes the same arguments, but waits, and
    returns the result of the handle. Ranks as arguments (`root`, `source`) are numbers in this group. All
    ranks call collective operations in the same order. Arguments that this rank can recognize as wrong raise
    an AssertionError.

    A row is one index of dim 0. Tensors that are changed in place, and every `output`, must be contiguous;
    other inputs are copied if they are not. Shapes and dtypes that do not match those of other ranks are
    reported only after `World.compare_calls`; otherwise they may lead to wrong data, an error of MPI or a
    hang.

    A handle is complete when its `wait` has returned or its `test` has returned True. Until then, the caller
    must not change the tensors that it passed nor read what the operation writes. It must wait for each
    handle, or test it until it is complete, in any order. On a GPU, complete means that later work of the
    current stream may use the tensors.

    Args:
        axes: Names of the axes.
        ranks: Ranks of the world that the group consists of.
        transports: Means by which they communicate.
        device: Device on which `empty` allocates tensors.
        ledger: Ledger of this rank.
        in_flight: Set of the started operations of this rank that are not complete, shared by all its groups.
        root_world_ranks: The same ranks as numbered in the world of all processes, for hang reports; None if
            that is the group's own world.

    Attributes:
        name: Names of the axes in one string.
        rank: Number of this rank in the group.
        size: Number of ranks.
        computes_on: Device that computes. In plans it differs from `device`, which is torch's meta device
            there.
        calls: Log of the group's calls on this rank.
        comparer: If it is not None, it compares the calls of all ranks before they run.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        ranks: tuple[int, ...],
        transports: GroupTransports,
        device: torch.device,
        ledger: Ledger,
        in_flight: set[StartedWork[Any]],
        root_world_ranks: tuple[int, ...] | None = None,
    ) -> None:
        self.axes = axes
        self.name = " x ".join(axes)
        self.ranks = ranks
        self.objects, self.host, self.accelerator = transports
        self.rank = self.objects.rank
        self.size = self.objects.size
        self.device = self.computes_on = device
        self.ledger = ledger
        self.calls = ledger.calls.add_group(self.name, root_world_ranks or ranks)
        self.comparer: CallComparer | None = None
        self._in_flight = in_flight

    def __repr__(self) -> str:
        return f"Group({self.name}, rank {self.rank} of {self.size})"

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of this shape on `device` that the transport can use without a copy.

        Local. If the transport has no special memory, or the tensor is small, it is an ordinary tensor.
        """
        return self._device_transport.empty(shape, dtype, self.device)

    @property
    def sharers(self) -> int:
        """Number of ranks, including this one, that share memory of `common_zeros`; 1 if there is none."""
        return self._device_transport.sharers

    def common_zeros(self, length: int, dtype: torch.dtype) -> Tensor | None:
        """Return zeros [length] that are the same memory on the `sharers` ranks of a node. Collective.

        Writes of other ranks may be read after a barrier, or after an `all_gather` into the whole tensor;
        they may be overwritten after another one of these.

        Returns:
            The tensor; None on all ranks if there is no such memory.
        """
        with self.calls.record(Call("common_zeros")):
            return self._device_transport.common_zeros(length, dtype, self.device)

    @property
    def _device_transport(self) -> Transport:
        return self.host if on_host(self.device) else self.accelerator

    # Reductions

    def start_all_reduce(
        self, tensor: Tensor, reduction: Reduction = "sum", blocking: bool = False
    ) -> Work[Tensor]:
        """Start to reduce `tensor` over the ranks, in place on all of them. Collective.

        Args:
            tensor: Contiguous tensor, of the same shape and dtype on all ranks. It must neither change nor be
                read until the handle is complete.
            reduction: "sum", "max" or "min". Sums of 16-bit floats are added in fp32 and rounded once; sums
                of integers wrap; "sum" of bool is "or".
            blocking: True if the caller waits for the handle at once.

        Returns:
            Handle whose result is `tensor`. On a GPU, the handle is complete when later work of the current
            stream can use it.
        """
        assert tensor.is_contiguous()
        if self.size == 1:
            return Work(tensor)
        return self._run(Call("all_reduce", tensor, tensor, blocking, reduction), tensor)

    def start_reduce(
        self, tensor: Tensor, root: int = 0, reduction: Reduction = "sum", blocking: bool = False
    ) -> Work[Tensor]:
        """Start to reduce `tensor` over the ranks, in place on `root`. Collective.

        Args:
            tensor: Contiguous tensor, of the same shape and dtype on all ranks; overwritten on `root` only.
                It must neither change nor be read until the handle is complete.
            root: Number of the rank in this group that gets the result.
            reduction: "sum", "max" or "min", as in `start_all_reduce`.
            blocking: True if the caller waits for the handle at once.

        Returns:
            Handle whose result is `tensor`; on ranks other than `root` it has not changed.
        """
        assert tensor.is_contiguous()
        if self.size == 1:
            return Work(tensor)
        output = tensor if self.rank == root else None
        return self._run(Call("reduce", tensor, output, blocking, reduction, root=root), tensor)

    def start_reduce_scatter(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        sizes: Sizes = None,
        reduction: Reduction = "sum",
        blocking: bool = False,
    ) -> Work[Tensor]:
        """Start to reduce `tensor` over the ranks; each rank gets its own rows of the result. Collective.

        Rows are slices along dim 0. The tensors must not change until the handle is complete. The reductions
        are those of `start_all_reduce`.

        Args:
            tensor: Tensor with the rows of all ranks, in rank order; copied if it is not contiguous. Rows
                other than those of `output` are not changed.
            output: Contiguous tensor for this rank's rows, or None to allocate one. It may be these rows of
                `tensor`.
            sizes: Number of rows of each rank, the same list on all ranks. None if they are equal; then the
                number of ranks must divide the number of rows (otherwise an AssertionError is raised).
            reduction: "sum", "max" or "min".
            blocking: True if the caller waits for the handle at once.

        Returns:
            Handle whose result is `output`, or a new tensor if that is None.
        """
        if self.size == 1:
            return Work(_copy(tensor, output))
        start = perf_counter()
        tensor = tensor.contiguous()
        rows = self._rows_per_rank(tensor) if sizes is None else sizes[self.rank]
        counts = _elements(tensor, sizes)
        assert counts is None or sum(counts) == tensor.numel(), (self, tuple(tensor.shape), sizes)
        output = _output(output, tensor, rows)
        call = Call("reduce_scatter", tensor, output, blocking, reduction, start=start, counts=counts)
        return self._run(call, output)

    # Movement

    def start_broadcast(self, tensor: Tensor, root: int = 0, blocking: bool = False) -> Work[Tensor]:
        """Start to copy the tensor of `root` into that of every other rank. Collective.

        Args:
            tensor: Contiguous tensor, of the same shape and dtype on all ranks; overwritten except on `root`.
                It must not change until the handle is complete.
            root: Number of the sending rank in this group.
            blocking: True if the caller waits for the handle at once.

        Returns:
            Handle whose result is `tensor`, which may be read once the handle is complete.
        """
        assert tensor.is_contiguous()
        if self.size == 1:
            return Work(tensor)
        source, target = (tensor, None) if self.rank == root else (None, tensor)
        return self._run(Call("broadcast", source, target, blocking, root=root), tensor)

    def start_all_gather(
        self, tensor: Tensor, output: Tensor | None = None, sizes: Sizes = None, blocking: bool = False
    ) -> Work[Tensor]:
        """Start to gather the tensors of all ranks along dim 0 on all ranks. Collective.

        Until the handle is complete, `tensor` must not change.

        Args:
            tensor: Rows of this rank, copied if they are not contiguous. They may be this rank's rows of
                `output`.
            output: Contiguous tensor for the rows of all ranks, in rank order, or None to allocate one.
            sizes: Number of rows of each rank, the same list on all ranks; equal if None. If `tensor` has
                another number of rows, an AssertionError is raised.
            blocking: True if the caller waits for the handle at once.

        Returns:
            Handle whose result is `output`, or a new tensor if that is None.
        """
        if self.size == 1:
            return Work(_copy(tensor, output))
        start = perf_counter()
        tensor, rows, counts = self._gather_part(tensor, sizes)
        output = _output(output, tensor, rows)
        call = Call("all_gather", tensor, output, blocking, start=start, bytes=output.nbytes, counts=counts)
        return self._run(call, output)

    def start_gather(
        self,
        tensor: Tensor,
        root: int = 0,
        output: Tensor | None = None,
        sizes: Sizes = None,
        blocking: bool = False,
    ) -> Work[Tensor | None]:
        """Start to gather the tensors of all ranks along dim 0 on `root`. Collective.

        Until the handle is complete, `tensor` must not change.

        Args:
            tensor: Rows of this rank, copied if they are not contiguous.
            root: Number of the rank in this group that gets the rows of all ranks.
            output: Contiguous tensor for these rows, in rank order, or None to allocate one; only `root` uses
                it.
            sizes: Number of rows of each rank, the same list on all ranks; equal if None. If `tensor` has
                another number of rows, an AssertionError is raised.
            blocking: True if the caller waits for the handle at once.

        Returns:
            Handle whose result is `output`, or a new tensor if that is None; on other ranks than `root`,
            None.
        """
        if self.size == 1:
            return Work(_copy(tensor, output))
        start = perf_counter()
        tensor, rows, counts = self._gather_part(tensor, sizes)
        output = _output(output, tensor, rows) if self.rank == root else None
        total = self._total_bytes(tensor, counts)
        call = Call("gather", tensor, output, blocking, start=start, bytes=total, root=root, counts=counts)
        return self._run(call, output)

    def start_scatter(
        self,
        tensor: Tensor | None,
        output: Tensor,
        root: int = 0,
        sizes: Sizes = None,
        blocking: bool = False,
    ) -> Work[Tensor]:
        """Start to send each rank its rows of root's `tensor`. Collective.

        Rows are slices along dim 0. Until the handle is complete, `tensor` must not change.

        Args:
            tensor: Rows of all ranks, in rank order, copied if they are not contiguous; only `root` needs it,
                the others may pass None.
            output: Contiguous tensor for this rank's rows, of the same dtype.
            root: Number of the sending rank in this group.
            sizes: Number of rows of each rank, the same list on all ranks; equal if None. If `output` has
                another number of rows, an AssertionError is raised.
            blocking: True if the caller waits for the handle at once.

        Returns:
            Handle whose result is `output`, which may be read once the handle is complete.
        """
        assert output.is_contiguous()
        assert self.rank != root or tensor is not None
        if self.size == 1:
            assert tensor is not None
            return Work(_copy(tensor, output))
        start = perf_counter()
        tensor = tensor.contiguous() if tensor is not None and self.rank == root else None
        counts = _elements(output, sizes)
        assert counts is None or counts[self.rank] == output.numel(), (self, tuple(output.shape), sizes)
        total = self._total_bytes(output, counts)
        assert tensor is None or (tensor.nbytes == total and tensor.dtype == output.dtype), self
        call = Call("scatter", tensor, output, blocking, start=start, bytes=total, root=root, counts=counts)
        return self._run(call, output)

    def start_all_to_all(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        send_sizes: Sizes = None,
        receive_sizes: Sizes = None,
        blocking: bool = False,
    ) -> Work[Tensor]:
        """Start to send piece r of `tensor` to rank r, and to receive a piece from each rank. Collective.

        A piece consists of rows of dim 0. Until the handle is complete, `tensor` must not change.

        Args:
            tensor: Tensor with the pieces for all ranks, in rank order; copied if it is not contiguous.
            output: Contiguous tensor for the pieces from all ranks, in other memory than `tensor`, or None to
                allocate one with the other dims of `tensor`.
            send_sizes: Number of rows for each rank. None if they are equal; then the number of rows must be
                divisible by that of the ranks.
            receive_sizes: Number of rows from each rank, which must be what that rank sends. This is not
                checked; wrong numbers may lead to a hang. Either both lists are given or none of them. They
                differ from rank to rank.
            blocking: True if the caller waits for the handle at once.

        Returns:
            Handle whose result holds the pieces from all ranks, in rank order.
        """
        assert (send_sizes is None) == (receive_sizes is None), "uneven pieces need both lists"
        if self.size == 1:
            return Work(_copy(tensor, output))
        start = perf_counter()
        tensor = tensor.contiguous()
        sent, received = _elements(tensor, send_sizes), _elements(tensor, receive_sizes)
        assert sent is None or sum(sent) == tensor.numel(), (self, tensor.shape, send_sizes)
        rows = self._rows_per_rank(tensor) * self.size if receive_sizes is None else sum(receive_sizes)
        output = _output(output, tensor, rows)
        call = Call("all_to_all", tensor, output, blocking, start=start, counts=sent, receive_counts=received)
        if sent is not None:  # the rows that this rank sends to itself are no payload
            call.payload -= sent[self.rank] * tensor.itemsize
        return self._run(call, output)

    def start_send(
        self, tensor: Tensor, destination: int, tag: int = 0, blocking: bool = False
    ) -> Work[None]:
        """Start to send a tensor to the rank `destination` of the group. Local.

        A complete handle means that the tensor may be changed, not that it was received. With `blocking`,
        this may wait until the receiver calls `recv`, so that two ranks which both send first may wait for
        each other forever.

        Args:
            tensor: The tensor, copied if it is not contiguous; it must not change until the handle is
                complete.
            destination: Number of the receiving rank in this group. It must call `recv` or `start_recv`.
            tag: Number from 0 to 16383; the receiver must pass the same one.
            blocking: True if the caller waits for the handle at once.
        """
        start = perf_counter()
        tensor = tensor.contiguous()
        return self._run(Call("send", tensor, None, blocking, start=start, peer=destination, tag=tag), None)

    def start_recv(self, tensor: Tensor, source: int, tag: int = 0, blocking: bool = False) -> Work[Tensor]:
        """Start to receive a tensor from the rank `source` of the group into `tensor`. Local without NCCL.

        Messages of one rank with the same tag are received in the order in which they are sent.

        NCCL, which moves tensors in GPU memory, differs in three ways. It ignores tags, so messages must be
        received in the order in which they are sent. `recv` must receive the messages of `send`, and
        `start_recv` without `blocking` those of `start_send` without it; otherwise the ranks may hang. The
        first call of the group, and its first message without `blocking`, wait on each rank until all ranks
        of the group have made one, too.

        Args:
            tensor: Contiguous tensor (otherwise an AssertionError is raised), with as many elements and the
                same dtype as the tensor that is sent. While `World.compare_calls` is on, a difference is an
                error. Otherwise it may lead to wrong data, an error of MPI or a hang.
            source: Number of the sending rank in this group.
            tag: Tag that the sender passes.
            blocking: True if the caller waits for the handle at once. The transport may then wait for the
                message before this returns.

        Returns:
            Handle whose result is `tensor`, which may be read once the handle is complete.
        """
        assert tensor.is_contiguous()
        return self._run(Call("recv", None, tensor, blocking, peer=source, tag=tag), tensor)

    def start_barrier(self, blocking: bool = False) -> Work[None]:
        """Start a barrier; its handle is complete once every rank has called this. Collective.

        Only the CPUs wait for each other, not the work on GPU streams.
        """
        if self.size == 1:
            return Work(None)
        return self._run(Call("barrier", blocking=blocking), None)

    all_reduce = blocking_form(start_all_reduce)
    reduce = blocking_form(start_reduce)
    reduce_scatter = blocking_form(start_reduce_scatter)
    broadcast = blocking_form(start_broadcast)
    all_gather = blocking_form(start_all_gather)
    gather = blocking_form(start_gather)
    scatter = blocking_form(start_scatter)
    all_to_all = blocking_form(start_all_to_all)
    send = blocking_form(start_send)
    recv = blocking_form(start_recv)
    barrier = blocking_form(start_barrier)

    # Small values

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. Collective; waits. The ledger does not count it.

        A value is a small Python object that can be pickled.
        """
        if self.size == 1:
            return [value]
        self._enter_object_call(Call("all_gather_object"))
        values = self.objects.allgather(value)
        self.calls.leave()
        return values

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the `value` of `root`; those of other ranks are ignored. Collective; waits.

        A value is a small Python object that can be pickled. The ledger does not count the call.
        """
        if self.size == 1:
            return value
        self._enter_object_call(Call("broadcast_object", root=root))
        value = self.objects.bcast(value, root)
        self.calls.leave()
        return value

    @contextmanager
    def watched_call(self, operation: str, file: Path) -> Iterator[None]:
        """Return a context manager for a block that makes a collective call of a library, for hang reports.

        Collective: all ranks of the group enter the block with the same operation. Entering waits for the
        other ranks, and compares the operation, only after `World.compare_calls`; otherwise the call is only
        recorded. Errors of the block pass through. HDF5 and MPI files use it.

        Args:
            operation: Name of the operation, such as "open_file".
            file: File that the call works on.
        """
        call = Call(operation, file=str(file))
        self._enter_object_call(call)
        try:
            yield
        except Exception as error:
            call.error = error_reason(error)
            raise
        finally:
            self.calls.leave()

    # Helpers

    def _run(self, call: Call, result: Result) -> Work[Result]:
        self.calls.enter(call)
        transport = self.host if call.on_host else self.accelerator
        work = transport.run(call) if self.comparer is None else self.comparer.run(call, transport)
        end, start = perf_counter(), call.start
        self.calls.leave()
        entry = self.ledger.enter(self.name, call.operation, call.payload, end - start)
        timeline, span = self.ledger.timeline, None
        if timeline is not None:
            span = timeline.record(self.name, call.operation, start, end, call.payload)
        if work is None:
            call.release()
            return Work(result)
        # Operations on a GPU stream make progress by themselves, so the host need not test them.
        in_flight = set[StartedWork[Any]]() if transport.completes_on_stream else self._in_flight
        return StartedWork(result, work, call, self.ledger, entry, span, in_flight)

    def _enter_object_call(self, call: Call) -> None:
        self.calls.enter(call)
        if self.comparer is not None:
            self.comparer.agree(call)

    def _gather_part(
        self, tensor: Tensor, sizes: Sequence[int] | None
    ) -> tuple[Tensor, int, list[int] | None]:
        """Return this rank's contiguous part, the rows of all parts, and the elements of each part."""
        tensor = tensor.contiguous()
        counts = _elements(tensor, sizes)
        assert counts is None or counts[self.rank] == tensor.numel(), (self, tuple(tensor.shape), sizes)
        return tensor, tensor.shape[0] * self.size if sizes is None else sum(sizes), counts

    def _rows_per_rank(self, tensor: Tensor) -> int:
        rows, rest = divmod(tensor.shape[0], self.size)
        assert rest == 0, f"{self}: {tensor.shape[0]} rows cannot be divided equally; pass their sizes"
        return rows

    def _total_bytes(self, part: Tensor, counts: Sequence[int] | None) -> int:
        """Return the bytes of all ranks' parts, of which `part` is this rank's."""
        return part.nbytes * self.size if counts is None else sum(counts) * part.itemsize


def _output(output: Tensor | None, like: Tensor, rows: int) -> Tensor:
    """Return `output` after checks, or a new tensor with so many rows like those of `like`."""
    if output is None:
        return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
    assert output.is_contiguous(), output.stride()
    assert output.dtype == like.dtype, (output.dtype, like.dtype)
    like_rows = like.shape[0]
    assert not like_rows or output.numel() * like_rows == rows * like.numel(), (
        output.shape,
        rows,
        like.shape,
    )
    return output


def _elements(tensor: Tensor, rows: Sequence[int] | None) -> list[int] | None:
    """Return the elements of each rank's rows of `tensor`; None if `rows` is None."""
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
