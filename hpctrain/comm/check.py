"""Whether the ranks of a group call the same, compared before each operation so that a difference has a name.

`check_group` gives a Group what compares its calls; one without it runs them at once.
Groups of the same ranks share one sequence of calls, so that a call of the wrong one of them is seen too.
A started operation is compared when it is first tested or waited for: a rank may start its operations
of several groups in an order of its own.
"""

from __future__ import annotations

from hpctrain.comm.calls import Call
from hpctrain.comm.group import Group
from hpctrain.comm.library import MPI, communicator_of
from hpctrain.comm.outcome import name_ranks
from hpctrain.comm.transport import Pending, Transport
from hpctrain.errors import EXIT_INTERNAL, HpctrainError

WIDTH = 256  # bytes of one rank's words about its call


class MismatchError(HpctrainError):
    """The ranks of a group call different operations: one sentence with each rank's call."""

    exit_code = EXIT_INTERNAL


class Checks:
    """The comparisons of one rank; `channels` are by the ranks (of the world) that compare."""

    def __init__(self) -> None:
        self.channels: dict[tuple[int, ...], MPI.Intracomm] = {}

    def check_group(self, group: Group) -> None:
        """Compare what the group's ranks call, from here on. Collective over the group."""
        if group.size == 1 or group.comparer is not None:
            return
        if group.ranks not in self.channels:
            self.channels[group.ranks] = communicator_of(group.objects).Dup()
        group.comparer = MpiComparer(self.channels[group.ranks], group.ranks)


class MpiComparer:
    """Compares this rank's present call with those of `ranks` over a communicator of their own."""

    def __init__(self, communicator: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
        self.communicator, self.ranks = communicator, ranks
        self._told: list[tuple[MPI.Request, bytearray]] = []

    def run(self, call: Call, transport: Transport) -> Pending | None:
        """Run the call once the ranks agree in it; one that is started is compared on its way."""
        if call.operation == "send":
            self._tell(call)
            return transport.run(call)
        comparison = (
            Announcement(self, call) if call.operation == "recv" else Comparison(self, _words_of(call))
        )
        if call.blocking:
            comparison.wait()
        pending = transport.run(call)
        return None if pending is None else Checked(comparison, pending)

    def agree(self, call: Call) -> None:
        """Return when the ranks agree in a call that no transport runs."""
        Comparison(self, _words_of(call)).wait()

    def _tell(self, call: Call) -> None:
        """Tell the receiver of what is sent to it."""
        self._told = [(request, held) for request, held in self._told if not request.Test()]
        mine = _padded(_payload(call))
        self._told.append((self.communicator.Isend([mine, MPI.BYTE], call.peer, call.tag), mine))


class Comparison:
    """A comparison of a collective call under way."""

    def __init__(self, comparer: MpiComparer, words: str) -> None:
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

    def __init__(self, comparer: MpiComparer, call: Call) -> None:
        self._call, self._sender = call, comparer.ranks[call.peer]
        self._receiver = comparer.ranks[comparer.communicator.rank]
        self._theirs = bytearray(WIDTH)
        self._request = comparer.communicator.Irecv([self._theirs, MPI.BYTE], call.peer, call.tag)
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


def _words_of(call: Call) -> str:
    """What must be equal on all ranks in a collective call; of uneven pieces of an exchange the sizes, which
    differ from rank to rank, are not.
    """
    details: list[str] = []
    if call.reduced is not None:
        details.append(call.reduced)
    if call.root >= 0:
        details.append(f"root {call.root}")
    differing = call.received is not None
    if differing:
        details.append("uneven pieces")
    elif call.counts is not None:
        details.append(f"pieces {','.join(map(str, call.counts))}")
    if call.dtype is not None:
        size = "" if differing else f"{call.bytes} bytes of "
        details.insert(0, f"{size}{str(call.dtype).removeprefix('torch.')}")
    return f"{call.operation} {call.number} of {call.group.name}" + (
        f" ({', '.join(details)})" if details else ""
    )


def _payload(call: Call) -> str:
    return f"{call.bytes} bytes of {str(call.dtype).removeprefix('torch.')}"


def _padded(words: str) -> bytearray:
    return bytearray(words.encode("ascii", "replace")[:WIDTH].ljust(WIDTH))


def _words(padded: bytearray) -> str:
    return padded.decode("ascii").rstrip()
