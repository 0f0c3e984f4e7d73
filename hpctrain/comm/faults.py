"""Faults: what checks have found wrong of what was computed, kept or sent, and where it lies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Kind = Literal["memory", "message", "product", "copies", "micro-batch"]
"""What was found wrong: values that changed while they lay there, what arrived or was summed, the result of a
matrix product, ranks that should have the same values, a micro-batch that two ranks computed."""


@dataclass(frozen=True)
class Fault:
    """Something wrong: of the tensor or communication `name`, in a phase of the ledger.

    It lies at one of the `ranks` of the world: as a rule there is one, where two disagree both.
    """

    kind: Kind
    name: str
    phase: str
    ranks: tuple[int, ...]
    detail: str = ""

    @property
    def row(self) -> dict[str, Any]:
        """As ranks tell each other, and as written into JSON."""
        return asdict(self) | {"ranks": list(self.ranks)}

    @staticmethod
    def of(row: dict[str, Any]) -> Fault:
        """That of a row."""
        values = {field.name: row[field.name] for field in fields(Fault)}
        return Fault(**values | {"ranks": tuple(row["ranks"])})


class Faults:
    """Those that this rank has found since they were last taken."""

    def __init__(self) -> None:
        self._found: list[Fault] = []

    def add(self, faults: Iterable[Fault]) -> None:
        """More were found."""
        self._found += faults

    def take(self) -> list[Fault]:
        """All of them, each once; from here on there are none."""
        found, self._found = list(dict.fromkeys(self._found)), []
        return found
