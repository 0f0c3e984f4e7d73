"""Where a checkpoint came from: the chain of runs that led to it, and the losses of its last steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from hpctrain.checkpoint.versions import library_versions, package_commit
from hpctrain.files import finite

SEGMENTS = 1000  # of a history, at most: the first one and the newest
LOSSES = 100
_TEXT = 300

Layout = dict[str, int]
"""Ranks along each axis of the mesh, and what ZeRO cuts (0-3) under "zero"."""


@dataclass(frozen=True)
class HistorySegment:
    """One run of the chain: steps `first_step` to `last_step`, on so many ranks, from a checkpoint or none.

    `started` is UTC, such as "2026-03-01T12:00:00Z"; `commit` the package's, None where it is unknown.
    `steps` are those that the whole run was to have, None where an older version wrote the file; `computed`
    names by what it computed its "products" and "functions", and is empty there.
    """

    title: str
    run_dir: str
    ranks: int
    layout: Layout
    first_step: int
    last_step: int
    versions: dict[str, str]
    commit: str | None
    started: str
    went_on_from: str | None = None
    steps: int | None = None
    computed: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(row: object) -> HistorySegment | None:
        """The segment of a stored object; None where it is none."""
        if not isinstance(row, dict):
            return None
        kinds: dict[str, type | tuple[type, ...]] = {
            **dict.fromkeys(("title", "run_dir", "started"), str),
            **dict.fromkeys(("ranks", "first_step", "last_step"), int),
            **dict.fromkeys(("layout", "versions"), dict),
            **dict.fromkeys(("commit", "went_on_from"), (str, type(None))),
            "steps": (int, type(None)),
            "computed": dict,
        }
        values: dict[str, Any] = {name: row.get(name) for name in kinds}
        values["computed"] = row.get("computed", {})
        if not all(isinstance(value, kinds[name]) for name, value in values.items()):
            return None
        return HistorySegment(**values)


@dataclass(frozen=True)
class RecordedLoss:
    """What one step recorded, None where it was not finite."""

    step: int
    loss: float | None
    grad_norm: float | None


class Provenance:
    """The history and last losses of a run that goes on, for its checkpoints."""

    def __init__(
        self,
        title: str,
        run_dir: str,
        layout: Layout,
        ranks: int,
        steps: int | None = None,
        computed: Mapping[str, str] | None = None,
    ) -> None:
        self._here = HistorySegment(
            title=_cut(title),
            run_dir=_cut(run_dir),
            ranks=ranks,
            layout=layout,
            first_step=1,
            last_step=0,
            versions={name: _cut(version) for name, version in library_versions().items()},
            commit=package_commit(),
            started=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            steps=steps,
            computed=dict(computed or {}),
        )
        self._earlier: list[HistorySegment] = []
        self._losses: deque[RecordedLoss] = deque(maxlen=LOSSES)

    def of(self, ranks: int, layout: Layout) -> Provenance:
        """The same, of a run on other ranks than those who write."""
        self._here = replace(self._here, ranks=ranks, layout=layout)
        return self

    def continue_from(self, state: Mapping[str, Any], origin: str) -> None:
        """Append to the chain that the state of a checkpoint, or of another `origin`, tells."""
        self._earlier = history(state)
        self._losses.clear()
        self._losses.extend(losses(state))
        step = int(state["step"])
        self._here = replace(self._here, first_step=step + 1, went_on_from=_cut(origin))

    def record(self, step: int, loss: float, grad_norm: float) -> None:
        """Remember what a step recorded."""
        self._losses.append(RecordedLoss(step, finite(loss), finite(grad_norm)))

    def stored(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` steps stores: "history" and "losses"."""
        chain = [*self._earlier, replace(self._here, last_step=step)]
        if len(chain) > SEGMENTS:
            chain = [chain[0], *chain[1 - SEGMENTS :]]
        return {
            "history": [asdict(segment) for segment in chain],
            "losses": [asdict(loss) for loss in self._losses],
        }


def history(state: Mapping[str, Any]) -> list[HistorySegment]:
    """The chain of runs that led to a checkpoint, oldest first, the one that wrote it last."""
    return [segment for row in _rows(state, "history") if (segment := HistorySegment.of(row)) is not None]


def losses(state: Mapping[str, Any]) -> list[RecordedLoss]:
    """What the last steps before a checkpoint recorded, oldest first."""
    return [
        RecordedLoss(row["step"], _number(row.get("loss")), _number(row.get("grad_norm")))
        for row in _rows(state, "losses")
        if isinstance(row, dict) and isinstance(row.get("step"), int)
    ]


def _rows(state: Mapping[str, Any], name: str) -> Iterator[object]:
    stored = state.get(name)
    yield from stored if isinstance(stored, list) else []


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else text[: _TEXT - 3] + "..."


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
