"""Watch over the start of MPI and of the World, when there is no watchdog yet.

Before MPI runs, ranks cannot exchange messages. Their only information about each other comes from the
launcher's environment variables and from the kernel. So this module finds the ranks of this node among the
child processes of the launcher.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.comm.error_messages import name_ranks, print_error
from hpctrain.errors import EXIT_INTERNAL
from hpctrain.host.launcher import launched_rank, launched_size, launcher_variables
from hpctrain.host.process_lifetime import descendants, stat_fields

PROC_FOLDER = Path("/proc")
"""Folder in which the kernel describes processes."""

LONG_START_SECONDS = 600.0
"""Seconds after which a start counts as hanging although no rank of this node is stopped."""

_SECONDS_FOR_LOWEST = 10.0
"""Time within which the lowest rank of the node must have ended the job, in seconds."""


@contextmanager
def watch_start(seconds: float) -> Iterator[None]:
    """Return a context manager that ends the job if its block, which starts MPI, takes too long.

    A thread watches the block. On a hang it prints the reason and ends this process with exit code 70, after
    which the launcher ends the others. A start may be slow, for example because modules are imported from a
    busy file system. So the job ends after `seconds` only if a process of this node is stopped, and otherwise
    after LONG_START_SECONDS, or after `seconds` if that is longer.

    Args:
        seconds: Time limit; 0 turns this off. A job of one rank is not watched.
    """
    if seconds <= 0 or launched_size(os.environ) == 1:
        yield
        return
    over = threading.Event()
    threading.Thread(target=_watch, args=(seconds, over), name="watchdog of the start", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(seconds: float, over: threading.Event) -> None:
    pause = min(10.0, max(0.05, seconds / 20))
    passed, last_check, stopped_before = 0.0, time.monotonic(), frozenset[int]()
    while not over.wait(pause):
        now = time.monotonic()
        passed += min(now - last_check, 2 * pause)  # without the time while this process was stopped itself
        last_check = now
        if passed < seconds:
            continue
        states = rank_states(os.getppid())
        stopped_now = frozenset(rank for rank, state in states.items() if state in {"T", "t"})
        stopped, stopped_before = stopped_now & stopped_before, stopped_now
        if not stopped and passed < max(seconds, LONG_START_SECONDS):
            continue
        rank = launched_rank(os.environ)
        if rank > min(states.keys() - stopped, default=rank) and passed < seconds + _SECONDS_FOR_LOWEST:
            continue
        for sentence in describe_start(stopped, passed, rank):
            print_error(f"error: {sentence}")
        os._exit(EXIT_INTERNAL)


def describe_start(stopped: frozenset[int], seconds: float, rank: int) -> list[str]:
    """Return two sentences about a start that hangs, without a full stop. Nothing is printed. Local.

    The first one says that not all ranks have joined the others, and for how long. The second one names the
    stopped ranks of this node; if there are none, it says that this rank waits for the others.

    Args:
        stopped: Ranks of this node whose processes are stopped; may be empty.
        seconds: Time since the start began.
        rank: Rank of this process, which is named only if no rank is stopped.
    """
    host = socket.gethostname()
    first = f"the run hangs while starting: not all ranks have joined the others after {seconds:.0f} s"
    if not stopped:
        return [first, f"rank {rank} on {host} waits for the others; no rank of this node is stopped"]
    one = len(stopped) == 1
    return [
        first,
        f"{name_ranks(sorted(stopped))} on {host} {'does' if one else 'do'} not answer: "
        f"{'its process is' if one else 'their processes are'} stopped, as by SIGSTOP or a debugger",
    ]


def rank_states(launcher: int) -> dict[int, str]:
    """Return the state of the processes of ranks on this node, by the number of the rank in the job. Local.

    A state is a letter of /proc/<pid>/stat, such as "T" for a stopped process. Without /proc the result is
    empty.

    Args:
        launcher: Id of the process whose descendants are searched, such as the parent of a rank.
    """
    states: dict[int, str] = {}
    for process in descendants(launcher):
        with suppress(OSError, ValueError):
            folder = PROC_FOLDER / str(process)
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
            if launcher_variables(environment):
                for state in stat_fields(folder / "stat")[:1]:
                    states.setdefault(launched_rank(environment), state)
    return states
