"""Child processes that load batches of a user's dataset ahead, for one rank.

They end with the rank, even if it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.data.dataset import DatasetSpec
from hpctrain.data.items import Fields
from hpctrain.data.mapped import from_memory
from hpctrain.errors import EXIT_INTERNAL, UserCodeError
from hpctrain.host.process_lifetime import describe_exit, kill_child, start_child

_START = "from hpctrain.data.item_worker import serve; "


class WorkerLostError(UserCodeError):
    """A process that loads items ended before the run."""

    exit_code = EXIT_INTERNAL


@dataclass(eq=False)
class Ticket:
    """Handle of a batch that a worker loads.

    Attributes:
        worker: Number of the worker.
        answer: Fields of the batch and error messages; None until they are received.
        dropped: True if nobody needs the batch any more.
    """

    worker: int
    answer: tuple[Fields, Sequence[str]] | None = None
    dropped: bool = False


class WorkerPool:
    """Pool of `count` processes, which are started by the first request."""

    def __init__(self, spec: DatasetSpec, count: int) -> None:
        self.spec, self.count = spec, count
        self._workers: list[_Worker] = []
        self._requests = 0

    def ask(self, indices: Sequence[int], epochs: Sequence[int]) -> Ticket:
        """Let the next process load a batch.

        Args:
            indices: Numbers of the items.
            epochs: Epoch of each item.
        """
        while len(self._workers) < self.count:
            self._workers.append(_Worker(self.spec))
        ticket = Ticket(self._requests % self.count)
        self._requests += 1
        worker = self._workers[ticket.worker]
        worker.pending.append(ticket)
        worker.send(json.dumps((list(indices), list(epochs))))
        return ticket

    def take(self, ticket: Ticket) -> Fields:
        """Wait for a batch and return its fields.

        Raises:
            UserCodeError: The user's code failed.
            WorkerLostError: The process has ended.
        """
        worker = self._workers[ticket.worker]
        while ticket.answer is None:
            first, answer = worker.pending.popleft(), worker.receive()
            if answer is None:
                raise WorkerLostError(
                    f"{self.spec.title}: a process that loads items ({ticket.worker + 1} of data.workers = "
                    f"{self.count}) {describe_exit(worker.process)}"
                )
            if not first.dropped:
                first.answer = answer
        fields, problems = ticket.answer
        if problems:
            raise UserCodeError(problems)
        return fields

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()


class _Worker:
    """Connection of the rank to one process; `pending` has the tickets without an answer, in order."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.pending: deque[Ticket] = deque()
        self.answers, child_end = socket.socketpair()
        with child_end:
            number = child_end.fileno()
            code = f"{_START}serve({number}, {os.getpid()})"
            self.process = start_child(code, number, new_session=True)
        self.send(spec.to_json())

    def send(self, line: str) -> None:
        """Send a line of JSON. If the process has ended, `receive` reports it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def receive(self) -> tuple[Fields, Sequence[str]] | None:
        """Return the next answer, a batch or error messages; None if the process has ended."""
        try:
            content, files, _, _ = socket.recv_fds(self.answers, 1, 1)
        except ConnectionError:
            return None
        return from_memory(files[0]) if content else None

    def close(self) -> None:
        """Kill the process and its children. They have nothing to save."""
        kill_child(self.process, runs_user_code=True)
        self.process.wait()
        self.answers.close()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
