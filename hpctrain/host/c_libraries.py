"""Shared libraries that are compiled from C or C++ sources for this processor, and their cache.

A library is compiled for the processor on which it runs. It is first called in another process, since a wrong
library could crash this process. If that succeeds, it is stored in the user's cache folder. The name of its
file there depends on everything that affects the library: the source, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.files import delete_folder, files_named, read_bytes, user_cache
from hpctrain.host.process_lifetime import kill_child

SECONDS = 120.0
"""Time limit, in seconds, of a compiler and of the trial of a library."""

_LARGEST_CACHED_FILE = 64 << 20
"""Largest size, in bytes, of a file that is read from the cache."""

_PROCESSOR_FLAGS = ("-march=native", "-mcpu=native")
"""Flags that select this processor. The first one that the compiler supports is used: some compilers for ARM
support only the second.
"""

_DIGEST_BYTES = hashlib.sha256().digest_size
_PROCESSOR_FIELDS = ("model name", "flags", "CPU implementer", "CPU part", "Features")
"""Fields of /proc/cpuinfo by which types of processors differ."""

_NOT_FINISHED = "not finished after {:.0f} s"

_FOLDER_PREFIX = "hpctrain-compiler-"
_OLD_SECONDS = 3600.0
"""Age, in seconds, of a temporary folder above which its run must have been killed."""

_END_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Program that replaces itself by another one, which Linux kills when the rank that started it ends."""


@dataclass(frozen=True)
class Language:
    """Programming language of a source, and how to compile it.

    Attributes:
        name: Name of the language in messages.
        variable: Environment variable that names the compiler.
        compilers: Commands that are tried in this order if the variable is not set.
        flags: Options of the compiler.
    """

    name: str
    variable: str
    compilers: tuple[str, ...]
    flags: tuple[str, ...]


_SHARED = ("-fPIC", "-shared")
LANGUAGES = {
    ".c": Language(
        "C",
        "CC",
        ("cc", "gcc", "clang"),
        ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", *_SHARED),
    ),
    ".cpp": Language("C++", "CXX", ("c++", "g++", "clang++"), ("-O2", "-std=c++20", *_SHARED)),
}
"""Languages by the suffix of their files."""


class CompilerError(HpctrainError):
    """Error of `build_library`: there is no compiler, it fails, or the library does not run here."""


def build_library(
    source: Path,
    program: Path,
    is_correct: Callable[[bytes], bool] = lambda _: True,
    options: Sequence[str] = (),
) -> bytes:
    """Return the shared library of a source for this processor: from the cache, or compiled and tried. Local.

    If the cache folder cannot be written, the library is compiled each time.

    Args:
        source: C or C++ file.
        program: Python file that calls all functions of the library whose path is its argument.
        is_correct: Function that returns True if the results of a library are correct. It is called with a
            new library after the program has run without an error.
        options: Further options of the compiler. A library in the cache is used only for the same options.

    Raises:
        CompilerError: There is no compiler, it fails, or the library does not run or compute correctly.
    """
    path = _cache_path(source, program, options)
    with suppress(OSError):
        content = read_bytes(path, _LARGEST_CACHED_FILE)
        library, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if path.stat().st_uid == os.geteuid() and hashlib.sha256(library).digest() == digest:
            return library
    library = compile_library(source, os.environ, options)
    try_library(library, program)
    if not is_correct(library):
        raise CompilerError("the compiled library does not agree with torch")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as stream:
            stream.write(library + hashlib.sha256(library).digest())
        Path(stream.name).replace(path)
    return library


def build_packaged_library(
    package: str,
    source: str,
    program: str,
    is_correct: Callable[[bytes], bool] = lambda _: True,
    options: Sequence[str] = (),
) -> bytes:
    """Return the library of a C or C++ file of a package, as `build_library` does.

    Args:
        package: Name of the package, such as "hpctrain.fault_checks".
        source: Name of the file in the package.
        program: Name of the Python file in the package that tries a library.
        is_correct: As in `build_library`.
        options: As in `build_library`.

    Raises:
        CompilerError: There is no compiler, it fails, or the library does not run or compute correctly.
    """
    folder = files(package)
    with as_file(folder / source) as source_path, as_file(folder / program) as program_path:
        return build_library(source_path, program_path, is_correct, options)


def _cache_path(source: Path, program: Path, options: Sequence[str]) -> Path:
    """Return the path of a library in the cache."""
    language = LANGUAGES[source.suffix]
    compiler = find_compiler(os.environ, language)
    status = Path(compiler[0]).resolve().stat()
    processor = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        processor = "\n".join(sorted({line for line in lines if line.startswith(_PROCESSOR_FIELDS)}))
    command = (*compiler, *language.flags, *options)
    parts = (
        source.read_bytes(),
        program.read_bytes(),
        *map(os.fsencode, (*command, str(status.st_mtime_ns), str(status.st_size))),
        platform.machine().encode(),
        processor.encode(),
    )
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    return user_cache() / "libraries" / f"{source.stem}-{digest[:32]}.so"


def find_compiler(
    environment: Mapping[str, str] = os.environ, language: Language = LANGUAGES[".c"]
) -> list[str]:
    """Return the command of the compiler of a language: its path, and arguments that its variable adds.

    Args:
        environment: Environment variables; $PATH and the variable of the language, such as $CC, are used.
        language: The language.

    Raises:
        CompilerError: There is none.
    """
    variable, missing = language.variable, f"no {language.name} compiler"
    requested = environment.get(variable, "").strip()
    for name in [requested] if requested else language.compilers:
        try:
            words = shlex.split(name)
        except ValueError as error:
            raise CompilerError(f"{missing}: ${variable} = {name}: not a command: {error}") from error
        path = shutil.which(words[0], path=environment.get("PATH"))
        if path is not None:
            return [path, *words[1:]]
    raise CompilerError(f"{missing}: {requested or ', '.join(language.compilers)} not found")


def compile_library(
    source: Path, environment: Mapping[str, str] = os.environ, options: Sequence[str] = ()
) -> bytes:
    """Compile a source for this processor, and return the shared library. Local.

    It takes about a second, and leaves no file.

    Args:
        source: File of C or C++.
        environment: Environment variables of the compiler.
        options: Further options of the compiler.

    Raises:
        CompilerError: There is no compiler, or it fails.
    """
    language = LANGUAGES[source.suffix]
    words = find_compiler(environment, language)
    problem = ""
    try:
        _remove_old_folders()
        with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX) as folder:
            output = Path(folder) / "library.so"
            for processor in _PROCESSOR_FLAGS:
                files = ["-o", str(output), str(source), *options, "-lm"]
                command = [*words, *language.flags, processor, *files]
                status, lines = _run(command, environment)
                if status == 0:
                    return output.read_bytes()
                silent = (
                    f"exit status {status} without a message (check the free space in "
                    f"{tempfile.gettempdir()})"
                )
                ended = f"exit status {status}" if any(lines) else silent
                problem = problem or next((line for line in lines if "error" in line), ended)
    except subprocess.TimeoutExpired:
        problem = _NOT_FINISHED.format(SECONDS)
    except OSError as error:
        problem = str(error)
    raise CompilerError(f"{words[0]} cannot compile {source.name}: {problem[:200]}")


def try_library(content: bytes, program: Path) -> None:
    """Run a Python program with the file of a library as its argument, in another process. Local.

    Args:
        content: The library.
        program: Program that calls all functions of the library.

    Raises:
        CompilerError: The program fails or is killed, for example since the processor lacks an instruction.
    """
    try:
        library = _in_memory(content)
        try:
            # Without the installed packages, whose import would take longer than all the rest.
            command = [sys.executable, "-I", "-S", str(program), f"/proc/self/fd/{library}"]
            status, lines = _run(command, os.environ, [library])
        finally:
            os.close(library)
        if status == 0:
            return
        problem = signal.Signals(-status).name if status < 0 else lines[-1] or f"exit status {status}"
    except subprocess.TimeoutExpired:
        problem = _NOT_FINISHED.format(SECONDS)
    except OSError as error:
        problem = str(error)
    raise CompilerError(f"the compiled library does not run on this processor: {problem[:200]}")


def open_library(content: bytes, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """Load a library from memory, since the folder of temporary files may be mounted without execution.

    Its file remains open. Otherwise another library could get the same name, by which the loader identifies
    libraries.

    Args:
        content: The library.
        mode: `ctypes.RTLD_GLOBAL` to make its functions available in `ctypes.CDLL(None)`.

    Raises:
        OSError: The library cannot be loaded.
    """
    file = _in_memory(content)
    try:
        return ctypes.CDLL(f"/proc/self/fd/{file}", mode)
    except OSError:
        os.close(file)
        raise


def _in_memory(content: bytes) -> int:
    """Return the descriptor of a file in memory. The caller closes it."""
    file = os.memfd_create("hpctrain-library")
    with os.fdopen(os.dup(file), "wb") as stream:
        stream.write(content)
    return file


def _remove_old_folders() -> None:
    """Remove the temporary folders of this module that killed runs of this user have left."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                ours = entry.name.startswith(_FOLDER_PREFIX) and status.st_uid == os.geteuid()
                if (
                    ours
                    and time.time() - status.st_mtime > _OLD_SECONDS
                    and entry.is_dir(follow_symlinks=False)
                ):
                    delete_folder(Path(entry.path), files_named(r"library\.so"))


def _run(
    command: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int] = ()
) -> tuple[int, list[str]]:
    """Run a command that inherits some descriptors, and return its exit status and the lines that it prints.

    Raises:
        subprocess.TimeoutExpired: It does not end within SECONDS. It and all that it started are killed then.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=inherited,
        )
        try:
            status = process.wait(SECONDS)
        except BaseException:
            kill_child(process, runs_user_code=False)
            process.wait()
            raise
        output.seek(0)
        return status, output.read().decode(errors="replace").strip().split("\n")
