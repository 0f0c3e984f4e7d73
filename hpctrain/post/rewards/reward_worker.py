"""Program of the child processes that score completions for a rank (`worker_processes.py`).

The first request is {"pattern": ..., "key": ...} or {"target": ...}. Its answer is {}, or {"problem": ...} if
this reward cannot be used. Each further request has keyword arguments of the reward function. Its answer is
{"scores": [...]}, or {"problem": ..., "index": ...} with a sentence that begins with the reward's title.
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
from hpctrain.post.rewards.reward_interface import accepted_answers, is_exact_match
from hpctrain.text import counted, either, kind_of

MAX_SCORE = 1e30
"""Largest magnitude of a score, so that sums of scores stay finite in single precision."""

RESERVED_ARGUMENTS = ("prompts", "completions", "tokens")
"""Keyword arguments of a reward function that are not fields of rows."""

_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[2])

Columns = Mapping[str, list[Any]]
"""Keyword arguments of a reward function: lists with a value for each sample."""

Scorer = Callable[[Columns], Any]
"""Returns the scores of samples."""


@dataclass
class _ScoreError(Exception):
    """A problem with the scores of a request.

    Attributes:
        problem: What is wrong. Continues a sentence that begins with the title of the reward.
        index: Index of the sample that is the cause; None if it is unknown.
    """

    problem: str
    index: int | None = None


def serve(number: int, parent: int) -> None:
    """Answer requests until the rank closes the socket.

    Args:
        number: File descriptor of the socket.
        parent: Process id of the rank.
    """
    answer_requests(number, parent, _start_answering, runs_user_code=True)


def _start_answering(work: Mapping[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """Return the function that answers further requests, and the answer to the first request."""
    scorer: Scorer = len
    problem = {}
    try:
        if "pattern" in work:
            scorer = _pattern_scorer(work["pattern"], work["key"])
        else:
            scorer = _function_scorer(import_function(NamedCode(work["target"])), work["target"])
    except HpctrainError as error:
        sentence, *frames = error.problems
        last = f" ({frames[-1].strip()})" if frames else ""
        problem = {"problem": sentence + last}
    except BaseException as error:  # noqa: BLE001 - whatever a user's file does when it is loaded
        problem = {"problem": f"{work['target']} fails to load: {_describe_exception(error, '')}"}
    return lambda columns: _answer(scorer, columns), problem


def _answer(scorer: Scorer, columns: Columns) -> dict[str, Any]:
    try:
        return {"scores": scorer(columns)}
    except _ScoreError as error:
        return {"problem": error.problem, "index": error.index}


def _pattern_scorer(pattern: str, key: str) -> Scorer:
    """Return the scorer of `RegularExpression`."""
    compiled = re.compile(pattern)

    def score(completion: str, answer: Any) -> float:
        match = compiled.search(completion)
        if match is None or not compiled.groups or answer is None:
            return float(match is not None)
        return float(match[1] is not None and is_exact_match(match[1], accepted_answers({key: answer}, key)))

    def score_all(columns: Columns) -> list[float]:
        completions = columns["completions"]
        return [*map(score, completions, columns.get(key, [None] * len(completions)))]

    return score_all


def _function_scorer(function: Callable[..., Any], target: str) -> Scorer:
    """Return a scorer that calls a user's function.

    Args:
        function: The function. It gets those keyword arguments that its signature has.
        target: Name of the function, for messages.

    Raises:
        HpctrainError: The function has no parameter `completions`.
    """
    short = target.rpartition("/")[2]
    parameters: Mapping[str, inspect.Parameter] = {}
    try:
        parameters = inspect.signature(function).parameters
        takes_any = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    except (TypeError, ValueError):  # some functions in C have no signature
        takes_any = True
    by_name = {name for name, each in parameters.items() if each.kind in _BY_NAME}
    if "completions" not in by_name and not takes_any:
        names = ", ".join(parameters) or "no arguments"
        raise HpctrainError(
            f"{short} has no argument completions, but {names}: it is called as function(prompts=[...], "
            "completions=[...], **others)"
        )
    required = [name for name in parameters if name in by_name and _has_no_default(parameters[name])]
    folder = os.path.dirname(getattr(getattr(function, "__code__", None), "co_filename", ""))  # noqa: PTH120

    def score_all(columns: Columns) -> list[float]:
        if missing := [name for name in required if name not in columns]:
            fields = [name for name in columns if name not in RESERVED_ARGUMENTS]
            raise _ScoreError(
                f"requires {either(missing)}, which no row has (rows have "
                f"{', '.join(fields) or 'only prompts'})"
            )
        count = len(columns["completions"])  # the function may change the list
        arguments = {name: column for name, column in columns.items() if takes_any or name in by_name}
        try:
            result = function(**arguments)
            if inspect.isawaitable(result):
                result = import_module("asyncio").run(_await(result))
            is_list = hasattr(result, "__iter__") and not isinstance(result, _NO_LISTS)
            values = list(result) if is_list else None
        except BaseException as error:
            raise _ScoreError(f"fails: {_describe_exception(error, folder)}") from error
        return _floats(result, values, count, folder)

    return score_all


def _has_no_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


_BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_NO_LISTS = str, bytes, Mapping, Set


async def _await(result: Awaitable[Any]) -> Any:
    return await result


def _floats(result: Any, values: Sequence[Any] | None, count: int, folder: str) -> list[float]:
    """Return the values of a function as floats.

    Args:
        result: What the function returned, for messages.
        values: Its values; None if it is not a list of values.
        count: Expected number of values.
        folder: Folder of the function's file, for messages.

    Raises:
        _ScoreError: They are not `count` finite numbers.
    """
    expected = "a list with a number for each completion"
    if values is None:
        raise _ScoreError(f"returns {kind_of(result)}, not {expected}")
    if len(values) != count:
        raise _ScoreError(f"returns {counted(len(values), 'value')} for {counted(count, 'completion')}")
    numbers = []
    for index, value in enumerate(values):
        if not hasattr(type(value), "__float__"):
            hint = " (return 0.0 if there is no score)" if value is None else ""
            text = f": {json.dumps(clipped(value))}" if isinstance(value, str) else ""
            raise _ScoreError(f"returns {kind_of(value)}{text}, which is not a number{hint}", index)
        try:
            number = float(value)
        except BaseException as error:
            raise _ScoreError(
                f"returns a value that is not a number: {_describe_exception(error, folder)}", index
            ) from error
        if not math.isfinite(number):
            raise _ScoreError(f"returns {'NaN' if math.isnan(number) else f'{number:+}'}", index)
        if abs(number) > MAX_SCORE:
            raise _ScoreError(f"returns {number:g}, whose magnitude exceeds {MAX_SCORE:g}", index)
        numbers.append(number)
    return numbers


def _describe_exception(error: BaseException, folder: str) -> str:
    """Return the type and message of an exception, and the line where a user's code raised it.

    It is the innermost line in a file of the folder, or else the innermost one outside of hpctrain.
    """
    text = "".join(traceback.format_exception_only(type(error), error)[-1:])
    text = " ".join(text.split()).removeprefix(f"{type(error).__module__}.")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PACKAGE_FOLDER, "<frozen"))
    ]
    frames = [frame for frame in frames if folder and frame.filename.startswith(folder)] or frames
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return clipped(text) + place
