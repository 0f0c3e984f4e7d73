"""Child process that renders chat templates for a rank, within limits of time and memory.

Templates come with models that others have published, so they are not trusted. jinja2's sandbox prevents
access to Python. The resource limits of this process prevent endless loops and excessive memory, whatever the
template calls. The variables and filters of a template are those of transformers
(`utils/chat_template_utils.py`).

The first request contains the template. Its answer is an empty object, or one with the key "problem". Each
further request is a list of `RenderRequest` objects. Its answer is a list with an object for each of them:
"prefixes" (the text and the generated ranges of each prefix) or "problem".
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context

from hpctrain.data.template_limits import MAX_CHARACTERS
from hpctrain.host.child_process import Answer, answer_requests
from hpctrain.units import format_bytes

_Result = TypeVar("_Result")

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which data files store the reasoning of a message. Templates read the first or the second."""


def serve(number: int, parent: int) -> None:
    """Answer requests of the rank until it closes the socket; see `answer_requests`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer_requests(number, parent, _prepare, runs_user_code=False)


class TemplateProblemError(Exception):
    """A template is invalid or fails for a conversation.

    The message continues a sentence that begins with the title of the template.
    """


def _prepare(work: Mapping[str, Any]) -> tuple[Answer, dict[str, str]]:
    """Set the limits, parse the template, and return the function that renders requests, with an answer."""
    limits = Limits(work["processor_seconds"], work["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    try:
        template = limits.run(lambda: SandboxedTemplate(work["text"], work["now"], work["tokens"]))
    except TemplateProblemError as error:
        return (lambda _: []), {"problem": str(error)}

    def render(request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"prefixes": limits.run(lambda: template.render_prefixes(request))}
        except TemplateProblemError as error:
            return {"problem": str(error)}

    return (lambda requests: [render(each) for each in requests]), {}


class Limits(NamedTuple):
    """Resource limits.

    Attributes:
        processor_seconds: Processor time of one call of `run`, in seconds.
        memory_bytes: Address space of this process, in bytes.
    """

    processor_seconds: float
    memory_bytes: int

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Call `work` and return its result. SIGPROF ends this process if it exceeds the processor time.

        Raises:
            TemplateProblemError: The work needs more memory than the limit.
        """
        signal.setitimer(signal.ITIMER_PROF, self.processor_seconds)
        try:
            return work()
        except MemoryError:
            size = format_bytes(self.memory_bytes, binary=True)
            raise TemplateProblemError(f": takes more than {size} of memory") from None
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)


class SandboxedTemplate:
    """A parsed template in a sandboxed jinja2 environment that is configured as in transformers."""

    def __init__(self, text: str, now: str, tokens: Mapping[str, str]) -> None:
        """Parse the text.

        Args:
            text: The template.
            now: Time that `strftime_now` formats, in ISO 8601; "" for the current time.
            tokens: Special tokens by the variable that holds them, such as eos_token.

        Raises:
            TemplateProblemError: The text is not a valid template.
        """
        self.tokens = tokens
        self.environment = environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        time = datetime.fromisoformat(now) if now else datetime.now()
        environment.globals.update(
            raise_exception=_raise, strftime_now=time.strftime, dict=_DictFactory(), namespace=_PlainNamespace
        )
        del environment.globals["lipsum"]
        environment.filters["tojson"] = _to_json
        self.tag: GenerationTag = environment.extensions[GenerationTag.identifier]  # type: ignore[assignment]
        try:
            self.template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise TemplateProblemError(
                f", line {error.lineno}: is not a valid Jinja template ({error})"
            ) from None
        except RecursionError:
            raise TemplateProblemError(": is not a valid Jinja template (nested too deeply)") from None
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - jinja2 evaluates constants, and Python compiles the result
            raise TemplateProblemError(f": is not a valid Jinja template ({_describe(error)})") from None

    def render_prefixes(self, request: Mapping[str, Any]) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return the text and the generated ranges of each prefix of a request (see `RenderRequest`).

        Raises:
            TemplateProblemError: The template rejects the conversation, or fails.
        """
        messages = [_with_reasoning(each) for each in request["messages"]]
        variables = {"tools": request["tools"], "documents": None, **self.tokens}
        return [
            self.render({**variables, "messages": messages[:count], "add_generation_prompt": prompt})
            for count, prompt in request["prefixes"]
        ]

    def render(self, variables: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text and its ranges in `{% generation %}` blocks.

        Raises:
            TemplateProblemError: The template rejects the variables, fails, or renders too long a text.
        """
        rendered_parts, generated_blocks = list[str](), list[tuple[int, str]]()
        self.tag.rendered_parts, self.tag.generated_blocks = rendered_parts, generated_blocks
        try:
            for block in self.template.generate(**variables):
                rendered_parts.append(block)
            text = "".join(rendered_parts)
        except RecursionError:
            raise TemplateProblemError(": recurses too deeply") from None
        except MemoryError:
            raise
        except TemplateError as error:
            raise TemplateProblemError(f": {' '.join(str(error).split())}") from None
        except Exception as error:  # noqa: BLE001 - a template may raise any exception
            raise TemplateProblemError(f": fails with {_describe(error)}") from None
        if len(text) > MAX_CHARACTERS:
            raise TemplateProblemError(
                f": renders more than {MAX_CHARACTERS} characters for one conversation"
            )
        for start, part in generated_blocks:
            if not text.startswith(part, start):
                raise TemplateProblemError(
                    ": has a {% generation %} block inside a macro or a {% set %} block, so its position in "
                    "the text is unknown; use the block only in text that is written directly"
                )
        return text, [(start, start + len(part)) for start, part in generated_blocks]


def _describe(error: Exception) -> str:
    """Return the type and the message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class GenerationTag(Extension):
    """The tag `generation`, which marks text of the assistant.

    Attributes:
        rendered_parts: Parts of the text that have been rendered so far.
        generated_blocks: First character and text of each block of the tag.
    """

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it
    rendered_parts: list[str]
    generated_blocks: list[tuple[int, str]]

    def parse(self, parser: Parser) -> CallBlock:
        """Parse the block up to `{% endgeneration %}`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = CallBlock(self.call_method("_record_block"), [], [], body)
        block.set_lineno(line)
        return block

    @pass_eval_context
    def _record_block(self, context: EvalContext, caller: Macro) -> str:  # noqa: ARG002 - as jinja2 calls it
        text: str = caller()
        self.generated_blocks.append((sum(map(len, self.rendered_parts)), text))
        return text


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under each key that templates read."""
    reasoning = next((message[name] for name in _REASONING_KEYS if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _DictFactory:
    """Replacement of the type `dict` in templates. It offers only the call and `fromkeys`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    @staticmethod
    def fromkeys(*args: Any) -> dict[Any, Any]:
        """Return a dict as `dict.fromkeys` does."""
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """Namespace that rejects names beginning with an underscore, which could give access to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _require_plain(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain(name)
        super().__setitem__(name, value)


def _require_plain(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace: {name!r} begins with an underscore")


def _raise(message: Any) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
