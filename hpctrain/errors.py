"""Errors that a user can correct, and the exit codes of all verbs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from hpctrain.text import escaped

EXIT_DONE = 0
"""Success."""
EXIT_DIFFERENT = 1
"""Success of a comparison or search whose result is negative, such as two checkpoints that differ."""
EXIT_UNREAD = 1
"""The program that reads stdout has ended."""
EXIT_USER = 2
"""Mistake of the user, such as a deck that is not valid."""
EXIT_INPUT_OUTPUT = 3
"""A file cannot be read, written or trusted."""
EXIT_INTERNAL = 70
"""Error of hpctrain or of the machine, such as a hang."""
EXIT_AGAIN = 75
"""The run stopped before its end and saved a checkpoint, from which a requeued job continues."""
EXIT_INTERRUPTED = 130
"""Interrupt by the user (SIGINT)."""


class HpctrainError(Exception):
    """Mistake of the user: one sentence for each problem, with the place, the value and what would be right.

    Rank 0 prints the sentences once, without a traceback. The process then exits with `exit_code`.

    Attributes:
        problems: The sentences, with their control characters escaped.
    """

    exit_code = EXIT_USER

    def __init__(self, problems: str | Sequence[str]) -> None:
        sentences = (problems,) if isinstance(problems, str) else problems
        # They quote text of the user, which must not end the line or control the terminal.
        self.problems: tuple[str, ...] = tuple(map(escaped, sentences))
        super().__init__("\n".join(self.problems))


class UserCodeError(HpctrainError):
    """Exception in code of the user. If it fails on several ranks, only one of them is reported."""


class InputOutputError(HpctrainError):
    """File that cannot be read, written or trusted."""

    exit_code = EXIT_INPUT_OUTPUT


class CommunicationError(HpctrainError):
    """Failure of a call among ranks, such as after the loss of another rank, its GPU or its node."""

    exit_code = EXIT_INTERNAL


def require_exists(path: Path, kind: str) -> None:
    """Check that a file or folder exists.

    Args:
        path: Its path.
        kind: Noun for the message, such as "run folder".

    Raises:
        InputOutputError: Nothing has this path.
    """
    if not path.exists():
        raise InputOutputError(f"{path}: no such {kind}")


@contextmanager
def failing_as(sentence: str) -> Iterator[None]:
    """Return a context manager that raises an OSError of its block as an InputOutputError with this sentence.

    Other errors are raised as they are.

    Args:
        sentence: Sentence such as "FILE: cannot be read", behind which the system's reason is put.
    """
    try:
        yield
    except OSError as error:
        raise InputOutputError(f"{sentence}: {error.strerror or error}") from error


def require(package: str, purpose: str) -> None:
    """Check that an optional package can be imported, by importing it.

    Args:
        package: Name of the package.
        purpose: What needs it, as the subject of the message.

    Raises:
        HpctrainError: The package cannot be imported.
    """
    try:
        import_module(package)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        reason = "is not installed" if missing else f"cannot be loaded ({error})"
        raise HpctrainError(
            f"{purpose} needs the package {package}, which {reason}: pip install {package}"
        ) from None
