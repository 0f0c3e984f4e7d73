"""Comparison of the calls of a group's ranks, which reports a difference before the ranks hang.

`CallChecks.check_group` gives a Group a CallComparer. Groups of the same ranks exchange descriptions of calls
over one communicator, so that a call of the wrong group is found, too. For a started operation, the exchange
is non-blocking: the handle of the operation first waits for it, and raises the error if calls differ.
"""

from __future__ import annotations

from hpctrain.comm.calls import Call
from hpctrain.comm.error_messages import name_ranks
from hpctrain.comm.group import Group
from hpctrain.comm.transports.mpi import MpiRequests
from hpctrain.comm.transports.transport import SteppedWork, Steps, Transport, TransportWork, run_steps
from hpctrain.errors import EXIT_INTERNAL, HpctrainError
from hpctrain.host.mpi_library import MPI, communicator_of

DESCRIPTION_BYTES = 256
"""Bytes of the description of a call that ranks exchange."""


class MismatchError(HpctrainError):
    """Error that the ranks of a group raise if they call different operations. It names these."""

    exit_code = EXIT_INTERNAL


class CallChecks:
    """Comparers of this rank's groups.

    Attributes:
        communicators: Communicator for comparisons of each set of ranks, by these ranks of the world.
    """

    def __init__(self) -> None:
        self.communicators: dict[tuple[int, ...], MPI.Intracomm] = {}

    def check_group(self, group: Group) -> None:
        """Compare the calls of a group's ranks from now on, by setting `group.comparer`.

        Collective over the group. Nothing happens for a group of one rank, or if its calls are already
        compared.
        """
        if group.size == 1 or group.comparer is not None:
            return
        if group.ranks not in self.communicators:
            self.communicators[group.ranks] = communicator_of(group.objects).Dup()
        group.comparer = CallComparer(self.communicators[group.ranks], group.ranks)


class CallComparer:
    """Comparison of the calls of a group's ranks before they run, over a communicator of its own.

    Args:
        communicator: Communicator that nothing else uses.
        ranks: Ranks of the world that it consists of.
    """

    def __init__(self, communicator: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
        self.communicator, self.ranks = communicator, ranks
        self._sent: list[tuple[MPI.Request, bytearray]] = []

    def run(self, call: Call, transport: Transport) -> TransportWork | None:
        """Run a call on the transport once all ranks make the same call. Return what `Transport.run` returns.

        Collective if the call is. What is compared is the group, the operation and its number, reduction,
        root, dtype and sizes (not those of an uneven all-to-all); of a message only dtype and size. A
        blocking call waits for the other ranks before it runs. A started one returns at once, and its handle
        compares.

        Raises:
            MismatchError: The calls differ. All ranks of the group raise it, for a started call when its
                handle is tested or waited for. For a message, only the receiver raises it. The group must not
                be used afterwards.
        """
        if call.operation == "send":
            self._send_description(call)
            return transport.run(call)
        is_message = call.operation == "recv"
        steps = self._compare_message(call) if is_message else self._compare_collective(call)
        comparison = run_steps(steps, call.blocking)
        work = transport.run(call)
        return None if work is None else SteppedWork(iter((comparison, work)))

    def agree(self, call: Call) -> None:
        """Return when all ranks make the same call, which no transport runs. Collective.

        Raises:
            MismatchError: They do not.
        """
        run_steps(self._compare_collective(call), True)

    def _send_description(self, call: Call) -> None:
        self._sent = [each for each in self._sent if not each[0].Test()]
        description = _encode(_describe_payload(call))
        request = self.communicator.Isend([description, MPI.BYTE], call.peer, call.tag)
        self._sent.append((request, description))

    def _compare_message(self, call: Call) -> Steps:
        buffer = bytearray(DESCRIPTION_BYTES)
        yield MpiRequests([self.communicator.Irecv([buffer, MPI.BYTE], call.peer, call.tag)])
        sent, expected = _decode(buffer), _describe_payload(call)
        if sent != expected:
            raise MismatchError(
                f"the ranks make different calls: rank {self.ranks[call.peer]} sends {sent}, but rank "
                f"{self.ranks[self.communicator.rank]} receives {expected} (receive {call.number} from "
                f"it in {call.group.name})"
            )

    def _compare_collective(self, call: Call) -> Steps:
        description_bytes = _encode(_describe_collective(call))
        all_ranks = bytearray(DESCRIPTION_BYTES * len(self.ranks))
        yield MpiRequests(
            [
                self.communicator.Iallgather(
                    [description_bytes, MPI.BYTE], [all_ranks, DESCRIPTION_BYTES, MPI.BYTE]
                )
            ]
        )
        if all_ranks == description_bytes * len(self.ranks):
            return
        callers: dict[str, list[int]] = {}
        for index, rank in enumerate(self.ranks):
            callers.setdefault(
                _decode(all_ranks[DESCRIPTION_BYTES * index : DESCRIPTION_BYTES * (index + 1)]), []
            ).append(rank)
        calls = [
            f"{name_ranks(ranks)} call{'s' if len(ranks) == 1 else ''} {description}"
            for description, ranks in callers.items()
        ]
        raise MismatchError(f"the ranks make different calls: {'; '.join(calls)}")


def _describe_collective(call: Call) -> str:
    """Return what must be the same on all ranks, which the sizes of an uneven all-to-all need not be."""
    details: list[str] = []
    if call.reduction is not None:
        details.append(call.reduction)
    if call.root >= 0:
        details.append(f"root {call.root}")
    has_uneven_pieces = call.receive_counts is not None
    if has_uneven_pieces:
        details.append("uneven pieces")
    elif call.counts is not None:
        details.append(f"pieces {','.join(map(str, call.counts))}")
    if call.dtype is not None:
        size = "" if has_uneven_pieces else f"{call.bytes} bytes of "
        details.insert(0, f"{size}{str(call.dtype).removeprefix('torch.')}")
    return f"{call.operation} {call.number} of {call.group.name}" + (
        f" ({', '.join(details)})" if details else ""
    )


def _describe_payload(call: Call) -> str:
    return f"{call.bytes} bytes of {str(call.dtype).removeprefix('torch.')}"


def _encode(description: str) -> bytearray:
    return bytearray(description.encode("ascii", "replace")[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES))


def _decode(buffer: bytearray) -> str:
    return buffer.decode("ascii").rstrip()
