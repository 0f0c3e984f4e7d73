"""Errors that a user can mend, and the exit codes of every verb."""

from collections.abc import Sequence

EXIT_DONE = 0
EXIT_DIFFERENT = 1
EXIT_USER = 2
EXIT_INPUT_OUTPUT = 3
EXIT_INTERNAL = 70
EXIT_AGAIN = 75


class HpctrainError(Exception):
    """A user's mistake: one sentence a problem, each saying what, where and what would be right.

    Printed once, from rank 0, without a traceback; the process then exits with `exit_code`.
    """

    exit_code = EXIT_USER

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class InputOutputError(HpctrainError):
    """A file that cannot be read, written or trusted."""

    exit_code = EXIT_INPUT_OUTPUT
