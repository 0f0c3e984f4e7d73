"""A process that renders chat templates, within limits of time and memory, for a rank, with which it ends.

Templates come with models of other people. jinja2's sandbox keeps them away from Python; that one neither
computes without end nor takes all memory is a matter of this process's limits, whatever it calls. What
transformers gives to a template is in its `utils/chat_template_utils.py`.

The first request is the template; its answer is empty, or has a problem. A further request is a list of
conversations, and its answer a list, too: for each cut of a conversation a text with its generated ranges,
or one problem for the whole conversation.
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

from hpctrain.comm import child_service
from hpctrain.data.template_limits import MOST_CHARACTERS
from hpctrain.units import format_bytes

_Result = TypeVar("_Result")

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's thoughts have; templates read the first one, some the second."""


def serve(number: int, parent: int) -> None:
    """Render until nobody asks any more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child_service.serve(number, parent, _begin, guarded=False)


class RefusedError(Exception):
    """A template, or a conversation that it does not take; in words that follow the template's title."""


def _begin(work: Mapping[str, Any]) -> tuple[child_service.Answer, dict[str, str]]:
    """Parse the template under the limits that hold from here on."""
    limits = Limits(work["processor_seconds"], work["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    try:
        template = limits.within(lambda: SandboxedTemplate(work["text"], work["now"], work["tokens"]))
    except RefusedError as error:
        return (lambda _: []), {"problem": str(error)}

    def render(request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"cuts": limits.within(lambda: template.cuts(request))}
        except RefusedError as error:
            return {"problem": str(error)}

    return (lambda requests: [render(each) for each in requests]), {}


class Limits(NamedTuple):
    """Processor seconds for one piece of work, and the address space of this process."""

    processor_seconds: float
    memory_bytes: int

    def within(self, work: Callable[[], _Result]) -> _Result:
        """Do work; SIGPROF ends this process where the work takes too long.

        Raises:
            RefusedError: If there is not enough memory.
        """
        signal.setitimer(signal.ITIMER_PROF, self.processor_seconds)
        try:
            return work()
        except MemoryError:
            size = format_bytes(self.memory_bytes, binary=True)
            raise RefusedError(f": takes more than {size} of memory") from None
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)


class SandboxedTemplate:
    """A parsed template, as transformers sets it up."""

    def __init__(self, text: str, now: str, tokens: Mapping[str, str]) -> None:
        """Parse the text.

        Args:
            text: The template.
            now: Time that it is given, in ISO 8601; "" for the present time.
            tokens: Names that the template may use, such as eos_token.

        Raises:
            RefusedError: If it is no template.
        """
        self.tokens = tokens
        self.environment = environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        time = datetime.fromisoformat(now) if now else datetime.now()
        environment.globals.update(
            raise_exception=_raise, strftime_now=time.strftime, dict=_DictMaker(), namespace=_PlainNamespace
        )
        del environment.globals["lipsum"]
        environment.filters["tojson"] = _to_json
        self.tag: GenerationTag = environment.extensions[GenerationTag.identifier]  # type: ignore[assignment]
        try:
            self.template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise RefusedError(f", line {error.lineno}: is no Jinja template ({error})") from None
        except RecursionError:
            raise RefusedError(": is no Jinja template (nested too deeply)") from None

    def cuts(self, request: Mapping[str, Any]) -> list[tuple[str, list[tuple[int, int]]]]:
        """Render the first messages of a conversation, for each number of messages that is request for.

        Raises:
            RefusedError: If the template does not take the conversation, or fails.
        """
        messages = [_with_thoughts(each) for each in request["messages"]]
        given = {"tools": request["tools"], "documents": None, **self.tokens}
        return [
            self.render({**given, "messages": messages[:count], "add_generation_prompt": prompt})
            for count, prompt in request["cuts"]
        ]

    def render(self, variables: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the ranges of it that lie in `{% generation %}` blocks."""
        blocks, marked = list[str](), list[tuple[int, str]]()
        self.tag.blocks, self.tag.marked = blocks, marked
        try:
            for block in self.template.generate(**variables):
                blocks.append(block)
            text = "".join(blocks)
        except RecursionError:
            raise RefusedError(": calls itself without end") from None
        except MemoryError:
            raise
        except TemplateError as error:
            raise RefusedError(f": {' '.join(str(error).split())}") from None
        except Exception as error:  # noqa: BLE001 - whatever code of others does with what it is given
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise RefusedError(f": fails with {said}") from None
        if len(text) > MOST_CHARACTERS:
            raise RefusedError(f": makes more than {MOST_CHARACTERS} characters of one conversation")
        for start, part in marked:
            if not text.startswith(part, start):
                raise RefusedError(
                    ": has a {% generation %} block in what it writes later, as a macro or a variable is: "
                    "nobody knows where that will be"
                )
        return text, [(start, start + len(part)) for start, part in marked]


class GenerationTag(Extension):
    """The tag `generation`, which marks what an assistant says.

    `blocks` are the parts of the text so far, `marked` the text of each tag, with the place where it starts.
    """

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it
    blocks: list[str]
    marked: list[tuple[int, str]]

    def parse(self, parser: Parser) -> CallBlock:
        """Parse the block up to its end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = CallBlock(self.call_method("_remember"), [], [], body)
        block.set_lineno(line)
        return block

    @pass_eval_context
    def _remember(self, context: EvalContext, caller: Macro) -> str:  # noqa: ARG002 - as jinja2 calls it
        text: str = caller()
        self.marked.append((sum(map(len, self.blocks)), text))
        return text


def _with_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under each name that templates use."""
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    if thoughts is None:
        return dict(message)
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


class _DictMaker:
    """The type dict as templates may use it: to make one, and `fromkeys`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    @staticmethod
    def fromkeys(*args: Any) -> dict[Any, Any]:
        """Make a dict as `dict.fromkeys` does."""
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore, by which a template gets at Python."""

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
