"""A process that judges completions for a rank, with which it ends. It is no rank.

The first request says what to judge by, and its answer whether that is possible; further requests have texts
of samples, and their answers scores, or a problem, in words that go on from the reward's title.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hpctrain.deck.code import NamedCode
from hpctrain.deck.sources import clipped
from hpctrain.deck.user_code import import_function
from hpctrain.errors import HpctrainError
from hpctrain.host.child_process import Answer, answer_requests
from hpctrain.post.rewards.reward_interface import answers_of, is_exact_match
from hpctrain.text import counted, either, kind_of

LARGEST = 1e30
"""Of a score: squares of what is larger are no number in single precision."""

GIVEN = ("prompts", "completions", "tokens")
"""What a function is given by name, besides what rows have."""

_OURS = str(Path(__file__).resolve().parents[2])

Columns = Mapping[str, list[Any]]
Judge = Callable[[Columns], Any]


@dataclass
class _UnfitError(Exception):
    """Scores will not do: why, and of which sample of those that were asked about, where it is known."""

    problem: str
    index: int | None = None


def serve(number: int, parent: int) -> None:
    """Judge until nobody asks any more."""
    answer_requests(number, parent, _ready, runs_user_code=True)


def _ready(work: Mapping[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """Return the function that answers for the work, and what is wrong with it, if anything is."""
    judge: Judge = len
    problem = {}
    try:
        if "pattern" in work:
            judge = _by_pattern(work["pattern"], work["key"])
        else:
            judge = _by_function(import_function(NamedCode(work["target"])), work["target"])
    except HpctrainError as error:
        sentence, *frames = error.problems
        last = f" ({frames[-1].strip()})" if frames else ""
        problem = {"problem": sentence + last}
    except BaseException as error:  # noqa: BLE001 - whatever a user's file does when it is loaded
        problem = {"problem": f"{work['target']} fails to load: {_what(error, '')}"}
    return lambda columns: _judged(judge, columns), problem


def _judged(judge: Judge, columns: Columns) -> dict[str, Any]:
    """The scores of samples, or what is wrong."""
    try:
        return {"scores": judge(columns)}
    except _UnfitError as error:
        return {"problem": error.problem, "index": error.index}


def _by_pattern(pattern: str, key: str) -> Judge:
    """1 where the pattern is found in a completion, and its first group, if it has one, is the row's answer,
    if that has one; else 0.
    """
    compiled = re.compile(pattern)

    def score(completion: str, answer: Any) -> float:
        found = compiled.search(completion)
        if found is None or not compiled.groups or answer is None:
            return float(found is not None)
        return float(found[1] is not None and is_exact_match(found[1], answers_of({key: answer}, key)))

    def judge(columns: Columns) -> list[float]:
        completions = columns["completions"]
        return [*map(score, completions, columns.get(key, [None] * len(completions)))]

    return judge


def _by_function(function: Callable[..., Any], target: str) -> Judge:
    """What a user's function gives, as floats. HpctrainError where it is none to judge completions."""
    short = target.rpartition("/")[2]
    taken: Mapping[str, inspect.Parameter] = {}
    try:
        taken = inspect.signature(function).parameters
        takes_any = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in taken.values())
    except (TypeError, ValueError):  # nobody knows what it takes
        takes_any = True
    by_name = {name for name, each in taken.items() if each.kind in _BY_NAME}
    if "completions" not in by_name and not takes_any:
        names = ", ".join(taken) or "no arguments"
        raise HpctrainError(
            f"{short} has no argument completions, but {names}: it is called as function(prompts=[...], "
            "completions=[...], **others)"
        )
    wanted = [name for name in by_name if taken[name].default is inspect.Parameter.empty]
    folder = os.path.dirname(getattr(getattr(function, "__code__", None), "co_filename", ""))  # noqa: PTH120

    def judge(columns: Columns) -> list[float]:
        if absent := [name for name in taken if name in wanted and name not in columns]:
            others = [name for name in columns if name not in GIVEN]
            raise _UnfitError(
                f"requires {either(absent)}, which no row has (rows have "
                f"{', '.join(others) or 'only prompts'})"
            )
        count = len(columns["completions"])  # a function may take them out of their list
        given = {name: column for name, column in columns.items() if takes_any or name in by_name}
        try:
            made = function(**given)
            if inspect.isawaitable(made):
                made = import_module("asyncio").run(_awaited(made))
            values = None if isinstance(made, _NO_LISTS) or not hasattr(made, "__iter__") else list(made)
        except BaseException as error:
            raise _UnfitError(f"fails: {_what(error, folder)}") from error
        return _floats(made, values, count, folder)

    return judge


_BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_NO_LISTS = str, bytes, Mapping, Set


async def _awaited(made: Awaitable[Any]) -> Any:
    return await made


def _floats(made: Any, values: Sequence[Any] | None, count: int, folder: str) -> list[float]:
    """The values as finite numbers, `count` of them."""
    wanted = "a list with a number for each completion"
    if values is None:
        raise _UnfitError(f"returns {kind_of(made)}, not {wanted}")
    if len(values) != count:
        raise _UnfitError(f"returns {counted(len(values), 'value')} for {counted(count, 'completion')}")
    found = []
    for index, value in enumerate(values):
        if not hasattr(type(value), "__float__"):
            hint = " (return 0.0 if there is no score)" if value is None else ""
            shown = f": {json.dumps(clipped(value))}" if isinstance(value, str) else ""
            raise _UnfitError(f"returns {kind_of(value)}{shown}, which is not a number{hint}", index)
        try:
            number = float(value)
        except BaseException as error:
            raise _UnfitError(
                f"returns a value that is not a number: {_what(error, folder)}", index
            ) from error
        if not math.isfinite(number):
            raise _UnfitError(f"returns {'NaN' if math.isnan(number) else f'{number:+}'}", index)
        if abs(number) > LARGEST:
            raise _UnfitError(f"returns {number:g}, whose magnitude exceeds {LARGEST:g}", index)
        found.append(number)
    return found


def _what(error: BaseException, folder: str) -> str:
    """What was raised, and in which line: the last of those in the folder, or else of those not of ours."""
    said = "".join(traceback.format_exception_only(type(error), error)[-1:])
    said = " ".join(said.split()).removeprefix(f"{type(error).__module__}.")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<frozen"))
    ]
    own = [frame for frame in frames if folder and frame.filename.startswith(folder)] or frames
    return f"{clipped(said)} ({own[-1].filename}, line {own[-1].lineno})" if own else clipped(said)
