"""`status.json`: state and progress of a run, for people and monitoring during training."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from hpctrain.files import parse_json, read_text, strict_json

STATUS_FILE = "status.json"
STATUS_BYTES = 1 << 20

RunState = Literal["starting", "running", "checkpointing", "evaluating", "stopped", "done", "failed"]

ACTIVE = ("starting", "running", "checkpointing", "evaluating")
"""States of a run that has a job."""

SECONDS_PER_RENEWAL = 1.0

MAX_FAULTS_OF_RANK = 2
"""Number of silent faults of one rank from which on its node should not be used."""

# Variables in which schedulers tell a job its number, and the schedulers' names.
_JOBS = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF", "FLUX_JOB_ID": "Flux"}


class Status:
    """Writer of the status file, on rank 0.

    The file is replaced as a whole, so readers never see a part. If it cannot be written, a warning is
    logged.
    """

    def __init__(self, folder: Path | None, facts: Mapping[str, Any]) -> None:
        """Write the first status.

        Args:
            folder: The run folder; None on other ranks, which write nothing.
            facts: Fields that do not change, such as title, steps and ranks.
        """
        self._path = None if folder is None else folder / STATUS_FILE
        self._written = -math.inf
        self._has_warned = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="status")
        self._writing: Future[None] = Future()
        self._writing.set_result(None)
        self._fields: dict[str, Any] = {"state": "starting", **facts}
        self._fields |= {"host": socket.gethostname(), "pid": os.getpid(), "job": job_name(os.environ)}
        self.change("starting", started=now_text())

    def change(self, state: RunState, **fields: Any) -> None:
        """Write a new state and other changed fields, and wait until they are written."""
        self._fields |= {"state": state, **fields}
        self._write()
        self.flush()

    def step(self, **fields: Any) -> None:
        """Record a completed step. Write it if the last write is a second old or the state has changed.

        A thread writes, so that steps do not wait for a slow disk.
        """
        new = self._fields["state"] != "running"
        self._fields |= {"state": "running", "step_time": now_text(), **fields}
        if self._writing.done() and (new or time.monotonic() - self._written >= SECONDS_PER_RENEWAL):
            self._write()

    def note(self, **fields: Any) -> None:
        """Change fields without writing them now."""
        self._fields |= fields

    def flush(self) -> None:
        """Wait until the last write is complete."""
        self._writing.result()

    def close(self) -> None:
        """End the writing thread."""
        self._thread.shutdown()

    def _write(self) -> None:
        if self._path is not None:
            self._written = time.monotonic()
            text = strict_json(self._fields | {"time": now_text()}, indent=1) + "\n"
            self._writing = self._thread.submit(self._store, self._path, text)

    def _store(self, path: Path, text: str) -> None:
        new = path.with_name(STATUS_FILE + ".new")
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(path)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                sentence = "%s: cannot be written and is out of date from now on: %s"
                logging.getLogger("hpctrain").warning(sentence, path, error.strerror or error)


def stored_status(folder: Path) -> dict[str, Any]:
    """Return the content of a run's status file; {} if it cannot be read or is not a JSON object."""
    try:
        status = parse_json(read_text(folder / STATUS_FILE, STATUS_BYTES))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def job_name(environment: Mapping[str, str]) -> str | None:
    """Return the scheduler and the number of the job, such as "Slurm 1234"; None outside of jobs."""
    for variable, scheduler in _JOBS.items():
        if environment.get(variable):
            return f"{scheduler} {environment[variable]}"
    return None


def now_text() -> str:
    """Return the current time in UTC, such as 2026-11-21T10:16:22Z."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
