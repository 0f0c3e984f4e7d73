"""Child's side of `host/child_process.py`: a loop that reads requests and writes answers as lines of JSON."""

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

from hpctrain.host.process_lifetime import end_descendants_with_parent, end_with_parent, ignore_rank_signals

Answer = Callable[[Any], Any]
"""Function that takes a request and returns its answer."""

_OOM_SCORE_ADJ = "1000"
"""Highest priority for the kernel's out-of-memory killer, so that it kills this process and not the rank."""

_HIGH_DESCRIPTOR = 512
"""Lowest file descriptor of the socket. Users' code is unlikely to write to such a high one by mistake."""


def serve(
    number: int, parent: int, answer_first: Callable[[Any], tuple[Answer, Any]], runs_user_code: bool
) -> None:
    """Answer requests until the parent closes the socket or ends.

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
