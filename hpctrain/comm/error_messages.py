"""Error messages: what a system error means, one error for all ranks, and how it is printed."""

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
from hpctrain.text import ranges

MOST_PRINTED_PROBLEMS = 50
"""Largest number of messages that one error prints."""

# Start of messages of HDF5, and what parts of them mean.
_HDF5 = re.compile(r"(\[Errno \d+\] )?(Unable to|Can't|Can not|Couldn't|unable to|can't)\b")
_MPI = re.compile(r"\b(MPI_\w+) failed: MPI error string is '([^']*)'")
_MEANINGS = (
    ("file signature not found", "it is not an HDF5 file"),
    ("truncated file", "it is truncated"),
    ("bad object header version", "its structure is damaged"),
    ("checksum", "its structure is damaged"),
)


def describe_os_error(error: OSError) -> str:
    """Return "file: reason" for a system error; "input/output: reason" if it names no file."""
    return f"{'input/output' if error.filename is None else error.filename}: {error_reason(error)}"


def error_reason(error: BaseException) -> str:
    """Return the reason of an error of the operating system, HDF5 or MPI, in words that users understand.

    It does not name the file, is meant to follow "file: ", and has no full stop of its own. For an OSError,
    it is the system's text, such as "Permission denied". HDF5's messages are replaced by a predicate whose
    subject is the file, such as "it is truncated", because they consist of terms of its programming
    interface. For any other exception, it is the first line of its message, or the name of its type without
    one.
    """
    whole = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    text = whole.split("\n")[0]
    mpi_message = _MPI.search(text)
    if mpi_message is not None:
        return f"{mpi_message[1]} failed: {mpi_message[2]}"
    number = re.search(r"\berrno = (\d+)", whole)  # HDF5 includes the error of the system in its own
    if number is not None:
        return os.strerror(int(number[1]))
    if isinstance(error, OSError) and error.strerror and not _HDF5.match(error.strerror):
        return error.strerror
    if not _HDF5.match(text):
        return text or type(error).__name__
    absent = re.search(r"object '([^']*)' doesn't exist|name: '([^']*)'", text)
    if absent is not None:
        return f"it has no {absent[1] or absent[2]}"
    for part, meaning in _MEANINGS:
        if part in text:
            return meaning
    return "HDF5 cannot read or write it"


@contextmanager
def with_final_name(temporary: Path, path: Path) -> Iterator[None]:
    """Replace a temporary file name in the messages of errors that the block raises.

    An OSError becomes an InputOutputError.

    Args:
        temporary: Path under which a file is written.
        path: Path that the file will have in the end.
    """
    try:
        yield
    except (HpctrainError, OSError) as raised:
        error = InputOutputError(describe_os_error(raised)) if isinstance(raised, OSError) else raised
        renamed = type(error)([text.replace(str(temporary), str(path)) for text in error.problems])
        renamed.exit_code = error.exit_code
        raise renamed from None


def to_hpctrain_error(error: HpctrainError | OSError) -> HpctrainError:
    """Return an error as an HpctrainError, for the caller to raise or print.

    An HpctrainError is returned as it is. An OSError becomes an InputOutputError. A BrokenPipeError becomes
    an error without a message and with exit code 1, since the program that reads stdout has ended.

    Raises:
        MemoryError: The error is an OSError with the number ENOMEM: the system had no memory, which is not
            the fault of a file.
    """
    if isinstance(error, HpctrainError):
        return error
    if error.errno == errno.ENOMEM:
        raise MemoryError(describe_os_error(error)) from error
    if isinstance(error, BrokenPipeError):
        return silent_error(EXIT_UNREAD)
    return InputOutputError(describe_os_error(error))


def silent_error(code: int) -> HpctrainError:
    """Return (not raise) a new HpctrainError with an exit code and without any message. Local.

    The caller raises it or passes it to `World.finish`. Then the run ends with this code and prints nothing,
    for example after `sys.exit`, or if the program that reads stdout has ended.

    Args:
        code: Exit code, which should not be 0.
    """
    error = HpctrainError([])
    error.exit_code = code
    return error


def combine_errors(failures: Sequence[tuple[int, Sequence[str]]]) -> HpctrainError:
    """Return (not raise) one error that reports the errors of several ranks. Local.

    Args:
        failures: Exit code and messages of each failing rank, in rank order; at least one.

    Returns:
        An error with the exit code of the first failing rank and all distinct messages, at most
        MOST_PRINTED_PROBLEMS and a line that counts the rest. It is an InputOutputError if that code is 3.
    """
    code = failures[0][0]
    problems = list(dict.fromkeys(problem for _, each in failures for problem in each))
    if len(problems) > MOST_PRINTED_PROBLEMS:
        problems = [
            *problems[:MOST_PRINTED_PROBLEMS],
            f"and {len(problems) - MOST_PRINTED_PROBLEMS} more problems",
        ]
    error = InputOutputError(problems) if code == EXIT_INPUT_OUTPUT else HpctrainError(problems)
    error.exit_code = code
    return error


def raise_together(errors: Sequence[HpctrainError]) -> None:
    """Raise the problems of all errors as one error: an InputOutputError if any of them is one.

    Does nothing without errors.
    """
    if errors:
        has_io_error = any(isinstance(error, InputOutputError) for error in errors)
        problems = [problem for error in errors for problem in error.problems]
        raise (InputOutputError if has_io_error else HpctrainError)(problems)


def print_problems(problems: Sequence[str]) -> None:
    """Print each message on a line of stderr, after "hpctrain: error: ". Local."""
    for problem in problems:
        print_error(f"hpctrain: error: {problem}")


def print_error(text: str) -> None:
    """Print a line on stderr, and flush it. Local.

    If stderr is closed, nothing happens, and no error is raised.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be None
        # One write, so that the launcher cannot put a line of stdout before the end of this one.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def flush_output() -> None:
    """Flush stdout and stderr.

    If a stream is closed, its output is dropped, now and when the process ends.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks in words, sorted and with ranges: "rank 3", or "ranks 0-2, 5"; "ranks " for none."""
    text = ranges(ranks, ", ")
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"
