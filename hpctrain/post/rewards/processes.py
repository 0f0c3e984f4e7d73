"""Processes that judge samples for one rank, batch by batch, each within a time limit.

They are started as soon as something is asked of them; one that does not answer in time is killed, with all
that it has started itself.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpctrain.comm.helper import how_ended, start_helper
from hpctrain.errors import UsersError
from hpctrain.units import format_seconds

SECONDS_TO_LOAD = 300.0
"""That a user's file may take to be loaded, with what it imports."""

_LOOK_AGAIN = 0.2  # seconds: whether a process is over though its socket, which others may have, is not
_SECONDS_TO_END = 2.0
_CHUNK = 1 << 20
_START = "from hpctrain.post.rewards.worker import serve; "


@dataclass
class FailedError(Exception):
    """A batch has no scores: its number, why (words that go on from the reward's title), and of which of its
    samples, where that is known.
    """

    batch: int
    problem: str
    index: int | None = None


class Processes:
    """At most `count` processes, each of which judges by `work` (what `worker.serve` is told first), and each
    batch of samples within `seconds`.
    """

    def __init__(self, title: str, work: Mapping[str, Any], count: int, seconds: float) -> None:
        self.title, self.work, self.count, self.seconds = title, work, count, seconds
        self._processes: list[_Process] = []

    def start(self, count: int = 1) -> None:
        """Have so many of them ready. UsersError where they cannot judge."""
        for process in [each for each in self._processes if each.is_over()]:
            process.close()
            self._processes.remove(process)
        fresh = [_Process() for _ in range(len(self._processes), count)]
        self._processes += fresh
        try:
            for process in fresh:
                process.ask(0, self.work, SECONDS_TO_LOAD)
            for _ in fresh:
                _, answer = _next_answer(fresh)
                if "problem" in answer:
                    raise UsersError(answer["problem"])
        except FailedError as failed:
            self.close()
            raise UsersError(f"{self.title} {failed.problem}, while it is loaded") from None
        except BaseException:
            self.close()
            raise

    def judged(self, batches: Sequence[Mapping[str, list[Any]]]) -> list[list[float]]:
        """The scores of each batch. FailedError of the first one that has none, UsersError from `start`; then
        all processes are ended.
        """
        found: list[list[float]] = [[] for _ in batches]
        waiting = deque(range(len(batches)))
        self.start(min(self.count, len(batches)))
        try:
            while waiting or any(process.asked for process in self._processes):
                for process in self._processes:
                    if waiting and process.asked is None:
                        number = waiting.popleft()
                        process.ask(number, batches[number], self.seconds)
                number, answer = _next_answer(self._processes)
                if "problem" in answer:
                    raise FailedError(number, answer["problem"], answer["index"])
                found[number] = answer["scores"]
        except BaseException:
            self.close()  # what the others still answer is not to be taken for something else
            raise
        return found

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
        self._processes.clear()


@dataclass
class _Asked:
    """What a process has to answer: the number of a batch, and how many of the seconds are left for it."""

    number: int
    seconds: float
    left: float


class _Process:
    """One of them, as the rank sees it."""

    def __init__(self) -> None:
        self.asked: _Asked | None = None
        self.channel, theirs = socket.socketpair()
        self._received = bytearray()
        with theirs:
            code = f"{_START}serve({theirs.fileno()}, {os.getpid()})"
            self.process = start_helper(code, theirs.fileno(), subprocess.DEVNULL, own_session=True)

    def ask(self, number: int, message: Mapping[str, Any], seconds: float) -> None:
        """Have it read something, if it still does: where it is gone, its answer tells."""
        self.asked = _Asked(number, seconds, seconds)
        self.channel.settimeout(seconds)
        with suppress(OSError):
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def take(self) -> dict[str, Any] | None:
        """Its answer, where all of it has come. EOFError where none will come any more."""
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
            answer: dict[str, Any] = json.loads(self._received)
            self.asked = None
            self._received.clear()
            return answer
        return None

    def is_over(self) -> bool:
        """Whether it has ended; it is not waited for, so that its number, and its group's, stay its own."""
        if self.process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # where SIGCHLD is ignored, nobody can wait for it
            return True

    def close(self) -> None:
        """End it at once, with what it has started: it keeps nothing."""
        self._end()
        self.process.wait()
        self.channel.close()

    def how_ended(self) -> str:
        """How it ended, in words, while it does; what it has started is ended."""
        until = time.monotonic() + _SECONDS_TO_END
        while not self.is_over() and time.monotonic() < until:
            time.sleep(0.01)
        if self.is_over():
            self._end()
        return how_ended(self.process)

    def _end(self) -> None:
        """All of its group, whose number is its own as long as nobody has waited for it."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


def _next_answer(processes: Sequence[_Process]) -> tuple[int, dict[str, Any]]:
    """The next answer of any of them, with the number of what was asked. FailedError where one ends, or has
    no time left.
    """
    busy = [(process, process.asked) for process in processes if process.asked]
    with selectors.DefaultSelector() as selector:
        for process, _ in busy:
            selector.register(process.channel, selectors.EVENT_READ, process)
        while True:
            began = time.monotonic()
            least = min(asked.left for _, asked in busy)
            ready = [key.data for key, _ in selector.select(min(max(least, 0.0), _LOOK_AGAIN))]
            # Where this process was stopped meanwhile, those are likely to have been, too.
            waited = min(time.monotonic() - began, 2 * _LOOK_AGAIN)
            for process, asked in busy:
                asked.left -= waited
                over = process not in ready and process.is_over()
                try:
                    answer = process.take() if over or process in ready else None
                except EOFError:
                    answer, over = None, True
                if answer is not None:
                    return asked.number, answer
                if over:
                    raise FailedError(asked.number, f"loses its process, which {process.how_ended()}")
                if asked.left <= 0:
                    raise FailedError(asked.number, f"takes longer than {format_seconds(asked.seconds)}")
