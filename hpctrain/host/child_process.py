"""Child processes that answer requests of a rank within a time limit.

Requests and answers are lines of JSON on a socket. `ChildProcess` is the rank's side, and `answer_requests`
the child's. A child that does not answer in time is killed together with all processes that it has started;
the same happens when the rank ends. If anything other than an answer arrives on the socket, `next_answer`
raises an error.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.files import parse_json
from hpctrain.host.process_lifetime import (
    describe_exit,
    end_descendants_with_parent,
    end_with_parent,
    has_ended,
    ignore_rank_signals,
    kill_child,
    start_child,
    wait_for_end,
)
from hpctrain.units import format_bytes, format_seconds

MAX_ANSWER_BYTES = 1 << 28
"""Largest size of an answer, in bytes."""

_POLL_SECONDS = 0.2
"""Seconds between checks whether a child has ended. Its descendants may keep its socket open after that."""

_SECONDS_TO_END = 2.0
_CHUNK_BYTES = 1 << 20


class NoAnswerError(Exception):
    """A child process gave no answer to a request.

    Attributes:
        problem: End of a sentence whose subject the caller puts in front: the name of what the child
            computes, such as a reward. An example is "takes longer than 30 s".
        number: Number that the caller passed to `ChildProcess.ask` with the request.
        signal: Number of the signal that ended the process, or 0.
    """

    def __init__(self, problem: str, number: int, signal: int = 0) -> None:
        super().__init__(problem)
        self.problem, self.number, self.signal = problem, number, signal


class ChildAnswer(NamedTuple):
    """Answer of a child process to a request.

    Attributes:
        number: Number that the caller passed to `ChildProcess.ask` with the request.
        value: The answer, as JSON expresses it; it may be None (null in JSON).
    """

    number: int
    value: Any


@dataclass
class Request:
    """A request that has no answer yet.

    Attributes:
        number: Number by which the caller knows the request.
        serial: Number of the request among all requests to this child; the answer must repeat it.
        seconds: Time limit of the answer.
        seconds_left: Seconds until the time limit.
    """

    number: int
    serial: int
    seconds: float
    seconds_left: float


class ChildProcess:
    """A Python process that is started by this one and ends with it.

    Args:
        module: Name of a module with a function `serve(socket_number, parent)` that calls `answer_requests`.
        runs_user_code: True if the child runs code of users; the same value as `answer_requests` gets.
    """

    def __init__(self, module: str, runs_user_code: bool) -> None:
        self._runs_user_code = runs_user_code
        self.request: Request | None = None
        self._serial = 0
        self._received = bytearray()
        self.channel, child_end = socket.socketpair()
        with child_end:
            code = f"from {module} import serve; serve({child_end.fileno()}, {os.getpid()})"
            self.process = start_child(code, child_end.fileno(), subprocess.DEVNULL, new_session=True)

    def ask(self, message: object, seconds: float, number: int = 0) -> None:
        """Send a request; `next_answer` returns its answer. The previous request must have been answered.

        It waits up to `seconds` if the process does not read a large request. If the process has not read it
        then, or has ended, this does not raise an error; `next_answer` does.

        Args:
            message: Anything that JSON can express; other values are a TypeError or ValueError.
            seconds: Time limit of the answer.
            number: Number by which the caller knows the request, which the answer repeats.
        """
        assert self.request is None, "one request at a time"
        self._serial += 1
        self.request = Request(number, self._serial, seconds, seconds)
        line = json.dumps({"serial": self._serial, "request": message}).encode() + b"\n"
        self.channel.settimeout(seconds)
        with suppress(OSError):
            self.channel.sendall(line)

    def receive_answer(self) -> ChildAnswer | None:
        """Return the answer to the open request; None if it has not arrived completely. Does not wait.

        After an answer, the next request may be sent. The time limit is checked by `next_answer`, not here.

        Raises:
            EOFError: The process has closed the socket.
            ValueError: Something other than an answer arrived, or anything if there is no open request.
        """
        self.channel.setblocking(False)
        with suppress(BlockingIOError):
            while not self._received.endswith(b"\n"):
                try:
                    chunk = self.channel.recv(_CHUNK_BYTES)
                except ConnectionError:
                    chunk = b""
                if not chunk:
                    raise EOFError
                self._received += chunk
                if len(self._received) > MAX_ANSWER_BYTES:
                    raise ValueError(f"answers with more than {format_bytes(MAX_ANSWER_BYTES)}")
            return self._parse_answer()
        return None

    def _parse_answer(self) -> ChildAnswer:
        line, request = bytes(self._received), self.request
        self._received.clear()
        try:
            answer = parse_json(line)
            is_answer = request is not None and answer["serial"] == request.serial and "answer" in answer
        except (ValueError, TypeError, KeyError):
            is_answer = False
        if request is None or not is_answer:
            start = line.splitlines(keepends=True)[0][:40].decode(errors="replace")
            raise ValueError(
                f"writes {json.dumps(start)} to a file descriptor that it has not opened, through which "
                "hpctrain receives answers; it may write only to stdout, stderr and files that it has opened "
                "itself"
            )
        self.request = None
        return ChildAnswer(request.number, answer["answer"])

    def has_ended(self) -> bool:
        """Return True if the process has ended. It does not wait, and does not reap the process."""
        return has_ended(self.process)

    def close(self) -> None:
        """Kill the process and all processes that it has started, wait for its end, and close the socket.

        Local. If it runs code of users, it has up to 5 s to end its own processes. Afterwards the object
        cannot be used.
        """
        kill_child(self.process, self._runs_user_code)
        self.process.wait()
        self.channel.close()

    def wait_for_exit(self) -> tuple[str, int]:
        """Wait for the process to end, and then kill the processes that it has started. Local.

        If it has not ended after 2 s, nothing is killed, and this waits up to 5 s more. `close` kills all.

        Returns:
            A phrase that follows "its process", such as "was ended by signal 11" ("does not answer" if it has
            not ended), and the number of the signal that ended it, otherwise 0.
        """
        wait_for_end(self.process, _SECONDS_TO_END)
        if self.has_ended():
            kill_child(self.process, self._runs_user_code)
        phrase = describe_exit(self.process)
        return phrase, max(0, -(self.process.returncode or 0))


def next_answer(children: Sequence[ChildProcess]) -> ChildAnswer:
    """Wait for the next answer of any child process that has an open request, and return it. Local.

    At least one of them must have an open request. The answer or error has the `number` of the request, by
    which the caller knows the child. If several answers are there, that of the first one of `children` is
    returned. Time limits are those of the requests. After an error, the caller closes the child process,
    which this does not do.

    Raises:
        NoAnswerError: A process ended, exceeded its time limit, or sent something other than an answer.
    """
    busy = [(child, child.request) for child in children if child.request]
    with selectors.DefaultSelector() as selector:
        for child, _ in busy:
            selector.register(child.channel, selectors.EVENT_READ, child)
        while True:
            start = time.monotonic()
            least = min(request.seconds_left for _, request in busy)
            ready = [key.data for key, _ in selector.select(min(max(least, 0.0), _POLL_SECONDS))]
            # A longer wait means that this process was stopped. The children were then probably stopped,
            # too, so that time does not count.
            waited = min(time.monotonic() - start, 2 * _POLL_SECONDS)
            for child, request in busy:
                request.seconds_left -= waited
                ended = child not in ready and child.has_ended()
                try:
                    answer = child.receive_answer() if ended or child in ready else None
                except EOFError:
                    answer, ended = None, True
                except ValueError as error:
                    raise NoAnswerError(str(error), request.number) from None
                if answer is not None:
                    return answer
                if ended:
                    phrase, signal = child.wait_for_exit()
                    raise NoAnswerError(f"fails, since its process {phrase}", request.number, signal)
                if request.seconds_left <= 0:
                    limit = format_seconds(request.seconds)
                    raise NoAnswerError(f"takes longer than {limit}", request.number)


Answer = Callable[[Any], Any]
"""Function that takes a request and returns its answer."""

_OOM_SCORE_ADJ = "1000"
"""Highest priority for the kernel's out-of-memory killer, so that it kills this process and not the rank."""

_HIGH_DESCRIPTOR = 512
"""Lowest file descriptor of the socket. Users' code is unlikely to write to such a high one by mistake."""


def answer_requests(
    number: int, parent: int, answer_first: Callable[[Any], tuple[Answer, Any]], runs_user_code: bool
) -> None:
    """Answer requests until the parent closes the socket, and then return.

    It runs in the child and takes over the process. stdout becomes stderr, signals of ranks are ignored, and
    the kernel kills this process first if memory runs out. The answers must be values that JSON can express.
    An exception of a function that answers passes through and ends the process with its traceback, so that
    `next_answer` of the parent raises NoAnswerError. After a MemoryError, this returns.

    Args:
        number: File descriptor of the socket to the parent, which `ChildProcess` passes on the command line.
        parent: Process id of the parent. This process ends when the parent ends.
        answer_first: Function that takes the first request. It returns the function that answers all further
            requests, and the answer to the first one.
        runs_user_code: True if code of users runs in this process. Such code may start processes; all of them
            are killed when this process ends.
    """
    unblock_signals_of_children = ignore_rank_signals()  # called after the guard process has been forked
    if not (end_descendants_with_parent(parent) if runs_user_code else end_with_parent(parent)):
        return
    unblock_signals_of_children()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ, encoding="ascii")
    channel = _move_to_high_descriptor(number)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    with suppress(MemoryError):  # the parent reports the missing answer
        _answer_lines(channel, answer_first)


def _answer_lines(channel: socket.socket, answer_first: Callable[[Any], tuple[Answer, Any]]) -> None:
    process, answer = os.getpid(), None
    for line in channel.makefile("rb"):
        try:
            message = json.loads(line)
        except ValueError:
            return  # the user's code has read a part of this line from the socket
        if answer is None:
            answer, result = answer_first(message["request"])
        else:
            result = answer(message["request"])
        with suppress(OSError, ValueError):  # the user's code may have closed stderr
            sys.stderr.flush()
        if os.getpid() != process:
            os._exit(0)  # the user's code has forked and returned in the new process, too
        try:
            channel.sendall(json.dumps({"serial": message["serial"], "answer": result}).encode() + b"\n")
        except OSError:
            return  # the parent has closed the socket


def _move_to_high_descriptor(number: int) -> socket.socket:
    """Move the socket to a high file descriptor that child processes do not inherit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = _HIGH_DESCRIPTOR if limit == resource.RLIM_INFINITY else min(_HIGH_DESCRIPTOR, limit - 16)
    descriptor = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(number)
    return socket.socket(fileno=descriptor)
