"""The child's side of `comm/child_process.py`: answer requests, which are lines of JSON, by such lines."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.comm.helper import end_group_with, end_with, leave_signals_to_ranks

Answer = Callable[[Any], Any]

_FIRST_TO_GO = "1000"  # where the system's memory runs out, rather than the rank
_HIGH_DESCRIPTOR = 512  # beyond those that programs are likely to write into by mistake


def serve(number: int, parent: int, begin: Callable[[Any], tuple[Answer, Any]], guarded: bool) -> None:
    """Answer requests until nobody asks any more.

    Args:
        number: File descriptor of the socket to the parent.
        parent: Process id of the parent, with which this process ends.
        begin: Function that takes the first request and returns the function for all others, with its answer.
        guarded: Whether code of users runs here, which may start processes: all of them end with this one.
    """
    let_children_hear = leave_signals_to_ranks()
    if not (end_group_with(parent) if guarded else end_with(parent)):
        return
    let_children_hear()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO, encoding="ascii")
    channel = _moved(number)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    with suppress(MemoryError):  # the parent says that there is no answer
        _answer_lines(channel, begin)


def _answer_lines(channel: socket.socket, begin: Callable[[Any], tuple[Answer, Any]]) -> None:
    process, answer = os.getpid(), None
    for line in channel.makefile("rb"):
        try:
            asked = json.loads(line)
        except ValueError:
            return  # code of a user has read a part of it
        if answer is None:
            answer, result = begin(asked["request"])
        else:
            result = answer(asked["request"])
        with suppress(OSError, ValueError):  # code of a user may have closed it
            sys.stderr.flush()
        if os.getpid() != process:
            os._exit(0)  # a fork that came back, too: one of them answers
        try:
            channel.sendall(json.dumps({"serial": asked["serial"], "answer": result}).encode() + b"\n")
        except OSError:
            return  # nobody reads it any more


def _moved(number: int) -> socket.socket:
    """Return the socket under a high descriptor, which child processes do not inherit."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = _HIGH_DESCRIPTOR if most == resource.RLIM_INFINITY else min(_HIGH_DESCRIPTOR, most - 16)
    moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, high)
    os.close(number)
    return socket.socket(fileno=moved)
