"""What makes a library of C for the processor that this is, with a compiler that is here."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import HpctrainError

COMPILERS = ("cc", "gcc", "clang")
"""Looked for where $CC names none."""

SECONDS = 120.0
"""After so long a compiler is given up."""

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


class CompilerError(HpctrainError):
    """There is no compiler, or it makes nothing of the source."""


def find_compiler(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The words of its command. CompilerError where there is none."""
    given = environment.get("CC", "").strip()
    for name in [given] if given else COMPILERS:
        try:
            words = shlex.split(name)
        except ValueError as error:
            raise CompilerError(f"no C compiler: $CC is {name}, no command: {error}") from error
        path = shutil.which(words[0], path=environment.get("PATH"))
        if path is not None:
            return [path, *words[1:]]
    raise CompilerError(f"no C compiler: {given or ', '.join(COMPILERS)} not found")


def compile_library(source: Path, environment: Mapping[str, str] = os.environ) -> bytes:
    """The shared library of a file of C, in about a second; leaves no file. CompilerError where it fails."""
    words = find_compiler(environment)
    problem = ""
    try:
        with tempfile.TemporaryDirectory(prefix="hpctrain-compiler-") as folder:
            output = Path(folder) / "library.so"
            for processor in _PROCESSOR:
                command = [*words, *_FLAGS, processor, "-o", str(output), str(source), "-lm"]
                done = subprocess.run(
                    command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=SECONDS,
                    check=False,
                )
                if done.returncode == 0:
                    return output.read_bytes()
                lines = done.stderr.decode(errors="replace").split("\n")
                problem = problem or next(
                    (line for line in lines if "error" in line), f"ended by {done.returncode}"
                )
    except subprocess.TimeoutExpired:
        problem = f"not done after {SECONDS:.0f} s"
    except OSError as error:
        problem = str(error)
    raise CompilerError(f"{words[0]} makes nothing of {source.name}: {problem[:200]}")
