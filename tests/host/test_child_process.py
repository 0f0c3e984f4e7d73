"""Answers of child processes.

How they end, and what users' code may do in them, is tested in tests/post/test_rewards.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hpctrain.host.child_process import ChildProcess, next_answer

MODULE = """
from hpctrain.host.child_process import answer_requests

def serve(number, parent):
    answer_requests(number, parent, lambda first: (lambda request: request, first), False)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildProcess]:
    """Child process that answers each request with the request."""
    (tmp_path / "echo_module.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with closing(ChildProcess("echo_module", runs_user_code=False)) as child:
        yield child


@pytest.mark.parametrize("value", [None, False, {"score": 1.5}])
def test_every_value_of_json_is_an_answer(echo: ChildProcess, value: object) -> None:
    for number in (7, 8):
        echo.ask(value, 60.0, number)
        assert next_answer([echo]) == (number, value)
        assert echo.request is None
