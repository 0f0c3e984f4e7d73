"""Provenance of a checkpoint: the chain of runs that led to it, and the losses of its last steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from hpctrain.checkpoint.versions import library_versions, package_commit
from hpctrain.files import finite

SEGMENTS = 1000
"""Largest number of runs in a history: the first one and the newest ones."""

LOSSES = 100
"""Number of steps whose losses a checkpoint has."""

_TEXT = 300
"""Largest number of characters of a text in a history."""

Layout = dict[str, int]
"""Number of ranks along each axis of the mesh, and the stage of ZeRO (0 to 3) as "zero"."""


@dataclass(frozen=True)
class HistorySegment:
    """Run of the chain that led to a checkpoint.

    Attributes:
        title: Title of the run.
        run_dir: Its folder.
        ranks: Number of ranks.
        layout: Their layout.
        first_step: First step of this run.
        last_step: Last step of this run before the checkpoint.
        versions: Versions of hpctrain and of libraries.
        commit: git commit of hpctrain; None if it is unknown.
        started: Start in UTC, such as "2026-03-01T12:00:00Z".
        went_on_from: Checkpoint, or other source, that the run resumed; None for a new run.
        steps: Number of steps in the deck; None in files of older versions.
        computed: Kernels of "products" and "functions"; empty in files of older versions.
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
        """Return the segment of a JSON object; None if the object is not one."""
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
    """Loss and gradient norm of a step; None if they were not finite."""

    step: int
    loss: float | None
    grad_norm: float | None


class Provenance:
    """History and last losses of a run, for its checkpoints.

    Args:
        title: Title of the run.
        run_dir: Its folder.
        layout: Its layout.
        ranks: Number of its ranks.
        steps: Number of steps in the deck.
        computed: Kernels of "products" and "functions".
    """

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

    def set_layout(self, ranks: int, layout: Layout) -> None:
        """Replace the ranks and the layout of the run."""
        self._here = replace(self._here, ranks=ranks, layout=layout)

    def continue_from(self, state: Mapping[str, Any], source: str) -> None:
        """Continue the history of a checkpoint's state.

        Args:
            state: Training state.
            source: Path of the checkpoint, or another text that names the source of the state.
        """
        self._earlier = history(state)
        self._losses.clear()
        self._losses.extend(losses(state))
        step = int(state["step"])
        self._here = replace(self._here, first_step=step + 1, went_on_from=_cut(source))

    def record(self, step: int, loss: float, grad_norm: float) -> None:
        """Record the loss and the gradient norm of a step."""
        self._losses.append(RecordedLoss(step, finite(loss), finite(grad_norm)))

    def stored(self, step: int) -> dict[str, Any]:
        """Return the keys "history" and "losses" of the state of a checkpoint after a step."""
        chain = [*self._earlier, replace(self._here, last_step=step)]
        if len(chain) > SEGMENTS:
            chain = [chain[0], *chain[1 - SEGMENTS :]]
        return {
            "history": [asdict(segment) for segment in chain],
            "losses": [asdict(loss) for loss in self._losses],
        }


def history(state: Mapping[str, Any]) -> list[HistorySegment]:
    """Return the runs that led to a checkpoint, oldest first. The last one wrote it."""
    return [segment for row in _rows(state, "history") if (segment := HistorySegment.of(row)) is not None]


def losses(state: Mapping[str, Any]) -> list[RecordedLoss]:
    """Return the losses of the last steps before a checkpoint, oldest first."""
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
