"""Silent faults that checks have found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from hpctrain.comm.error_messages import name_ranks
from hpctrain.errors import EXIT_INTERNAL, HpctrainError

FaultKind = Literal["memory", "message", "product", "copies", "micro-batch"]
"""What was found: values that changed in memory, a changed message or a wrong sum over ranks, a wrong result
of a matrix product, ranks whose copies of the same values differ, or a micro-batch with two results."""


@dataclass(frozen=True)
class DetectedFault:
    """One silent fault.

    Attributes:
        kind: What was found.
        name: Name of the tensor, or of the operation and its group.
        phase: Phase of the step (`Ledger.phase`) in which the checked values were computed or sent.
        ranks: Ranks of the world of which at least one is faulty. Usually it is one; if the values of two
            ranks differ and nothing shows which one is wrong, both.
        detail: End of the sentence that begins with `name`.
    """

    kind: FaultKind
    name: str
    phase: str
    ranks: tuple[int, ...]
    detail: str = ""

    @property
    def row(self) -> dict[str, Any]:
        """The fault as a dict of its fields, as it is sent to other ranks and written into JSON files.

        `ranks` is a list in it.
        """
        return asdict(self) | {"ranks": list(self.ranks)}

    @staticmethod
    def from_row(row: dict[str, Any]) -> DetectedFault:
        """Return the fault that a `row` describes, which may come from JSON and have further keys.

        Raises:
            KeyError: A field is missing.
        """
        values = {field.name: row[field.name] for field in fields(DetectedFault)}
        return DetectedFault(**values | {"ranks": tuple(row["ranks"])})


class FaultCollector:
    """Faults that this rank has found since the last `take`."""

    def __init__(self) -> None:
        self._faults: list[DetectedFault] = []

    def add(self, faults: Iterable[DetectedFault]) -> None:
        """Add faults to those that the next `take` returns. Nothing is raised, logged or sent."""
        self._faults += faults

    def take(self) -> list[DetectedFault]:
        """Return each distinct fault that was added since the last call, in that order, and forget them.

        Local.
        """
        faults, self._faults = list(dict.fromkeys(self._faults)), []
        return faults


class SilentFaultError(HpctrainError):
    """Error that all ranks raise with the same faults.

    Attributes:
        step: Step in which the faults were found.
        faults: All faults that any rank has found.
        state_unchanged: True if the state of all ranks is that before the step.
    """

    exit_code = EXIT_INTERNAL

    def __init__(self, step: int, faults: Sequence[DetectedFault], state_unchanged: bool) -> None:
        super().__init__([f"step {step}: {describe_fault(fault)}" for fault in faults])
        self.step, self.faults, self.state_unchanged = step, faults, state_unchanged


def describe_fault(fault: DetectedFault) -> str:
    """Return a fault in words for logs and error messages.

    An example is "silent fault on rank 1: all_reduce of data call 5, 4.1 kB of float32: the sum is wrong
    (message, backward)".
    """
    where = name_ranks(fault.ranks)
    return f"silent fault on {where}: {fault.name} {fault.detail} ({fault.kind}, {fault.phase})"
