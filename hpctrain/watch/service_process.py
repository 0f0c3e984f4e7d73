"""Process that `service.py` starts. It reads rows from stdin and passes them to a package.

It imports nothing else of hpctrain. If stdin ends without a last message, since the run was killed, the
process ends, too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

SECONDS_TO_END = 60
"""Seconds that a package gets after the last row before this process is killed."""

PROJECT = "hpctrain"
"""Project name of all runs. Weights & Biases uses WANDB_PROJECT instead if it is set."""


class Session(Protocol):
    """Interface of a package's run."""

    def write(self, row: dict[str, Any]) -> None:
        """Send the values of a step."""

    def close(self, completed: bool) -> None:
        """End the run. `completed` is True if it ended as planned, False if it failed."""


class WandbSession:
    """Run of Weights & Biases. A resumed run continues it."""

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
        """Send the values of a step.

        Weights & Biases requires an increasing count. So steps that are computed again have higher counts,
        but their `step` draws them over the earlier ones.
        """
        self._count = max(self._count + 1, row["step"])
        self._run.log(row, step=self._count)

    def close(self, completed: bool) -> None:
        """End the run and the package's own process."""
        self._run.finish(exit_code=0 if completed else 1)
        self._package.teardown()


class TrackioSession:
    """Run of Trackio, which identifies it by its name."""

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
        """Send the values of a step. Steps that are computed again have two values there."""
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def close(self, completed: bool) -> None:  # noqa: ARG002  (it knows no failed runs)
        """End the run."""
        self._run.finish()


_SESSIONS: Mapping[str, Callable[[Mapping[str, Any]], Session]] = {
    "wandb": WandbSession,
    "trackio": TrackioSession,
}


def serve(package: str) -> None:
    """Read messages from stdin until it ends. Only the reason of a failure is written to stdout."""
    output = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # messages of packages must not appear among ours
    try:
        _serve(package)
    except BaseException as error:  # noqa: BLE001  (SystemExit of a package is one, too)
        os.write(output, f"{type(error).__name__}: {error}".encode(errors="replace")[:1000])
        os._exit(1)


def _serve(package: str) -> None:
    lines = sys.stdin.buffer
    session: Session = _SESSIONS[package](json.loads(lines.readline()))
    completed = False
    for line in lines:
        message = json.loads(line)
        if "row" in message:
            session.write(message["row"])
        completed = message.get("completed", False)
    signal.alarm(SECONDS_TO_END)
    session.close(completed)
