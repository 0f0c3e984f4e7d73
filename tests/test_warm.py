"""What a server of warm.py runs is to whoever started it as if Python had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import clean_environment
from tests.warm import ASK, QUICK_END, Server

PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
print(os.getpgrp() == os.getpid(), sorted(os.sched_getaffinity(0)), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR1, 7), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -9)]
)
def test_signals_and_processors_are_handed_on(warm: Server, number: signal.Signals, code: int) -> None:
    every = sorted(os.sched_getaffinity(0))
    command = [*warm.command(clean_environment()), "-c", PROGRAM]
    os.sched_setaffinity(0, every[:1])
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
            assert started.stdout is not None
            told = started.stdout.readline()
            started.send_signal(number)
            started.wait(20)
        assert (told, started.returncode) == (f"True {every[:1]}\n", code)
    finally:
        os.sched_setaffinity(0, every)


def test_where_no_server_is_python_itself_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", ASK, tmp_path / "no-server", QUICK_END, "-c", "exit(5)"]
    assert subprocess.run(command, env=clean_environment()).returncode == 5
