"""Messages that the check for silent faults adds to the calls of a rank (`stability.corruption`).

All of them use MPI, on communicators of their own. With "full", each message between two ranks is followed by
its checksum. Twice in a step, the ranks of each communicator exchange records of the calls that are checked
(`audit/call_log.py`). An exchange is rehearsed with the number of records, not with their bytes. A sum that
"full" makes in several calls is rehearsed as one call, since all its ranks start these calls in one order
(`audit/start_order.py`). Exchanges that start after CALLS_PER_EXCHANGE records, comparisons of copies, and
repeated micro-batches are left out, since not every step has them.
"""

from __future__ import annotations

from array import array
from collections import Counter

from hpctrain.audit.bits import COPIES
from hpctrain.plan.rehearse.programme import AUDIT, RehearsedCall
from hpctrain.text import counted

REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
NOT_CHECKED = frozenset({"agreement", "barrier"})
CHECKSUM_BYTES = COPIES * array("i").itemsize


class AuditMessages:
    """Additional messages of one rank. Methods are local.

    Args:
        depth: Value of `stability.corruption`: "off" (no messages), "cheap" or "full".

    Attributes:
        is_on: True if anything is checked.
        is_full: True if all messages are checked, not only reductions.
        records: Number of calls of each communicator since its last exchange.
        communicators: Name of the communicator of each group whose name differs from it.
    """

    def __init__(self, depth: str) -> None:
        self.is_on, self.is_full = depth != "off", depth == "full"
        self.records: Counter[str] = Counter()
        self.communicators: dict[str, str] = {}

    def begin_step(self) -> None:
        """Begin a step like all others. The one before has exchanged all records but those of two calls."""
        self.records.clear()
        if self.is_full:
            self.records["world"] = 2

    def count(self, call: RehearsedCall) -> None:
        """Count a call if it is checked."""
        checks_all = self.is_full and call.is_collective and call.operation not in NOT_CHECKED
        if checks_all or (self.is_on and call.operation in REDUCTIONS):
            self.records[self._communicator(call.group)] += 1

    def checksum(self, message: RehearsedCall) -> RehearsedCall | None:
        """Return the message with the checksum of a message; None if messages are not checked."""
        if not self.is_full or not message.is_message:
            return None
        return RehearsedCall(
            message.operation,
            AUDIT + self._communicator(message.group),
            CHECKSUM_BYTES,
            message.offset,
            message.tag,
            what="checksum",
            format="int32",
            blocking=False,
            action=message.action,
        )

    def exchanges(self, action: str) -> list[RehearsedCall]:
        """Return the exchanges of all records so far. All of them are started before the first wait."""
        records = {name: number for name, number in sorted(self.records.items()) if number}
        self.records.clear()
        return [
            RehearsedCall(
                "all_to_all",
                AUDIT + name,
                what=f"of {counted(number, 'record')}",
                format="int64",
                blocking=False,
                action=action,
            )
            for name, number in records.items()
        ]

    def _communicator(self, group: str) -> str:
        return self.communicators.get(group, group)
