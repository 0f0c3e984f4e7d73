"""Whether the ranks of a group call the same, compared before each operation so that a difference has a name.

`check_group` gives a Group what compares its calls; one without it runs them at once.
Groups of the same ranks share one sequence of calls, so that a call of the wrong one of them is seen too.
A started operation is compared when it is first tested or waited for: a rank may start its operations
of several groups in an order of its own.
"""

from __future__ import annotations

from hpctrain.comm.calls import Call
from hpctrain.comm.group import Group
from hpctrain.comm.outcome import name_ranks
from hpctrain.comm.transports.mpi import MpiRequests
from hpctrain.comm.transports.transport import SteppedWork, Steps, Transport, TransportWork, run_steps
from hpctrain.errors import EXIT_INTERNAL, HpctrainError
from hpctrain.host.mpi_library import MPI, communicator_of

WIDTH = 256  # bytes of one rank's words about its call


class MismatchError(HpctrainError):
    """The ranks of a group call different operations: one sentence with each rank's call."""

    exit_code = EXIT_INTERNAL


class CallChecks:
    """The comparisons of one rank; `channels` are by the ranks (of the world) that compare."""

    def __init__(self) -> None:
        self.channels: dict[tuple[int, ...], MPI.Intracomm] = {}

    def check_group(self, group: Group) -> None:
        """Compare what the group's ranks call, from here on. Collective over the group."""
        if group.size == 1 or group.comparer is not None:
            return
        if group.ranks not in self.channels:
            self.channels[group.ranks] = communicator_of(group.objects).Dup()
        group.comparer = MpiCallComparer(self.channels[group.ranks], group.ranks)


class MpiCallComparer:
    """Compares this rank's present call with those of `ranks` over a communicator of their own."""

    def __init__(self, communicator: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
        self.communicator, self.ranks = communicator, ranks
        self._announced: list[tuple[MPI.Request, bytearray]] = []

    def run(self, call: Call, transport: Transport) -> TransportWork | None:
        """Run the call once the ranks agree in it; one that is started is compared on its way."""
        if call.operation == "send":
            self._announce(call)
            return transport.run(call)
        comparison = run_steps(
            self._hear(call) if call.operation == "recv" else self._compare(call), call.blocking
        )
        pending = transport.run(call)
        return None if pending is None else SteppedWork(iter((comparison, pending)))

    def agree(self, call: Call) -> None:
        """Return when the ranks agree in a call that no transport runs."""
        run_steps(self._compare(call), True)

    def _announce(self, call: Call) -> None:
        """Say to the receiver what is sent to it."""
        self._announced = [each for each in self._announced if not each[0].Test()]
        mine = _padded(_payload(call))
        self._announced.append((self.communicator.Isend([mine, MPI.BYTE], call.peer, call.tag), mine))

    def _hear(self, call: Call) -> Steps:
        """What the sender announces; MismatchError where that is something else than is received."""
        theirs = bytearray(WIDTH)
        yield MpiRequests([self.communicator.Irecv([theirs, MPI.BYTE], call.peer, call.tag)])
        sent = _words(theirs)
        if sent != _payload(call):
            raise MismatchError(
                f"the ranks disagree in what they send: rank {self.ranks[call.peer]} sends {sent}, but rank "
                f"{self.ranks[self.communicator.rank]} receives {_payload(call)} (receive {call.number} from "
                f"it in {call.group.name})"
            )

    def _compare(self, call: Call) -> Steps:
        """What all ranks say of a collective call; MismatchError where they do not say the same."""
        mine = _padded(_words_of(call))
        everyone = bytearray(WIDTH * len(self.ranks))
        yield MpiRequests([self.communicator.Iallgather([mine, MPI.BYTE], [everyone, WIDTH, MPI.BYTE])])
        if everyone == mine * len(self.ranks):
            return
        callers: dict[str, list[int]] = {}
        for index, rank in enumerate(self.ranks):
            callers.setdefault(_words(everyone[WIDTH * index : WIDTH * (index + 1)]), []).append(rank)
        calls = [
            f"{name_ranks(ranks)} call{'s' if len(ranks) == 1 else ''} {words}"
            for words, ranks in callers.items()
        ]
        raise MismatchError(f"the ranks disagree in what they call: {'; '.join(calls)}")


def _words_of(call: Call) -> str:
    """What must be equal on all ranks in a collective call; of uneven pieces of an exchange the sizes, which
    differ from rank to rank, are not.
    """
    details: list[str] = []
    if call.reduction is not None:
        details.append(call.reduction)
    if call.root >= 0:
        details.append(f"root {call.root}")
    differing = call.receive_counts is not None
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
