"""Child process that passes rows to a package that sends them to a service.

Such packages start processes and threads, and wait at exit until everything is sent. In a process of their
own, they cannot disturb the run. The rank sends one line of JSON for each message (see `service_process`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hpctrain.host.commands import code_command
from hpctrain.report.metric_rows import Row
from hpctrain.text import escaped
from hpctrain.watch.scalars import scalars

_WORD_BYTES = 4000
_SECONDS_TO_DIE = 1.0

# The path on which packages are found is the rank's own, whatever the folder the process starts in.
_PROGRAM = (
    "import json; sys.path[:] = json.loads(sys.argv[2]); "
    "from hpctrain.watch.service_process import serve; serve(sys.argv[1])"
)


class ServiceError(Exception):
    """Error of the service's process, with its last output."""


class Service:
    """Child process of a service. After it has ended for any reason, the next call raises a ServiceError."""

    def __init__(self, package: str, facts: Mapping[str, Any]) -> None:
        """Start the process.

        Args:
            package: Name of the package, "wandb" or "trackio".
            facts: Name, folder, configuration and mode of the run, with which the package starts a session.
        """
        self._process = subprocess.Popen(
            code_command(_PROGRAM, [package, json.dumps([*filter(None, sys.path)])]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for the run, which then ends this one
        )
        self._send(facts)

    def write(self, row: Row, now: float) -> None:  # noqa: ARG002  (the packages look at the clock themselves)
        """Send the values of a row."""
        self._send({"row": scalars(row)})

    def roll_back(self, step: int) -> None:
        """Send that the run continues after an earlier step."""
        self._send({"step": step})

    def close(self, completed: bool) -> None:
        """Send that no other row follows, and wait until the process has ended."""
        self._send({"completed": completed})
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        output = self._last_output()
        if self._process.wait():
            raise ServiceError(output)

    def abandon(self) -> None:
        """Kill the process and those that it has started."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_DIE)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ServiceError(self._last_output()) from None

    def _last_output(self) -> str:
        """Return the last output of the process, which says why it ends. Wait until it has ended."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            output = stream.read(_WORD_BYTES).decode(errors="replace").strip()
        code = self._process.wait()
        return escaped(output) or f"its process ended with {code}"
