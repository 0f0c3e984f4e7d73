"""Whether the ranks of a group call the same, compared before each operation so that a difference has a name.

`check_group` puts itself between a Group and what it runs on; a group that is not checked pays nothing.
Groups of the same ranks share one sequence of calls, so that a call of the wrong one of them is seen too.
A started operation is compared when it is first tested or waited for: a rank may start its operations
of several groups in an order of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hpctrain.comm.calls import Call, Calls
from hpctrain.comm.group import Group
from hpctrain.comm.library import MPI
from hpctrain.comm.outcome import name_ranks
from hpctrain.comm.transport import Operation, Pending, Transport
from hpctrain.errors import EXIT_INTERNAL, HpctrainError

WIDTH = 256  # bytes of one rank's words about its call


class MismatchError(HpctrainError):
    """The ranks of a group call different operations: one sentence with each rank's call."""

    exit_code = EXIT_INTERNAL


class Checks:
    """The comparisons of one rank; `channels` are by the ranks (of the world) that compare."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.channels: dict[tuple[int, ...], MPI.Intracomm] = {}

    def check_group(self, group: Group) -> None:
        """Compare what the group's ranks call, from here on. Collective over the group."""
        if group.size == 1 or isinstance(group.host, CheckedTransport):
            return
        if group.ranks not in self.channels:
            self.channels[group.ranks] = group.communicator.Dup()
        comparer = Comparer(self.calls, self.channels[group.ranks], group.ranks)
        group.host = CheckedTransport(group.host, comparer)
        group.accelerator = CheckedTransport(group.accelerator, comparer)
        group.objects = CheckedObjects(group.communicator, comparer)


def uncheck_group(group: Group) -> None:
    """Compare no longer."""
    if isinstance(group.host, CheckedTransport) and isinstance(group.accelerator, CheckedTransport):
        group.host, group.accelerator = group.host.inner, group.accelerator.inner
        group.objects = group.communicator


class Comparer:
    """Compares this rank's present call with those of `ranks` over a communicator of their own."""

    def __init__(self, calls: Calls, communicator: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
        self.calls, self.communicator, self.ranks = calls, communicator, ranks
        self._told: list[tuple[MPI.Request, bytearray]] = []

    def start(self, detail: str, sized: bool = True) -> Comparison:
        """Tell the others of a collective call; `detail` is what else must be equal."""
        call = self._call()
        words = f"{call.operation} {call.number} of {call.group.name}"
        if call.dtype is not None:
            size = f"{call.bytes} bytes of " if sized else ""
            words += f" ({size}{str(call.dtype).removeprefix('torch.')}{', ' * bool(detail)}{detail})"
        elif detail:
            words += f" ({detail})"
        return Comparison(self, words)

    def tell(self, peer: int, tag: int) -> None:
        """Tell the receiver of what is sent to it."""
        self._told = [(request, held) for request, held in self._told if not request.Test()]
        mine = _padded(_payload(self._call()))
        self._told.append((self.communicator.Isend([mine, MPI.BYTE], peer, tag), mine))

    def hear(self, peer: int, tag: int) -> Announcement:
        """What a sender tells."""
        return Announcement(self, self._call(), peer, tag)

    def _call(self) -> Call:
        call = self.calls.current
        assert call is not None, "a transport is called by its Group"
        return call


class Comparison:
    """A comparison of a collective call under way."""

    def __init__(self, comparer: Comparer, words: str) -> None:
        self._ranks = comparer.ranks
        self._mine = _padded(words)
        self._all = bytearray(WIDTH * len(comparer.ranks))
        self._request = comparer.communicator.Iallgather([self._mine, MPI.BYTE], [self._all, WIDTH, MPI.BYTE])
        self._done = False

    def wait(self) -> None:
        """Return when all ranks have told the same; MismatchError where they have not."""
        if not self._done:
            self._request.Wait()
            self._compare()

    def test(self) -> bool:
        """Whether all have told."""
        if not self._done and self._request.Test():
            self._compare()
        return self._done

    def _compare(self) -> None:
        self._done = True
        if self._all == self._mine * len(self._ranks):
            return
        told: dict[str, list[int]] = {}
        for place, rank in enumerate(self._ranks):
            told.setdefault(_words(self._all[WIDTH * place : WIDTH * (place + 1)]), []).append(rank)
        calls = [
            f"{name_ranks(ranks)} call{'s' if len(ranks) == 1 else ''} {words}"
            for words, ranks in told.items()
        ]
        raise MismatchError(f"the ranks disagree in what they call: {'; '.join(calls)}")


class Announcement:
    """What the sender of a message tells of it, on its way to the receiver."""

    def __init__(self, comparer: Comparer, call: Call, peer: int, tag: int) -> None:
        self._call, self._sender = call, comparer.ranks[peer]
        self._receiver = comparer.ranks[comparer.communicator.rank]
        self._theirs = bytearray(WIDTH)
        self._request = comparer.communicator.Irecv([self._theirs, MPI.BYTE], peer, tag)
        self._done = False

    def wait(self) -> None:
        """Return when the sender has told; MismatchError where it sends something else."""
        if not self._done:
            self._request.Wait()
            self._compare()

    def test(self) -> bool:
        """Whether the sender has told."""
        if not self._done and self._request.Test():
            self._compare()
        return self._done

    def _compare(self) -> None:
        self._done = True
        call, sent = self._call, _words(self._theirs)
        if sent != _payload(call):
            raise MismatchError(
                f"the ranks disagree in what they send: rank {self._sender} sends {sent}, but rank "
                f"{self._receiver} receives {_payload(call)} (receive {call.number} from it in "
                f"{call.group.name})"
            )


class Checked:
    """An operation under way that is compared first."""

    def __init__(self, comparison: Comparison | Announcement, pending: Pending) -> None:
        self._comparison, self._pending = comparison, pending

    def wait(self) -> None:
        """Return when the operation is complete."""
        self._comparison.wait()
        self._pending.wait()

    def test(self) -> bool:
        """Whether the operation is complete."""
        return self._comparison.test() and self._pending.test()


class CheckedObjects:
    """Small Python values, over a communicator, by calls that are compared."""

    def __init__(self, communicator: MPI.Intracomm, comparer: Comparer) -> None:
        self.communicator, self.comparer = communicator, comparer

    def allgather(self, value: Any, /) -> list[Any]:
        """Every rank's value."""
        self.comparer.start("").wait()
        return self.communicator.allgather(value)

    def bcast(self, value: Any, root: int, /) -> Any:
        """Root's value."""
        self.comparer.start(f"root {root}").wait()
        return self.communicator.bcast(value, root)


class CheckedTransport(Transport):
    """Another transport's primitives, each compared among the ranks before it begins."""

    def __init__(self, inner: Transport, comparer: Comparer) -> None:
        self.inner, self.comparer = inner, comparer
        self.rank, self.size, self.limit = inner.rank, inner.size, inner.limit

    def _compared(self, blocking: bool, detail: str = "", sized: bool = True) -> Comparison:
        comparison = self.comparer.start(detail, sized)
        if blocking:
            comparison.wait()
        return comparison

    def all_reduce(self, tensor: Tensor, operation: Operation, blocking: bool) -> Pending | None:
        """See Transport."""
        comparison = self._compared(blocking, operation)
        return _with(comparison, self.inner.all_reduce(tensor, operation, blocking))

    def reduce(self, tensor: Tensor, root: int, operation: Operation, blocking: bool) -> Pending | None:
        """See Transport."""
        comparison = self._compared(blocking, f"{operation}, root {root}")
        return _with(comparison, self.inner.reduce(tensor, root, operation, blocking))

    def broadcast(self, tensor: Tensor, root: int, blocking: bool) -> Pending | None:
        """See Transport."""
        comparison = self._compared(blocking, f"root {root}")
        return _with(comparison, self.inner.broadcast(tensor, root, blocking))

    def all_gather(
        self, tensor: Tensor, output: Tensor, counts: Sequence[int] | None, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        comparison = self._compared(blocking, _pieces(counts))
        return _with(comparison, self.inner.all_gather(tensor, output, counts, blocking))

    def reduce_scatter(
        self,
        tensor: Tensor,
        output: Tensor,
        counts: Sequence[int] | None,
        operation: Operation,
        blocking: bool,
    ) -> Pending | None:
        """See Transport."""
        comparison = self._compared(blocking, f"{operation}{', ' * (counts is not None)}{_pieces(counts)}")
        return _with(comparison, self.inner.reduce_scatter(tensor, output, counts, operation, blocking))

    def gather(
        self, tensor: Tensor, output: Tensor | None, counts: Sequence[int] | None, root: int, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        comparison = self._compared(blocking, f"root {root}{', ' * (counts is not None)}{_pieces(counts)}")
        return _with(comparison, self.inner.gather(tensor, output, counts, root, blocking))

    def scatter(
        self, tensor: Tensor | None, output: Tensor, counts: Sequence[int] | None, root: int, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        comparison = self._compared(blocking, f"root {root}{', ' * (counts is not None)}{_pieces(counts)}")
        return _with(comparison, self.inner.scatter(tensor, output, counts, root, blocking))

    def all_to_all(
        self,
        tensor: Tensor,
        output: Tensor,
        send_counts: Sequence[int] | None,
        receive_counts: Sequence[int] | None,
        blocking: bool,
    ) -> Pending | None:
        """See Transport. Of uneven pieces the sizes, which differ from rank to rank, are not compared."""
        even = send_counts is None
        comparison = self._compared(blocking, "" if even else "uneven pieces", sized=even)
        return _with(comparison, self.inner.all_to_all(tensor, output, send_counts, receive_counts, blocking))

    def send(self, tensor: Tensor, destination: int, tag: int, blocking: bool) -> Pending | None:
        """See Transport."""
        self.comparer.tell(destination, tag)
        return self.inner.send(tensor, destination, tag, blocking)

    def recv(self, tensor: Tensor, source: int, tag: int, blocking: bool) -> Pending | None:
        """See Transport."""
        announcement = self.comparer.hear(source, tag)
        if blocking:
            announcement.wait()
        return _with(announcement, self.inner.recv(tensor, source, tag, blocking))

    def barrier(self, blocking: bool) -> Pending | None:
        """See Transport."""
        return _with(self._compared(blocking), self.inner.barrier(blocking))


def _with(comparison: Comparison | Announcement, pending: Pending | None) -> Pending | None:
    return None if pending is None else Checked(comparison, pending)


def _pieces(counts: Sequence[int] | None) -> str:
    """In words, how uneven pieces are; cut to `WIDTH` with the rest."""
    return "" if counts is None else f"pieces {','.join(map(str, counts))}"


def _payload(call: Call) -> str:
    return f"{call.bytes} bytes of {str(call.dtype).removeprefix('torch.')}"


def _padded(words: str) -> bytearray:
    return bytearray(words.encode("ascii", "replace")[:WIDTH].ljust(WIDTH))


def _words(padded: bytearray) -> str:
    return padded.decode("ascii").rstrip()
