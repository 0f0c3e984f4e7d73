"""Rendering of chat templates in a child process, which `data/template_worker.py` is."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpctrain.comm.child_process import ChildProcess, NoAnswerError, next_answer
from hpctrain.data import template_limits
from hpctrain.errors import HpctrainError
from hpctrain.units import format_seconds

Range = tuple[int, int]
Rendering = tuple[str, list[Range]]
"""A text, and the ranges of it that the template marks as generated."""

_SECONDS_TO_START = 300.0


class TemplateLimitError(HpctrainError):
    """A template took more time than it may, or ended its process: no other conversation is tried."""


class RenderRequest(NamedTuple):
    """A conversation to render: its messages, its tools, and its cuts.

    A cut is a number of messages, from the first on, and whether the text goes up to where an assistant
    begins to write.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Any
    cuts: Sequence[tuple[int, bool]]


class TemplateProcess:
    """A child process that renders one template, from the first request until it is closed or collected.

    Args:
        title: Name of the template in messages.
        work: The template's text, its time and its tokens.
    """

    def __init__(self, title: str, work: Mapping[str, Any]) -> None:
        self.title, self.work = title, work
        self._child: ChildProcess | None = None

    def start(self) -> ChildProcess:
        """Start the process, unless it runs.

        Raises:
            HpctrainError: If the text is no template.
        """
        if self._child is None:
            child = self._child = ChildProcess("hpctrain.data.template_worker", guarded=False)
            weakref.finalize(self, child.close)
            limits = {
                "processor_seconds": template_limits.PROCESSOR_SECONDS,
                "memory_bytes": template_limits.MEMORY_BYTES,
            }
            child.ask({**self.work, **limits}, _SECONDS_TO_START)
            answer = self._answer("parse it")
            if "problem" in answer:
                self.close()
                raise HpctrainError(self._sentence(answer["problem"]))
        return self._child

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def render(self, requests: Sequence[RenderRequest]) -> list[list[Rendering] | HpctrainError]:
        """Render each conversation, or say what is wrong with it.

        A conversation that ends the process is found by rendering each one alone. It gets a
        TemplateLimitError, and so do those behind it.

        Raises:
            HpctrainError: If the text is no template.
        """
        if not requests:
            return []
        self.start().ask([each._asdict() for each in requests], template_limits.WALL_SECONDS)
        try:
            answers = self._answer("render one conversation")
        except TemplateLimitError as error:
            return [error] if len(requests) == 1 else self._render_in_turn(requests)
        return [self._outcome(each) for each in answers]

    def _render_in_turn(self, requests: Sequence[RenderRequest]) -> list[list[Rendering] | HpctrainError]:
        outcomes: list[list[Rendering] | HpctrainError] = []
        for each in requests:
            outcomes += self.render([each])
            if isinstance(outcomes[-1], TemplateLimitError):
                return outcomes + outcomes[-1:] * (len(requests) - len(outcomes))
        return outcomes

    def _answer(self, work: str) -> Any:
        """Return the answer to the present request; `work` says what is done, after "to"."""
        assert self._child is not None, "started by who asks"
        try:
            _, answer = next_answer([self._child])
        except NoAnswerError as error:
            self.close()
            problem = f"{error.problem}, while it is asked to {work}"
            if error.signal == signal.SIGPROF:
                limit = format_seconds(template_limits.PROCESSOR_SECONDS)
                problem = f"takes more than {limit} of processor time to {work}"
            raise TemplateLimitError(f"{self.title}: {problem}") from None
        return answer

    def _outcome(self, answer: Mapping[str, Any]) -> list[Rendering] | HpctrainError:
        if "problem" in answer:
            return HpctrainError(self._sentence(answer["problem"]))
        return [(text, [(start, end) for start, end in ranges]) for text, ranges in answer["cuts"]]

    def _sentence(self, problem: str) -> str:
        return f"{self.title}{problem}"
