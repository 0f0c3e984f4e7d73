"""How errors of several ranks become one, and how it is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from hpctrain.errors import EXIT_INPUT_OUTPUT, HpctrainError, InputOutputError

MOST_PROBLEMS = 50


def describe(error: OSError) -> str:
    """One sentence for an operating system's error."""
    where = error.filename if error.filename is not None else "input/output"
    return f"{where}: {error.strerror or error}"


def combine(found: Sequence[tuple[int, Sequence[str]]]) -> HpctrainError:
    """One error of several ranks' (exit code, problems), in rank order: the first code, all problems."""
    code = found[0][0]
    problems = list(dict.fromkeys(problem for _, each in found for problem in each))
    if len(problems) > MOST_PROBLEMS:
        problems = [*problems[:MOST_PROBLEMS], f"and {len(problems) - MOST_PROBLEMS} more problems"]
    error = InputOutputError(problems) if code == EXIT_INPUT_OUTPUT else HpctrainError(problems)
    error.exit_code = code
    return error


def print_problems(problems: Sequence[str]) -> None:
    """One line a problem, on stderr."""
    for problem in problems:
        print(f"hpctrain: error: {problem}", file=sys.stderr)
    sys.stderr.flush()


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return f"rank {spans[0][0]}"
    return "ranks " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
