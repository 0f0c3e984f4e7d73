"""Processes that a rank starts beside itself, and which end with it. They are no ranks.

They are started anew, not forked, as MPI is up by then, and know nothing of its launcher.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys

from hpctrain.comm.launcher import without_rank

_START = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
_DIES_WITH_PARENT = 1  # of prctl
_SECONDS_TO_END = 5.0


def start_helper(
    code: str, kept: int, stdin: int = subprocess.PIPE, own_session: bool = False
) -> subprocess.Popen[bytes]:
    """Run Python code which imports what this process could, computes by one thread and has the file `kept`;
    with a session of its own, signals for the rank's do not reach it.
    """
    return subprocess.Popen(
        [
            *(sys.executable, "-c", _START + code),
            json.dumps([os.path.abspath(path) for path in sys.path]),  # noqa: PTH100
        ],
        stdin=stdin,
        pass_fds=(kept,),
        # Sets have the same order in each of them, and in a run that goes on.
        env={"PYTHONHASHSEED": "0", **without_rank(os.environ), "OMP_NUM_THREADS": "1"},
        start_new_session=own_session,
    )


def end_with(parent: int) -> bool:
    """Have the system kill this process when the one that started it ends; whether that is still there."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def how_ended(process: subprocess.Popen[bytes]) -> str:
    """How it ended, in words."""
    try:
        code = process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        return "does not answer any more"
    if code == -signal.SIGKILL:
        return "was killed (signal 9), as where memory runs out: fewer of them need less"
    return f"was ended by signal {-code}" if code < 0 else f"ended by itself, with exit code {code}"
