"""Child processes that a rank asks in lines of JSON, and that answer in such lines within a time limit.

The other side is `comm/child_service.py`. A child process that does not answer in time is killed, with all
processes that it has started; so it is when the rank ends. What it writes other than its answers is noticed.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpctrain.comm.helper import end_helper, has_ended, how_ended, start_helper, wait_for_end
from hpctrain.units import format_bytes, format_seconds

MOST_ANSWER_BYTES = 1 << 28

_LOOK_AGAIN = 0.2  # seconds: whether a process is over though its socket, which others may have, is not
_SECONDS_TO_END = 2.0
_CHUNK = 1 << 20


class NoAnswerError(Exception):
    """A child process gave no answer.

    Attributes:
        problem: Words that go on from the name of the child process.
        number: Number of the request that has no answer.
        signal: Signal that ended the process, or 0.
    """

    def __init__(self, problem: str, number: int, by: int = 0) -> None:
        super().__init__(problem)
        self.problem, self.number, self.signal = problem, number, by


@dataclass
class Request:
    """A request that has no answer yet: its number, its time limit, and the seconds that are left."""

    number: int
    serial: int
    seconds: float
    left: float


class ChildProcess:
    """A Python process beside this one.

    Args:
        module: Module with a function `serve(socket_number, parent)`, which calls `child_service.serve`.
        guarded: As given to `child_service.serve`.
    """

    def __init__(self, module: str, guarded: bool) -> None:
        self._guarded = guarded
        self.request: Request | None = None
        self._serial = 0
        self._received = bytearray()
        self.channel, far_end = socket.socketpair()
        with far_end:
            code = f"from {module} import serve; serve({far_end.fileno()}, {os.getpid()})"
            self.process = start_helper(code, far_end.fileno(), subprocess.DEVNULL, own_session=True)

    def ask(self, message: object, seconds: float, number: int = 0) -> None:
        """Send a request.

        A process that is gone does not raise here; `next_answer` does.

        Args:
            message: Anything that JSON can express.
            seconds: Time limit of the answer.
            number: Number by which the caller knows the request.
        """
        assert self.request is None, "one request at a time"
        self._serial += 1
        self.request = Request(number, self._serial, seconds, seconds)
        line = json.dumps({"serial": self._serial, "request": message}).encode() + b"\n"
        self.channel.settimeout(seconds)
        with suppress(OSError):
            self.channel.sendall(line)

    def take(self) -> Any:
        """Return the answer where all of it has come, else None.

        Raises:
            EOFError: If no answer will come any more.
            ValueError: If something other than an answer came.
        """
        self.channel.setblocking(False)
        with suppress(BlockingIOError):
            while not self._received.endswith(b"\n"):
                try:
                    chunk = self.channel.recv(_CHUNK)
                except ConnectionError:
                    chunk = b""
                if not chunk:
                    raise EOFError
                self._received += chunk
                if len(self._received) > MOST_ANSWER_BYTES:
                    raise ValueError(f"answers with more than {format_bytes(MOST_ANSWER_BYTES)}")
            return self._answer()
        return None

    def _answer(self) -> Any:
        line = bytes(self._received)
        self._received.clear()
        try:
            answer = json.loads(line)
            fits = self.request is not None and answer["serial"] == self.request.serial
        except (ValueError, TypeError, KeyError):
            fits = False
        if not fits:
            start = line.splitlines(keepends=True)[0][:40].decode(errors="replace")
            raise ValueError(
                f"writes {json.dumps(start)} into the file descriptor by which its process answers; only "
                "descriptors that it has opened itself, stdout and stderr are its own"
            )
        self.request = None
        return answer["answer"]

    def is_over(self) -> bool:
        """Return True if the process has ended."""
        return has_ended(self.process)

    def close(self) -> None:
        """End the process at once, with all that it has started: it keeps nothing."""
        end_helper(self.process, self._guarded)
        self.process.wait()
        self.channel.close()

    def end(self) -> tuple[str, int]:
        """Return how the process ends, in words and as a signal or 0; what it has started is ended."""
        wait_for_end(self.process, _SECONDS_TO_END)
        if self.is_over():
            end_helper(self.process, self._guarded)
        words = how_ended(self.process)
        return words, max(0, -(self.process.returncode or 0))


def next_answer(children: Sequence[ChildProcess]) -> tuple[int, Any]:
    """Wait for the next answer of any child process that was asked something.

    Returns:
        The number of the request, and its answer.

    Raises:
        NoAnswerError: If a process ends, has no time left, or writes something other than an answer.
    """
    busy = [(child, child.request) for child in children if child.request]
    with selectors.DefaultSelector() as selector:
        for child, _ in busy:
            selector.register(child.channel, selectors.EVENT_READ, child)
        while True:
            start = time.monotonic()
            least = min(request.left for _, request in busy)
            ready = [key.data for key, _ in selector.select(min(max(least, 0.0), _LOOK_AGAIN))]
            # Where this process was stopped meanwhile, the children are likely to have been, too.
            waited = min(time.monotonic() - start, 2 * _LOOK_AGAIN)
            for child, request in busy:
                request.left -= waited
                over = child not in ready and child.is_over()
                try:
                    answer = child.take() if over or child in ready else None
                except EOFError:
                    answer, over = None, True
                except ValueError as error:
                    raise NoAnswerError(str(error), request.number) from None
                if answer is not None:
                    return request.number, answer
                if over:
                    words, by = child.end()
                    raise NoAnswerError(f"loses its process, which {words}", request.number, by)
                if request.left <= 0:
                    limit = format_seconds(request.seconds)
                    raise NoAnswerError(f"takes longer than {limit}", request.number)
