"""Errors that all ranks raise together, their messages, and reductions of integers over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm.error_messages import combine_errors, to_hpctrain_error
from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError

_MOST_PROBLEMS = 8
"""Largest number of problems in an error about a file. A wrong model or a broken disk has thousands."""


@contextmanager
def raise_on_all_ranks(group: Group) -> Iterator[None]:
    """Raise the errors of the block on all ranks if any rank has one. Collective at the end of the block.

    The block itself must not communicate. The error has each distinct problem of each rank.

    Args:
        group: The ranks.

    Raises:
        HpctrainError: A rank has raised one.
        InputOutputError: A rank has raised one, or an OSError.
    """
    failure: HpctrainError | None = None
    try:
        yield
    except (HpctrainError, OSError) as error:
        failure = to_hpctrain_error(error)
    local = None if failure is None else (failure.exit_code, failure.problems)
    failures = [each for each in group.all_gather_object(local) if each is not None]
    if failures:
        raise combine_errors(failures) from failure


def first_difference(problems: Sequence[str]) -> HpctrainError:
    """Return the error about the first of several differences, with the number of the others."""
    more = f" (and {len(problems) - 1} more differ)" if len(problems) > 1 else ""
    return HpctrainError(problems[0] + more)


def shorten_problems(problems: list[str]) -> list[str]:
    """Return the first problems, followed by the number of the others if there are many."""
    more = len(problems) - _MOST_PROBLEMS
    return problems if more <= 0 else [*problems[:_MOST_PROBLEMS], f"... and {more} more of this kind"]


def reduce_integers(
    group: Group, numbers: NDArray[Any], operation: Literal["sum", "max"] = "sum"
) -> NDArray[np.int64]:
    """Return the sum (modulo 2^64) or maximum of an array of 64-bit integers over the ranks. Collective."""
    tensor = group.empty(numbers.shape, torch.int64)
    tensor.copy_(torch.from_numpy(numbers.view(np.int64)))
    group.all_reduce(tensor, operation)
    result: NDArray[np.int64] = tensor.cpu().numpy().copy()
    return result
