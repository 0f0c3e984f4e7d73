"""Ranks agree on what went wrong before anyone acts, and add up what they counted."""

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

# Problems told of one file; a wrong model or a dead disk would give thousands.
_MOST_PROBLEMS = 8


@contextmanager
def raise_on_all_ranks(group: Group) -> Iterator[None]:
    """Inside it each rank works alone, without communication; on leaving, all ranks raise, or none does.

    An OSError counts as an InputOutputError. Every distinct problem of every rank is told.
    """
    failure: HpctrainError | None = None
    try:
        yield
    except (HpctrainError, OSError) as error:
        failure = to_hpctrain_error(error)
    mine = None if failure is None else (failure.exit_code, failure.problems)
    failures = [each for each in group.all_gather_object(mine) if each is not None]
    if failures:
        raise combine_errors(failures) from failure


def first_difference(problems: Sequence[str]) -> HpctrainError:
    """The error about the first of several differences, and how many more there are."""
    more = f" (and {len(problems) - 1} more differ)" if len(problems) > 1 else ""
    return HpctrainError(problems[0] + more)


def shorten_problems(problems: list[str]) -> list[str]:
    """The first problems, and how many more there are."""
    more = len(problems) - _MOST_PROBLEMS
    return problems if more <= 0 else [*problems[:_MOST_PROBLEMS], f"... and {more} more of this kind"]


def reduce_integers(
    group: Group, numbers: NDArray[Any], operation: Literal["sum", "max"] = "sum"
) -> NDArray[np.int64]:
    """The sum (modulo 2^64) or maximum over the ranks of an array of 64-bit integers."""
    tensor = group.empty(numbers.shape, torch.int64)
    tensor.copy_(torch.from_numpy(numbers.view(np.int64)))
    group.all_reduce(tensor, operation)
    result: NDArray[np.int64] = tensor.cpu().numpy().copy()
    return result
