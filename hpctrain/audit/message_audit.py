"""Check of all messages and sums over ranks of a world for silent faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import override

from hpctrain.audit.audited_transport import AuditChannel, AuditedTransport
from hpctrain.audit.call_log import AuditLog
from hpctrain.audit.detected_fault import DetectedFault, FaultCollector
from hpctrain.comm.group_factory import TransportDecorator
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.transports.choose import TransportPair
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.world import World
from hpctrain.host.mpi_library import MPI

Depth = Literal["cheap", "full"]
"""What is checked: only sums over ranks ("cheap"), or also every tensor that ranks send ("full")."""


class MessageAudit(TransportDecorator):
    """Checks of the calls of all groups of a world, on this rank.

    Attributes:
        depth: What is checked.
        ledger: Ledger of the world, whose phase each fault names.
        faults: Collector of the faults that this rank has found since the last `collect_faults`.
        logs: Logs of the checked groups.
    """

    def __init__(self, depth: Depth, ledger: Ledger) -> None:
        self.depth, self.ledger, self.faults = depth, ledger, FaultCollector()
        self.logs: list[AuditLog[Any]] = []

    @override
    def wrap(
        self,
        transports: TransportPair,
        communicator: MPI.Intracomm,
        ranks: Sequence[int],
        scratch: ReductionScratch,
    ) -> TransportPair:
        channel = AuditChannel(communicator.Dup(), ranks, self.faults, self.ledger, self.depth == "full")
        self.logs += channel.logs
        host, accelerator = (AuditedTransport(inner, channel, scratch) for inner in transports)
        return host, accelerator

    @override
    def for_subworld(self) -> MessageAudit:
        """Return a new audit of the same depth and ledger, with logs and faults of its own. Local."""
        return MessageAudit(self.depth, self.ledger)

    def collect_faults(self) -> list[DetectedFault]:
        """Exchange and compare what the ranks recorded about their calls since the last time.

        Collective over all ranks of the world, at the same point of the program. It waits for the other
        ranks, but for no call: started calls may be in flight, and calls that are not complete on all ranks
        of their group are compared the next time. Nothing is raised.

        Returns:
            The faults that this rank has found since the last time, including those of messages that it has
            received; it then forgets them. In general each fault is found by one rank only, so the caller
            must gather the lists of all ranks.
        """
        for log in self.logs:
            log.start_exchange()
        for log in self.logs:
            log.finish_exchange()
        return self.faults.take()


def audit_messages(world: World, depth: Depth) -> MessageAudit:
    """Check the messages of `world.everyone` and of all groups of this world that are made later. Collective.

    Other groups that exist already stay as they are. If messages are already checked in this depth, nothing
    changes. If they are checked in another depth, a new audit replaces the old one for `world.everyone` and
    later groups. Groups made before keep the old audit, which no longer belongs to the world: only its own
    `collect_faults` still reports their faults.

    Args:
        world: The world.
        depth: What is checked, the same on all ranks: "cheap" for sums over ranks only, "full" for every
            tensor that ranks send.

    Returns:
        The audit, whose `collect_faults` reports faults; the present one if nothing changes.
    """
    audit = message_audit_of(world)
    if audit is None or audit.depth != depth:
        audit = MessageAudit(depth, world.ledger)
        world.decorate_transports(audit)
    return audit


def message_audit_of(world: World) -> MessageAudit | None:
    """Return the audit of the messages of a world; None if messages are not checked. Local."""
    decorator = world.groups.decorator
    return decorator if isinstance(decorator, MessageAudit) else None
