"""A process that hands rows to a package which talks to a service, apart from the rank whose rows they are.

Such packages start processes and threads of their own, and wait at exit for what has not been sent: whatever
they do, or fail to do, is none of the run's. What is told to the process is a line of JSON each.
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
from hpctrain.report.rows import Row
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
    """What the process said last."""


class Service:
    """The process, from its start on. Its end, for whatever reason, is a ServiceError of the next call."""

    def __init__(self, package: str, facts: Mapping[str, Any]) -> None:
        """`facts` are what `service_process` has the package begin with."""
        self._process = subprocess.Popen(
            code_command(_PROGRAM, [package, json.dumps([*filter(None, sys.path)])]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for the run, which then ends this one
        )
        self._tell(facts)

    def write(self, row: Row, now: float) -> None:  # noqa: ARG002  (the packages look at the clock themselves)
        """Hand over the figures of a row."""
        self._tell({"row": scalars(row)})

    def go_back(self, step: int) -> None:
        """Say that the run goes on from an earlier step."""
        self._tell({"step": step})

    def close(self, whole: bool) -> None:
        """Say that all is told, and wait until the process has ended."""
        self._tell({"whole": whole})
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        said = self._said()
        if self._process.wait():
            raise ServiceError(said)

    def abandon(self) -> None:
        """End the process, and those that it has started, at once."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_DIE)

    def _tell(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ServiceError(self._said()) from None

    def _said(self) -> str:
        """Why the process ends, as it says; this waits until it does."""
        assert self._process.stdout is not None
        with self._process.stdout as words:
            said = words.read(_WORD_BYTES).decode(errors="replace").strip()
        code = self._process.wait()
        return escaped(said) or f"its process ended with {code}"
