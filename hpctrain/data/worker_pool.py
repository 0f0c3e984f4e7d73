"""Processes that load batches of a user's dataset ahead, for one rank.

They end with the rank, however that ends.
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
    """A process that loads items has ended before the run."""

    exit_code = EXIT_INTERNAL


@dataclass(eq=False)
class Ticket:
    """An answer that is to come, from a worker."""

    worker: int
    answer: tuple[Fields, Sequence[str]] | None = None
    dropped: bool = False


class WorkerPool:
    """`count` processes, which are started as soon as something is asked of them."""

    def __init__(self, name: DatasetSpec, count: int) -> None:
        self.name, self.count = name, count
        self._workers: list[_Worker] = []
        self._asked = 0

    def ask(self, indices: Sequence[int], epochs: Sequence[int]) -> Ticket:
        """Have a batch loaded, by the next of the processes."""
        while len(self._workers) < self.count:
            self._workers.append(_Worker(self.name))
        ticket = Ticket(self._asked % self.count)
        self._asked += 1
        worker = self._workers[ticket.worker]
        worker.coming.append(ticket)
        worker.send(json.dumps((list(indices), list(epochs))))
        return ticket

    def take(self, ticket: Ticket) -> Fields:
        """Wait for a batch. UserCodeError where loading it failed, WorkerLostError where the process is
        gone."""
        worker = self._workers[ticket.worker]
        while ticket.answer is None:
            first, answer = worker.coming.popleft(), worker.receive()
            if answer is None:
                raise WorkerLostError(
                    f"{self.name.title}: a process that loads items ({ticket.worker + 1} of data.workers = "
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
    """One of them, as the rank sees it; `coming` are the answers it has to give, in order."""

    def __init__(self, name: DatasetSpec) -> None:
        self.coming: deque[Ticket] = deque()
        self.answers, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            code = f"{_START}serve({number}, {os.getpid()})"
            self.process = start_child(code, number, new_session=True)
        self.send(name.to_json())

    def send(self, line: str) -> None:
        """Have it read a line of JSON, if it still does: where it is gone, its answer tells."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def receive(self) -> tuple[Fields, Sequence[str]] | None:
        """Its next answer: a batch, or what is wrong; None where it is gone."""
        try:
            content, files, _, _ = socket.recv_fds(self.answers, 1, 1)
        except ConnectionError:
            return None
        return from_memory(files[0]) if content else None

    def close(self) -> None:
        """End it at once, with all that it has started: it keeps nothing."""
        kill_child(self.process, runs_user_code=True)
        self.process.wait()
        self.answers.close()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
