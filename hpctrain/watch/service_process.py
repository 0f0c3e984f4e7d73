"""The process that `service.py` starts: it takes rows from its stdin, and hands them to a package.

Nothing else of a run is imported here. Where stdin ends without a word, as the run was killed, so does it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

SECONDS_TO_END = 60
"""That a package gets after the last row, should nobody end this process before."""

PROJECT = "hpctrain"
"""Of all runs; Weights & Biases takes another from WANDB_PROJECT."""


class Session(Protocol):
    """A run as a package knows it."""

    def write(self, row: dict[str, Any]) -> None:
        """The figures of a step."""

    def close(self, whole: bool) -> None:
        """The run is over; whether it did what it was to do."""


class WandbSession:
    """A run of Weights & Biases: the same one for each part of a run that was resumed."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        import wandb

        self._package: Any = wandb
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=facts["id"],
            name=facts["name"],
            dir=facts["folder"],
            mode=facts["mode"],
            config=facts["config"],
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True),
        )
        self._run.define_metric("*", step_metric="step")
        self._count = 0

    def write(self, row: dict[str, Any]) -> None:
        """Its own count of rows only ever grows: steps that are made anew are drawn over the earlier ones."""
        self._count = max(self._count + 1, row["step"])
        self._run.log(row, step=self._count)

    def close(self, whole: bool) -> None:
        """End the run, and the package's own process."""
        self._run.finish(exit_code=0 if whole else 1)
        self._package.teardown()


class TrackioSession:
    """A run of Trackio, which it knows by its name."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=PROJECT,
            name=f"{facts['name']}-{facts['id']}",
            config=facts["config"],
            resume="allow",
            embed=False,
        )

    def write(self, row: dict[str, Any]) -> None:
        """Steps that are made anew have two values there."""
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def close(self, whole: bool) -> None:  # noqa: ARG002  (it knows no failed runs)
        """End the run."""
        self._run.finish()


_SESSIONS: Mapping[str, Callable[[Mapping[str, Any]], Session]] = {
    "wandb": WandbSession,
    "trackio": TrackioSession,
}


def serve(package: str) -> None:
    """Take what comes on stdin until it ends; on stdout stands nothing but why that fails."""
    told = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # packages print what they like
    try:
        _serve(package)
    except BaseException as error:  # noqa: BLE001  (SystemExit of a package is one, too)
        os.write(told, f"{type(error).__name__}: {error}".encode(errors="replace")[:1000])
        os._exit(1)


def _serve(package: str) -> None:
    lines = sys.stdin.buffer
    session: Session = _SESSIONS[package](json.loads(lines.readline()))
    whole = False
    for line in lines:
        what = json.loads(line)
        if "row" in what:
            session.write(what["row"])
        whole = what.get("whole", False)
    signal.alarm(SECONDS_TO_END)
    session.close(whole)
