"""How errors of several ranks become one, and how it is printed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import EXIT_INPUT_OUTPUT, EXIT_UNREAD, HpctrainError, InputOutputError
from hpctrain.words import ranges

MOST_PROBLEMS = 50

# How messages of HDF5 begin, and what parts of them mean.
_HDF5 = re.compile(r"(\[Errno \d+\] )?(Unable to|Can't|Can not|Couldn't|unable to|can't)\b")
_MPI = re.compile(r"\b(MPI_\w+) failed: MPI error string is '([^']*)'")
_MEANINGS = (
    ("file signature not found", "it is not an HDF5 file"),
    ("truncated file", "it is truncated"),
    ("bad object header version", "its structure is damaged"),
    ("checksum", "its structure is damaged"),
)


def describe_os_error(error: OSError) -> str:
    """One sentence for an operating system's error."""
    return f"{'input/output' if error.filename is None else error.filename}: {error_reason(error)}"


def error_reason(error: BaseException) -> str:
    """Why a call of the system, of HDF5 or of ours failed; what HDF5 says of itself in our words."""
    whole = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    text = whole.split("\n")[0]
    told_by_mpi = _MPI.search(text)
    if told_by_mpi is not None:
        return f"{told_by_mpi[1]} failed: {told_by_mpi[2]}"
    number = re.search(r"\berrno = (\d+)", whole)  # HDF5 tells the system's error within its own
    if number is not None:
        return os.strerror(int(number[1]))
    if isinstance(error, OSError) and error.strerror and not _HDF5.match(error.strerror):
        return error.strerror
    if not _HDF5.match(text):
        return text or type(error).__name__
    absent = re.search(r"object '([^']*)' doesn't exist|name: '([^']*)'", text)
    if absent is not None:
        return f"it has no {absent[1] or absent[2]}"
    for sign, meaning in _MEANINGS:
        if sign in text:
            return meaning
    return "HDF5 cannot read or write it"


@contextmanager
def with_final_name(temporary: Path, path: Path) -> Iterator[None]:
    """Errors tell the name that a file will have; an OSError becomes an InputOutputError."""
    try:
        yield
    except (HpctrainError, OSError) as raised:
        error = InputOutputError(describe_os_error(raised)) if isinstance(raised, OSError) else raised
        renamed = type(error)([text.replace(str(temporary), str(path)) for text in error.problems])
        renamed.exit_code = error.exit_code
        raise renamed from None


def to_hpctrain_error(error: HpctrainError | OSError) -> HpctrainError:
    """The InputOutputError that says it; one without a word of a reader of stdout who has seen enough.

    Raises MemoryError instead where the system had no memory: that is no fault of a file.
    """
    if isinstance(error, HpctrainError):
        return error
    if error.errno == errno.ENOMEM:
        raise MemoryError(describe_os_error(error)) from error
    if isinstance(error, BrokenPipeError):
        silent = HpctrainError([])
        silent.exit_code = EXIT_UNREAD
        return silent
    return InputOutputError(describe_os_error(error))


def combine_errors(failures: Sequence[tuple[int, Sequence[str]]]) -> HpctrainError:
    """One error of several ranks' (exit code, problems), in rank order: the first code, all problems."""
    code = failures[0][0]
    problems = list(dict.fromkeys(problem for _, each in failures for problem in each))
    if len(problems) > MOST_PROBLEMS:
        problems = [*problems[:MOST_PROBLEMS], f"and {len(problems) - MOST_PROBLEMS} more problems"]
    error = InputOutputError(problems) if code == EXIT_INPUT_OUTPUT else HpctrainError(problems)
    error.exit_code = code
    return error


def print_problems(problems: Sequence[str]) -> None:
    """One line a problem, on stderr."""
    for problem in problems:
        print_error(f"hpctrain: error: {problem}")


def print_error(text: str) -> None:
    """Print on stderr; a screen that has gone away changes nothing of how the job ends."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def flush_output() -> None:
    """Hand on what was printed; what nobody takes any more is dropped, now and when the process ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    text = ranges(ranks, ", ")
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"
