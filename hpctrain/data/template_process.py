"""Interface of a rank to the child process that renders a chat template (`data/template_worker.py`)."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpctrain.data import template_limits
from hpctrain.errors import HpctrainError
from hpctrain.host.child_process import ChildProcess, NoAnswerError, next_answer
from hpctrain.units import format_seconds

Range = tuple[int, int]
"""Start and end of a range of characters; the end is exclusive."""

Rendering = tuple[str, list[Range]]
"""Rendered text, and its ranges in `{% generation %}` blocks."""

_SECONDS_TO_START = 300.0


class TemplateLimitError(HpctrainError):
    """A template exceeded its time limit or ended its process. No further conversation is rendered."""


class RenderRequest(NamedTuple):
    """Request to render one or more prefixes of a conversation.

    Attributes:
        messages: Messages of the conversation.
        tools: Tools that the template describes to the model, or None.
        prefixes: Prefixes to render. Each is a number of messages and a bool, the template's
            `add_generation_prompt`: True if the text is to end where an assistant begins to write.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Any
    prefixes: Sequence[tuple[int, bool]]


class TemplateProcess:
    """Child process that renders one template. It starts with the first request and ends with `close`.

    Args:
        title: Name of the template in error messages.
        work: The keys "text" (the template), "now" (time in ISO 8601) and "tokens" (special tokens by role).
    """

    def __init__(self, title: str, work: Mapping[str, Any]) -> None:
        self.title, self.work = title, work
        self._child: ChildProcess | None = None

    def start(self) -> ChildProcess:
        """Start the process if it does not run, and let it parse the template.

        Raises:
            HpctrainError: The text is not a valid template.
        """
        if self._child is None:
            child = self._child = ChildProcess("hpctrain.data.template_worker", runs_user_code=False)
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
        """Render conversations; return the renderings of each one's prefixes, or its error.

        If a conversation makes the template exceed its limits, all conversations are rendered again, one at
        a time. That conversation and those after it then get a `TemplateLimitError`.

        Raises:
            HpctrainError: The text is not a valid template.
        """
        if not requests:
            return []
        self.start().ask([each._asdict() for each in requests], template_limits.WALL_SECONDS)
        try:
            answers = self._answer("render one conversation")
        except TemplateLimitError as error:
            return [error] if len(requests) == 1 else self._render_one_by_one(requests)
        return [self._outcome(each) for each in answers]

    def _render_one_by_one(self, requests: Sequence[RenderRequest]) -> list[list[Rendering] | HpctrainError]:
        outcomes: list[list[Rendering] | HpctrainError] = []
        for each in requests:
            outcomes += self.render([each])
            if isinstance(outcomes[-1], TemplateLimitError):
                return outcomes + outcomes[-1:] * (len(requests) - len(outcomes))
        return outcomes

    def _answer(self, work: str) -> Any:
        """Return the answer to the current request.

        Args:
            work: What the process was asked to do, as an infinitive without "to", for messages.
        """
        assert self._child is not None, "start() was not called"
        try:
            _, answer = next_answer([self._child])
        except NoAnswerError as error:
            self.close()
            problem = f"{error.problem} when asked to {work}"
            if error.signal == signal.SIGPROF:
                limit = format_seconds(template_limits.PROCESSOR_SECONDS)
                problem = f"takes more than {limit} of processor time to {work}"
            raise TemplateLimitError(f"{self.title}: {problem}") from None
        return answer

    def _outcome(self, answer: Mapping[str, Any]) -> list[Rendering] | HpctrainError:
        if "problem" in answer:
            return HpctrainError(self._sentence(answer["problem"]))
        return [(text, [(start, end) for start, end in ranges]) for text, ranges in answer["prefixes"]]

    def _sentence(self, problem: str) -> str:
        return f"{self.title}{problem}"
