"""Errors that a user can mend, and the exit codes of every verb."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpctrain.characters import escaped

EXIT_DONE = 0
EXIT_DIFFERENT = 1
EXIT_UNREAD = 1
EXIT_USER = 2
EXIT_INPUT_OUTPUT = 3
EXIT_INTERNAL = 70
EXIT_AGAIN = 75
EXIT_INTERRUPTED = 130


class HpctrainError(Exception):
    """A user's mistake: one sentence a problem, each saying what, where and what would be right.

    Printed once, from rank 0, without a traceback; the process then exits with `exit_code`.
    """

    exit_code = EXIT_USER

    def __init__(self, problems: str | Sequence[str]) -> None:
        sentences = (problems,) if isinstance(problems, str) else problems
        # What a user wrote stands in them: it is not to end the line or to steer the terminal.
        self.problems: tuple[str, ...] = tuple(map(escaped, sentences))
        super().__init__("\n".join(self.problems))


class UserCodeError(HpctrainError):
    """What code of the user's own fails with: where it fails on several ranks, one of them tells."""


class InputOutputError(HpctrainError):
    """A file that cannot be read, written or trusted."""

    exit_code = EXIT_INPUT_OUTPUT


def require_exists(path: Path, kind: str) -> None:
    """Raise an InputOutputError if nothing has this path; `kind` names what it should be ("run folder")."""
    if not path.exists():
        raise InputOutputError(f"{path}: no such {kind}")


@contextmanager
def failing_as(sentence: str) -> Iterator[None]:
    """Raise an OSError inside as an InputOutputError: the sentence ("FILE: cannot be read"), and why."""
    try:
        yield
    except OSError as error:
        raise InputOutputError(f"{sentence}: {error.strerror or error}") from error
