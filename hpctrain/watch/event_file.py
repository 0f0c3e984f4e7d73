"""Event files for TensorBoard, one for each start of a run, written by its own package without TensorFlow."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.report.metric_rows import Row
from hpctrain.watch.scalars import numbers

EVENT_FOLDER = "tensorboard"
EVENT_FILE = r"events\.out\.tfevents\.(\d+)\.[^/]*"


class EventFile:
    """Event file of a run from its start or resumption on.

    Args:
        folder: The run folder.
        step: Step after which the run continues. TensorBoard hides later steps of earlier files.
    """

    def __init__(self, folder: Path, step: int) -> None:
        # The package's EventFileWriter would import TensorFlow where there is one, and write by a thread.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        events = folder / EVENT_FOLDER
        events.mkdir(exist_ok=True)
        self._file: BinaryIO = _next_file(events).open("xb")
        self._records: Any = RecordWriter(self._file)
        self._add(time.time(), file_version="brain.Event:2")
        self.roll_back(step)

    def write(self, row: Row, now: float) -> None:
        """Write a value for each number of a row, by its name."""
        step = row["step"]
        values = [
            self._summary.Summary.Value(tag=name, simple_value=value)
            for name, value in numbers(row).items()
            if name != "step"
        ]
        self._add(now, step=step, summary=self._summary.Summary(value=values))

    def roll_back(self, step: int) -> None:
        """Write that the run continues after `step`, so that TensorBoard hides later steps."""
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(time.time(), step=step + 1, session_log=start)

    def close(self, completed: bool) -> None:  # noqa: ARG002  (there is no event for it)
        """Close the file."""
        self._file.close()

    def abandon(self) -> None:
        """Do nothing: a file does not keep a process from ending."""

    def _add(self, now: float, **fields: Any) -> None:
        self._records.write(self._event.Event(wall_time=now, **fields).SerializeToString())
        self._records.flush()


def _next_file(folder: Path) -> Path:
    """Return the path of a file that TensorBoard reads after the existing ones: the time in names decides."""
    known = [re.fullmatch(EVENT_FILE, each.name) for each in folder.iterdir()]
    seconds = max([int(time.time()), *(int(match[1]) + 1 for match in known if match)])
    return folder / f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.0"
