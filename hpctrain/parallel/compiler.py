"""What makes a library of C for the processor that this is, with a compiler that is here, and tries it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.files import delete_folder, files_named

COMPILERS = ("cc", "gcc", "clang")
"""Looked for where $CC names none."""

SECONDS = 120.0
"""After so long a compiler is given up, and what it made."""

_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fPIC",
    "-shared",
)
_PROCESSOR = ("-march=native", "-mcpu=native")
"""Of which the first that a compiler knows is taken: those of ARM's know but the second."""


_TOO_LONG = "not finished after {:.0f} s"

_FOLDER = "hpctrain-compiler-"
_OLD = 3600.0
"""Seconds after which a folder is one that a killed run has left."""

_END_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)
"""A program that becomes another one, which Linux kills where the rank that started it is no more."""


class CompilerError(HpctrainError):
    """There is no compiler, or it makes nothing of the source."""


def find_compiler(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The words of its command. CompilerError where there is none."""
    given = environment.get("CC", "").strip()
    for name in [given] if given else COMPILERS:
        try:
            words = shlex.split(name)
        except ValueError as error:
            raise CompilerError(f"no C compiler: $CC = {name}: not a command: {error}") from error
        path = shutil.which(words[0], path=environment.get("PATH"))
        if path is not None:
            return [path, *words[1:]]
    raise CompilerError(f"no C compiler: {given or ', '.join(COMPILERS)} not found")


def compile_library(source: Path, environment: Mapping[str, str] = os.environ) -> bytes:
    """The shared library of a file of C, in about a second; leaves no file. CompilerError where it fails."""
    words = find_compiler(environment)
    problem = ""
    try:
        _sweep()
        with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
            output = Path(folder) / "library.so"
            for processor in _PROCESSOR:
                command = [*words, *_FLAGS, processor, "-o", str(output), str(source), "-lm"]
                status, lines = _run(command, environment, Path(folder))
                if status == 0:
                    return output.read_bytes()
                silent = (
                    f"exit status {status} without a message (check the free space in "
                    f"{tempfile.gettempdir()})"
                )
                ended = f"exit status {status}" if any(lines) else silent
                problem = problem or next((line for line in lines if "error" in line), ended)
    except subprocess.TimeoutExpired:
        problem = _TOO_LONG.format(SECONDS)
    except OSError as error:
        problem = str(error)
    raise CompilerError(f"{words[0]} cannot compile {source.name}: {problem[:200]}")


def try_library(content: bytes, program: Path) -> None:
    """Have a process of its own run a program of Python, with the name of a file of a library. CompilerError
    where it does not end well, as where the processor lacks an instruction that the library has.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
            library = Path(folder) / "library.so"
            library.write_bytes(content)
            # Without what is installed beside Python, which takes longer than all the rest.
            status, lines = _run(
                [sys.executable, "-I", "-S", str(program), str(library)], os.environ, Path(folder)
            )
        if status == 0:
            return
        problem = signal.Signals(-status).name if status < 0 else lines[-1] or f"exit status {status}"
    except subprocess.TimeoutExpired:
        problem = _TOO_LONG.format(SECONDS)
    except OSError as error:
        problem = str(error)
    raise CompilerError(f"the compiled library does not run on this processor: {problem[:200]}")


def _sweep() -> None:
    """Remove what killed runs of this user have left of their own folders."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                ours = entry.name.startswith(_FOLDER) and status.st_uid == os.geteuid()
                if ours and time.time() - status.st_mtime > _OLD and entry.is_dir(follow_symlinks=False):
                    delete_folder(Path(entry.path), files_named(r"library\.so|said"))


def _run(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> tuple[int, list[str]]:
    """The status by which a command ends, and the lines that it says. TimeoutExpired after so many SECONDS:
    it, and all that it has started, is gone then.
    """
    with (folder / "said").open("w+b") as said:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            status = process.wait(SECONDS)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        said.seek(0)
        return status, said.read().decode(errors="replace").strip().split("\n")
