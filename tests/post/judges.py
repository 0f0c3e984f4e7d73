"""Functions that judge completions, as users write them, and some that fail in each way there is."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


def length(prompts, completions, **others):
    """As trl's users have it."""
    assert len(prompts) == len(completions)
    return [float(len(completion)) for completion in completions]


def correct(completions, answer):
    return [completion == right for completion, right in zip(completions, answer, strict=True)]


async def later(completions, **others):
    return [0.25] * len(completions)


def as_array(completions, tokens):
    return np.array(tokens, dtype=np.float32) / 2


def says(completions, **others):
    print("said by a function")
    os.write(1, b"written by a function\n")
    return [0.0] * len(completions)


def process(completions, **others):
    """What it runs in."""
    assert Path("/proc/self/oom_score_adj").read_text() == "1000\n"
    assert os.getsid(0) == os.getpgid(0) == os.getppid() and os.environ["OMP_NUM_THREADS"] == "1"
    assert not [name for name in os.environ if name.startswith(("OMPI_", "PMIX_"))]
    assert "torch" not in sys.modules and "mpi4py" not in sys.modules
    return [float(os.getpid())] * len(completions)


def of_each(bad):
    """A function that does something bad for completions which are "bad", and else judges them."""
    return lambda completions, **others: [bad() if each == "bad" else 1.0 for each in completions]


def _raises():
    raise KeyError("no such thing\nhere")


def _hangs():
    time.sleep(1000)


def _spins():
    """Without end, and without letting another thread on."""
    re.match("(a+)+$", "a" * 60 + "b")


def _starts_and_hangs():
    child = subprocess.Popen(["sleep", "1000"])
    Path(os.environ["CHILD"]).write_text(str(child.pid))
    child.wait()


def _forks_and_spins():
    """The child holds what its parent has open, and never lets it go."""
    child = os.fork()
    if child:
        Path(os.environ["CHILD"]).write_text(str(child))
    _spins()


def _starts_and_exits():
    child = subprocess.Popen(["sleep", "1000"])
    Path(os.environ["CHILD"]).write_text(str(child.pid))
    os._exit(3)


def _out_of_memory():
    return len(bytearray(1 << 60))


raises, hangs, spins = of_each(_raises), of_each(_hangs), of_each(_spins)
starts_and_hangs, starts_and_exits = of_each(_starts_and_hangs), of_each(_starts_and_exits)
forks_and_spins = of_each(_forks_and_spins)
leaves, exits = of_each(lambda: sys.exit("enough")), of_each(lambda: os._exit(3))
killed = of_each(lambda: os.kill(os.getpid(), signal.SIGKILL))
crashes, out_of_memory = of_each(lambda: ctypes.string_at(0)), of_each(_out_of_memory)
nan, infinite, none, text = (of_each(lambda value=value: value) for value in (np.nan, -np.inf, None, "high"))


huge = of_each(lambda: 1e308)


def one_number(completions, **others):
    return 1.0


def too_few(completions, **others):
    return [1.0]


def forks_and_ends(completions, **others):
    """As a pool of processes ends its own, as soon as they are there or later."""
    codes = []
    for number in range(20):
        child = multiprocessing.get_context("fork").Process(target=_hangs)
        child.start()
        time.sleep(number % 4 * 0.01)
        child.terminate()
        child.join()
        codes.append(child.exitcode)
    return [float(code) for code in set(codes)] * len(completions)


def takes_out(completions, **others):
    found = []
    while completions:
        found.append(float(len(completions.pop(0))))
    return found


def leaves_out(completions, **others):
    completions.pop()
    return [1.0] * len(completions)


def not_at_once(completions, **others):
    if len(completions) > 1:
        raise ValueError("one by one, please")
    return [1.0]


def slow(completions, **others):
    time.sleep(0.2 * len(completions))
    return [1.0] * len(completions)


def of_text(text, label):
    return [1.0]


def with_solution(completions, solution):
    return [1.0]


def twice(completions: list[str]) -> list[float]:
    os.fork()
    return [1.0] * len(completions)


def _starts_a_session():
    """A child with a session of its own, whose parent ends before it, as a daemon has it."""
    start = "subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=2)"
    code = f"import subprocess; print({start}.pid)"
    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True)
    Path(os.environ["CHILD"]).write_text(child.stdout)


def _starts_a_session_and_hangs():
    _starts_a_session()
    _hangs()


def _starts_a_session_and_exits():
    _starts_a_session()
    os._exit(3)


def _writes_everywhere(line=b"a line of a function\n"):
    for number in range(3, 1024):
        with contextlib.suppress(OSError):
            os.write(number, line)
    return 1.0


def _closes_everything():
    os.closerange(0, 4096)
    return 1.0


sessions_and_hangs, sessions_and_exits = (
    of_each(_starts_a_session_and_hangs),
    of_each(_starts_a_session_and_exits),
)
writes_everywhere, closes_everything = of_each(_writes_everywhere), of_each(_closes_everything)
writes_nested_lists = of_each(lambda: _writes_everywhere(b"[" * 100_000 + b"\n"))
writes_to_three = of_each(lambda: os.write(3, b"a line of a function\n"))
floods = of_each(lambda: [os.write(512, b"x" * (1 << 20)) for _ in range(1 << 20)])
