"""Event files for TensorBoard, one for each start of a run; by its own package, without TensorFlow."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.report.rows import Row
from hpctrain.watch.scalars import numbers

EVENT_FOLDER = "tensorboard"
EVENT_FILE = r"events\.out\.tfevents\.(\d+)\.[^/]*"


class EventFile:
    """A file of a run that goes on after `step`: readers leave out what earlier files have of later steps."""

    def __init__(self, folder: Path, step: int) -> None:
        # The package's EventFileWriter would import TensorFlow where there is one, and write by a thread.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        below = folder / EVENT_FOLDER
        below.mkdir(exist_ok=True)
        self._file: BinaryIO = _next_file(below).open("xb")
        self._records: Any = RecordWriter(self._file)
        self._add(time.time(), file_version="brain.Event:2")
        self.go_back(step)

    def write(self, row: Row, now: float) -> None:
        """A value for each number of a row, by its name."""
        step = row["step"]
        values = [
            self._summary.Summary.Value(tag=name, simple_value=value)
            for name, value in numbers(row).items()
            if name != "step"
        ]
        self._add(now, step=step, summary=self._summary.Summary(value=values))

    def go_back(self, step: int) -> None:
        """Say that the run begins anew behind `step`, by which readers forget what came later."""
        begun = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(time.time(), step=step + 1, session_log=begun)

    def close(self, whole: bool) -> None:  # noqa: ARG002  (there is no event for it)
        """Close the file."""
        self._file.close()

    def abandon(self) -> None:
        """Nothing here keeps a process from ending."""

    def _add(self, now: float, **fields: Any) -> None:
        self._records.write(self._event.Event(wall_time=now, **fields).SerializeToString())
        self._records.flush()


def _next_file(folder: Path) -> Path:
    """The name of a file that readers take after those there are: they go by the seconds in it."""
    known = [re.fullmatch(EVENT_FILE, each.name) for each in folder.iterdir()]
    seconds = max([int(time.time()), *(int(found[1]) + 1 for found in known if found)])
    return folder / f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.0"
