"""Start, end and signals of processes that a rank starts and that end with it. They are not ranks.

They are started as new interpreters and not forked, since MPI is running, and their environment hides the
launcher from them.
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

from hpctrain.host.commands import code_command
from hpctrain.host.launcher import environment_without_rank

_START = "import json; sys.path[:] = json.loads(sys.argv[1]); "
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # options of prctl(2)
_SECONDS_TO_END = 5.0


def start_child(
    code: str, inherited: int, stdin: int = subprocess.PIPE, new_session: bool = False
) -> subprocess.Popen[bytes]:
    """Start a Python process that can import what this one can, and that computes with one thread. Local.

    It does not wait. The process does not know that it was started by a rank, and does not end by itself when
    this one ends; `end_with_parent` in its code does that.

    Args:
        code: Python code.
        inherited: File descriptor that the process inherits.
        stdin: Standard input, as `subprocess.Popen` takes it.
        new_session: True if signals to the process group of the rank must not reach the process. It then
            leads a process group of its own.
    """
    return subprocess.Popen(
        code_command(_START + code, [json.dumps([os.path.abspath(path) for path in sys.path])]),  # noqa: PTH100
        stdin=stdin,
        pass_fds=(inherited,),
        # Sets have the same order in each process, and in resumed runs.
        env={"PYTHONHASHSEED": "0", **environment_without_rank(os.environ), "OMP_NUM_THREADS": "1"},
        start_new_session=new_session,
    )


def end_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> bool:
    """Make the kernel send this process a signal when the thread that started it, usually its parent, ends.

    Args:
        parent: Process id that the parent had when it started this process.
        by: The signal.

    Returns:
        True if the parent is still alive. If it has ended before this call, no signal comes, and the caller
        should end this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    return os.getppid() == parent


def end_descendants_with_parent(parent: int) -> bool:
    """Fork, and return in the new process, which ends together with all its descendants.

    Call it before this process uses threads, MPI or a GPU, which do not work in the new process. It replaces
    a call of `end_with_parent`. The calling process does not return: it becomes a guard. The guard kills all
    descendants when `parent` ends, when it receives SIGTERM, or when the new process ends. It also finds
    descendants with sessions of their own, since the kernel makes them its children when their parents end
    (it is a subreaper). Then the guard ends with the exit code or signal of the new process, or with exit
    code 137 if it had to kill it.

    Args:
        parent: Process id of the parent of the calling process.

    Returns:
        True if the guard is still alive. If it is not, the caller must end at once.

    Raises:
        RuntimeError: The calling process does not lead its process group (`start_child` with `new_session`
            makes it one), which `kill_child` kills.
    """
    if os.getpgid(0) != os.getpid():
        raise RuntimeError("this process does not lead a process group, so it must not end one")
    signals = {signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    first = os.getpid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not (child := os.fork()):
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return end_with_parent(first)
    parent_alive = end_with_parent(parent, signal.SIGHUP)
    status: int | None = None
    while parent_alive and status is None:
        parent_alive = signal.sigwait(signals) != signal.SIGTERM and os.getppid() == parent
        status = _reap(child)
    _end_descendants()
    if status is None:  # it was killed just now
        os._exit(128 + signal.SIGKILL)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has already left a core file
        by = os.WTERMSIG(status)
        if by not in {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(by, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {by})
        os.kill(first, by)
    os._exit(os.waitstatus_to_exitcode(status))


def _reap(awaited: int) -> int | None:
    """Reap all children that have ended. Return the status of the awaited one, or None."""
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
    """Yield the ids of the running child processes of a process, of theirs, and so on. Local.

    None are yielded if the process has ended or the kernel does not list them.

    Args:
        process: Process id, which is not yielded itself.
    """
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError, ValueError):
            for child in map(int, task.read_text(encoding="ascii").split()):
                yield child
                yield from descendants(child)


def stat_fields(stat: Path) -> list[str]:
    """Return the fields of a process or thread in /proc/<pid>/stat, from its state (a letter) on.

    Local.

    Args:
        stat: Path of the file, such as /proc/<pid>/stat.

    Returns:
        The fields after the name, as text: the state first; [] if the file cannot be read.
    """
    try:
        text = stat.read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def ignore_rank_signals() -> Callable[[], None]:
    """Make this process ignore SIGINT, SIGTERM, SIGUSR1 and SIGUSR2, which are sent to ranks.

    Launchers and users send them to the process group of a rank. Call it in the main thread; in others it is
    a ValueError. Forked processes inherit this. But users' code may fork processes, such as a multiprocessing
    pool, which are ended by SIGTERM, perhaps right after the fork. Such processes must get the original
    handlers back.

    Returns:
        Function that arranges this and is called once: in processes forked after that, the handlers are the
        original ones. The signals are blocked during the fork, so that none is lost in between.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {each: signal.signal(each, lambda *_: None) for each in signals}

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def restore_handlers() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        unblock()

    def restore_in_children() -> None:
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signals),
            after_in_parent=unblock,
            after_in_child=restore_handlers,
        )

    return restore_in_children


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True if a process has ended. This does not reap it, so that its process id stays its own.

    It is also True for a process that has been reaped.
    """
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # where SIGCHLD is ignored, nobody can wait for it
        return True


def wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a child process has ended, at most `seconds`, without reaping it. It returns in both cases.

    `has_ended` then returns whether it has. Nothing is killed.
    """
    until, pause = time.monotonic() + seconds, 0.001
    while not has_ended(process) and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def kill_child(process: subprocess.Popen[bytes], runs_user_code: bool) -> None:
    """Kill a process that has its own session, and all processes of that session that it has started.

    It does not reap the process, which may end only after the return. No error is raised if it has already
    ended.

    Args:
        process: The process. If it has been reaped, nothing is killed.
        runs_user_code: True if the process has called `end_descendants_with_parent`. Then its guard process
            is asked to end first, for which this waits up to 5 s. It also finds processes in other sessions.
    """
    if process.returncode is not None:
        return
    if runs_user_code:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGTERM)
        wait_for_end(process, _SECONDS_TO_END)
    # The id of the process group stays its own as long as nobody has reaped the process.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def describe_exit(process: subprocess.Popen[bytes]) -> str:
    """Wait up to 5 s for the end of a process, reap it, and return how it ended.

    The phrase follows a subject, such as "its process": "was ended by signal 11", "ended by itself, with exit
    code 1", or "does not answer" if it has not ended. In this last case it is not reaped, and the caller may
    kill it and call this again. For a process that was reaped before, the result is the same.
    """
    try:
        code = process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        return "does not answer"
    if code == -signal.SIGKILL:
        return "was killed (signal 9), possibly because memory ran out: use fewer processes"
    return f"was ended by signal {-code}" if code < 0 else f"ended by itself, with exit code {code}"
