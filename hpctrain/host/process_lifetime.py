"""Processes that a rank starts beside itself, and which end with it. They are no ranks.

They are started anew, not forked, as MPI is up by then, and know nothing of its launcher.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from hpctrain.host.launcher import environment_without_rank
from hpctrain.host.python_command import code_command

_START = "import json; sys.path[:] = json.loads(sys.argv[1]); "
_SIGNAL_OF_PARENT, _SUBREAPER = 1, 36  # of prctl
_SECONDS_TO_END = 5.0


def start_child(
    code: str, kept: int, stdin: int = subprocess.PIPE, own_session: bool = False
) -> subprocess.Popen[bytes]:
    """Run Python code which imports what this process could, computes by one thread and has the file `kept`;
    with a session of its own, signals for the rank's do not reach it.
    """
    return subprocess.Popen(
        code_command(_START + code, [json.dumps([os.path.abspath(path) for path in sys.path])]),  # noqa: PTH100
        stdin=stdin,
        pass_fds=(kept,),
        # Sets have the same order in each of them, and in a run that goes on.
        env={"PYTHONHASHSEED": "0", **environment_without_rank(os.environ), "OMP_NUM_THREADS": "1"},
        start_new_session=own_session,
    )


def end_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> bool:
    """Have the system send this process a signal when the one that started it ends; whether that is still
    there.
    """
    ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENT, by, 0, 0, 0)
    return os.getppid() == parent


def end_descendants_with_parent(parent: int) -> bool:
    """Go on in a process of its own, which ends together with all its descendants.

    The process that calls this stays behind as a guard. When `parent` ends, when the guard gets SIGTERM, or
    when the new process ends in any way, the guard kills all descendants: also those with a session of their
    own, since the system makes them children of the guard (it is a subreaper) when their parents end. Then
    the guard ends in the way in which the new process did.

    Returns:
        In the new process: whether `parent` is still there.
    """
    if os.getpgid(0) != os.getpid():
        raise RuntimeError("this process does not lead a process group, so it must not end one")
    heard = {signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    first = os.getpid()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    if not (own := os.fork()):
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return end_with_parent(first)
    there = end_with_parent(parent, signal.SIGHUP)
    status: int | None = None
    while there and status is None:
        there = signal.sigwait(heard) != signal.SIGTERM and os.getppid() == parent
        status = _reap(own)
    _end_descendants()
    if status is None:  # killed just now
        os._exit(128 + signal.SIGKILL)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it has left one already
        by = os.WTERMSIG(status)
        if by not in {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(by, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {by})
        os.kill(first, by)
    os._exit(os.waitstatus_to_exitcode(status))


def _reap(awaited: int) -> int | None:
    """Reap all children that have ended; return the status of the awaited one, or None."""
    status = None
    with suppress(ChildProcessError):
        while True:
            process, ended = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            if process == awaited:
                status = ended
    return status


def _end_descendants() -> None:
    """Kill all descendants of this process, and wait until all have ended."""
    with suppress(ChildProcessError):
        while True:
            for process in descendants(os.getpid()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(-1, 0)  # its children are children of this process now


def descendants(process: int) -> Iterator[int]:
    """Yield the ids of the child processes of a process, of theirs, and so on, where the kernel tells."""
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError, ValueError):
            for child in map(int, task.read_text(encoding="ascii").split()):
                yield child
                yield from descendants(child)


def ignore_rank_signals() -> Callable[[], None]:
    """Have this process not heed what is sent to ranks and to their group. What is returned, once it is
    called, has all that this process forks heed them again.

    Ignored signals would stay so in whatever it starts, and a pool of processes is ended by SIGTERM, which
    may come as soon as there is one.
    """
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {each: signal.signal(each, lambda *_: None) for each in heard}

    def let_come() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)

    def hear_again() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        let_come()

    def let_children_hear() -> None:
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, heard),
            after_in_parent=let_come,
            after_in_child=hear_again,
        )

    return let_children_hear


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True if a helper has ended; it is not reaped, so that its number stays its own."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # where SIGCHLD is ignored, nobody can wait for it
        return True


def wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a helper has ended, at most so many seconds; it is not reaped."""
    until, pause = time.monotonic() + seconds, 0.001
    while not has_ended(process) and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def kill_child(process: subprocess.Popen[bytes], runs_user_code: bool) -> None:
    """Kill a helper process that has its own session, and all processes that it has started.

    Args:
        process: The helper. This function does not wait for it.
        runs_user_code: True if the helper has called `end_descendants_with_parent`. Then its guard process is
            asked to end first, since it also finds processes in other sessions.
    """
    if process.returncode is not None:
        return
    if runs_user_code:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGTERM)
        wait_for_end(process, _SECONDS_TO_END)
    # The number of the group is its own as long as nobody has waited for the process.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def describe_exit(process: subprocess.Popen[bytes]) -> str:
    """How it ended, in words."""
    try:
        code = process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        return "does not answer any more"
    if code == -signal.SIGKILL:
        return "was killed (signal 9), as where memory runs out: fewer of them need less"
    return f"was ended by signal {-code}" if code < 0 else f"ended by itself, with exit code {code}"
