"""Group: one communicator of the mesh, and the only way to communicate.

Tensors are cut and joined along dim 0; `sizes` are rows of dim 0 per rank (uneven, zero allowed; equal
where not given), the same list on all ranks of the group. A tensor that is changed in place, and every
`output`, must be contiguous; other inputs are copied if they are not. A group of one rank does nothing:
what it returns without an `output` is its input itself.

All ranks call a group's operations in the same order. `start_x` starts the operation x, whose result is that
of the Work; `x` completes it before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, Protocol

import torch
from torch import Tensor

from hpctrain.comm.calls import Call, Operation
from hpctrain.comm.device import on_host
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.outcome import error_reason
from hpctrain.comm.transports.transport import Transport, TransportWork
from hpctrain.comm.work import Result, StartedWork, Work

Arguments = ParamSpec("Arguments")
Sizes = Sequence[int] | None


def blocking_form(
    start: Callable[Concatenate[Group, Arguments], Work[Result]],
) -> Callable[Concatenate[Group, Arguments], Result]:
    """The method that does at once what another one starts."""

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


class CallComparer(Protocol):
    """What comes before each call of a group whose ranks compare what they call."""

    def run(self, call: Call, transport: Transport) -> TransportWork | None:
        """Run the call once the ranks agree in it."""

    def agree(self, call: Call) -> None:
        """Return when the ranks agree in a call that no transport runs."""


class Group:
    """The ranks of one axis of the mesh, or of several joined ones, in the mesh's order.

    `ranks` are their ranks in the world, `rank` is this one's place among them. Tensors in host memory travel
    over `host`, those of a GPU over `accelerator`, small values over `objects`. `device` is where `empty`
    makes tensors, `computes_on` the same but where a plan has shapes alone. `under_way` are the operations
    that this rank has started in all groups; `told` are the ranks by which a hang is told, where the world is
    a part of another one. A `comparer`, where there is one, compares what the ranks call.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        ranks: tuple[int, ...],
        objects: ObjectCommunicator,
        host: Transport,
        accelerator: Transport,
        device: torch.device,
        ledger: Ledger,
        under_way: set[StartedWork[Any]],
        told: tuple[int, ...] | None = None,
    ) -> None:
        self.axes = axes
        self.name = " x ".join(axes)
        self.ranks = ranks
        self.rank = objects.rank
        self.size = objects.size
        self.objects = objects
        self.host = host
        self.accelerator = accelerator
        self.device = self.computes_on = device
        self.ledger = ledger
        self.calls = ledger.calls.group(self.name, told or ranks)
        self.comparer: CallComparer | None = None
        self._under_way = under_way

    def __repr__(self) -> str:
        return f"Group({self.name}, rank {self.rank} of {self.size})"

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory that the transport likes best."""
        return self._at_home.empty(shape, dtype, self.device)

    @property
    def sharers(self) -> int:
        """How many of the ranks, this one among them, have what `common_zeros` gives in common."""
        return self._at_home.sharers

    def common_zeros(self, length: int, dtype: torch.dtype) -> Tensor | None:
        """So many zeros in memory that is one and the same on the `sharers`, those of a node; None where
        there is no such memory. Collective. See Transport for when it may be read and written.
        """
        return self._at_home.common_zeros(length, dtype, self.device)

    @property
    def _at_home(self) -> Transport:
        """What moves memory of `device`."""
        return self.host if on_host(self.device) else self.accelerator

    # Reductions

    def start_all_reduce(
        self, tensor: Tensor, operation: Operation = "sum", blocking: bool = False
    ) -> Work[Tensor]:
        """Reduce over the ranks, in place on all of them; `tensor` itself."""
        assert tensor.is_contiguous()
        if self.size == 1:
            return Work(tensor)
        return self._run(Call("all_reduce", tensor, tensor, blocking, operation), tensor)

    def start_reduce(
        self, tensor: Tensor, root: int = 0, operation: Operation = "sum", blocking: bool = False
    ) -> Work[Tensor]:
        """Reduce over the ranks, in place at `root`; the others' tensors stay as they are."""
        assert tensor.is_contiguous()
        if self.size == 1:
            return Work(tensor)
        output = tensor if self.rank == root else None
        return self._run(Call("reduce", tensor, output, blocking, operation, root=root), tensor)

    def start_reduce_scatter(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        sizes: Sizes = None,
        operation: Operation = "sum",
        blocking: bool = False,
    ) -> Work[Tensor]:
        """Reduce over the ranks; this rank's rows of the result, in `output`.

        `output` may be this rank's own rows of `tensor`. The other rows of `tensor` stay as they are.
        """
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

    def start_broadcast(self, tensor: Tensor, root: int = 0, blocking: bool = False) -> Work[Tensor]:
        """Copy root's tensor into all others, in place; `tensor` itself."""
        assert tensor.is_contiguous()
        if self.size == 1:
            return Work(tensor)
        given, received = (tensor, None) if self.rank == root else (None, tensor)
        return self._run(Call("broadcast", given, received, blocking, root=root), tensor)

    def start_all_gather(
        self, tensor: Tensor, output: Tensor | None = None, sizes: Sizes = None, blocking: bool = False
    ) -> Work[Tensor]:
        """All ranks' tensors, concatenated along dim 0. `tensor` may be its own rows of `output`."""
        if self.size == 1:
            return Work(_copy(tensor, output))
        began = perf_counter()
        tensor, rows, counts = self._part(tensor, sizes)
        output = _output(output, tensor, rows)
        call = Call("all_gather", tensor, output, blocking, began=began, bytes=output.nbytes, counts=counts)
        return self._run(call, output)

    def start_gather(
        self,
        tensor: Tensor,
        root: int = 0,
        output: Tensor | None = None,
        sizes: Sizes = None,
        blocking: bool = False,
    ) -> Work[Tensor | None]:
        """All ranks' tensors, concatenated along dim 0, at `root`; None elsewhere."""
        if self.size == 1:
            return Work(_copy(tensor, output))
        began = perf_counter()
        tensor, rows, counts = self._part(tensor, sizes)
        output = _output(output, tensor, rows) if self.rank == root else None
        total = self._total(tensor, counts)
        call = Call("gather", tensor, output, blocking, began=began, bytes=total, root=root, counts=counts)
        return self._run(call, output)

    def start_scatter(
        self,
        tensor: Tensor | None,
        output: Tensor,
        root: int = 0,
        sizes: Sizes = None,
        blocking: bool = False,
    ) -> Work[Tensor]:
        """Each rank's rows of root's tensor (None elsewhere), in `output`."""
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

    def start_all_to_all(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        send_sizes: Sizes = None,
        receive_sizes: Sizes = None,
        blocking: bool = False,
    ) -> Work[Tensor]:
        """Hand the r-th piece of `tensor` to rank r; the pieces from all ranks, in rank order.

        Uneven pieces need both lists, which differ from rank to rank.
        """
        assert (send_sizes is None) == (receive_sizes is None), "uneven pieces need both lists"
        if self.size == 1:
            return Work(_copy(tensor, output))
        began = perf_counter()
        tensor = tensor.contiguous()
        sent, received = _elements(tensor, send_sizes), _elements(tensor, receive_sizes)
        assert sent is None or sum(sent) == tensor.numel(), (self, tensor.shape, send_sizes)
        rows = self._share(tensor) * self.size if receive_sizes is None else sum(receive_sizes)
        output = _output(output, tensor, rows)
        call = Call("all_to_all", tensor, output, blocking, began=began, counts=sent, received=received)
        if sent is not None:  # rows of its own stay where they are
            call.payload -= sent[self.rank] * tensor.itemsize
        return self._run(call, output)

    def start_send(
        self, tensor: Tensor, destination: int, tag: int = 0, blocking: bool = False
    ) -> Work[None]:
        """Send to one rank of the group. Tags are below 16384."""
        began = perf_counter()
        tensor = tensor.contiguous()
        return self._run(Call("send", tensor, None, blocking, began=began, peer=destination, tag=tag), None)

    def start_recv(self, tensor: Tensor, source: int, tag: int = 0, blocking: bool = False) -> Work[Tensor]:
        """Receive into all of `tensor`, in place; `tensor` itself."""
        assert tensor.is_contiguous()
        return self._run(Call("recv", None, tensor, blocking, peer=source, tag=tag), tensor)

    def start_barrier(self, blocking: bool = False) -> Work[None]:
        """Return when every rank of the group has come here (the host; a GPU's streams run on)."""
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

    @contextmanager
    def watched_call(self, operation: str, file: Path) -> Iterator[None]:
        """Record a collective call of a library, made in the block, for reports of hangs.

        Args:
            operation: Name of the operation, such as "open_file".
            file: File that the call works on.
        """
        call = Call(operation, file=str(file))
        self._agree(call)
        try:
            yield
        except Exception as error:
            call.error = error_reason(error)
            raise
        finally:
            self.calls.leave()

    # Parts of the above

    def _run(self, call: Call, result: Result) -> Work[Result]:
        self.calls.enter(call)
        transport = self._transport(call)
        pending = transport.run(call) if self.comparer is None else self.comparer.run(call, transport)
        ended, began = perf_counter(), call.began
        self.calls.leave()
        entry = self.ledger.enter(self.name, call.operation, call.payload, ended - began)
        timeline, span = self.ledger.timeline, None
        if timeline is not None:
            span = timeline.record(self.name, call.operation, began, ended, call.payload)
        if pending is None:
            call.release()
            return Work(result)
        return StartedWork(result, pending, call, self.ledger, entry, span, self._under_way)

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
