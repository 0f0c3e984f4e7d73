"""jinja2's sandbox as transformers sets it up for chat templates, which also stops one that loops long.

What transformers does is in its `utils/chat_template_utils.py`; here a template moreover counts steps,
of loops and of calls, since those who publish one are not those who run it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from hpctrain.errors import HpctrainError

MOST_STEPS = 1_000_000
"""Of loops and calls of one text: a conversation of 1000 messages takes some 10,000."""
LETTERS_A_STEP = 256
"""Of what an operator, a filter or a call makes, each so many characters or items count as a step, too."""
MOST_LETTERS, MOST_BITS, MOST_WIDTH = 1 << 24, 1 << 16, 1 << 16
"""Of what one of them makes: characters or items, bits of a whole number; and numbers that widths are."""
_COUNTED, _BOUNDED = "hpctrain_counted", "hpctrain_bounded"


class Sandbox:
    """A template, parsed, and what renders it. HpctrainError, beginning with `title`, where it is none.

    `now` is what it takes for the time (None: the time when it was parsed).
    """

    def __init__(self, text: str, title: str, now: datetime | None = None) -> None:
        self.title = title
        self.environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generated, loopcontrols]
        )
        own: dict[str, Any] = {
            "raise_exception": _raise,
            "strftime_now": (now or datetime.now()).strftime,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self.environment.globals.update(own)
        del self.environment.globals["lipsum"]
        environment = self.environment
        filters = {**environment.filters, "tojson": _to_json}
        environment.filters.update({name: environment.bounded(each) for name, each in filters.items()})
        environment.filters |= {_COUNTED: environment.counted, _BOUNDED: environment.made}
        try:
            self.template = self.environment.from_string(text)
        except TemplateSyntaxError as error:
            raise HpctrainError(f"{title}, line {error.lineno}: is no Jinja template ({error})") from None
        except RecursionError:
            raise HpctrainError(f"{title}: is no Jinja template (nested too deeply)") from None

    def render(self, variables: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the ranges of it that lie in `{% generation %}` blocks. HpctrainError, which does not
        say where, with what goes wrong.
        """
        environment = self.environment
        environment.steps, environment.blocks, environment.said = 0, [], []
        try:
            for block in self.template.generate(**variables):
                environment.blocks.append(environment.made(block))
        except HpctrainError:
            raise
        except RecursionError:
            raise HpctrainError(f"{self.title}: calls itself without end") from None
        except MemoryError:
            raise HpctrainError(f"{self.title}: makes more text than there is memory for") from None
        except TemplateError as error:
            raise HpctrainError(f"{self.title}: {' '.join(str(error).split())}") from None
        except Exception as error:  # noqa: BLE001 - whatever code of others does with what it is given
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise HpctrainError(f"{self.title}: fails with {said}") from None
        text, ranges = "".join(environment.blocks), list[tuple[int, int]]()
        for begin, said in environment.said:
            ranges.append((begin, begin + len(said)))
            if not text.startswith(said, begin):
                raise HpctrainError(
                    f"{self.title}: has a {{% generation %}} block in what it writes later, as a macro or a "
                    "variable is: nobody knows where that will be"
                )
        return text, ranges


class _Environment(ImmutableSandboxedEnvironment):
    """One that counts steps of loops, and calls, bounds what operators make, and has what is `said` in blocks
    of `generation`, and from where on.
    """

    steps = 0
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks: list[str] = []
        self.said: list[tuple[int, str]] = []

    def step(self, count: int = 1) -> None:
        """So many more. HpctrainError where there are too many."""
        self.steps += count
        if self.steps > MOST_STEPS:
            raise HpctrainError(f"the template takes more than {MOST_STEPS} steps for one conversation")

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The same, each a step."""
        for item in items:
            self.step()
            yield item

    def made(self, value: Any) -> Any:
        """The same. HpctrainError where it is large, or all that was made by now."""
        if isinstance(value, str | list | tuple):
            if len(value) > MOST_LETTERS:
                raise _too_large()
            self.step(1 + len(value) // LETTERS_A_STEP)
        return value

    def bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose arguments are no large widths, and which makes nothing large."""
        passed = int(hasattr(function, "jinja_pass_arg"))

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.step()
            _require_small(function.__name__.removeprefix("do_"), args[passed:], kwargs)
            return self.made(function(*args, **kwargs))

        return bounded

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """A call of anything is a step; of methods of texts and lists see `bounded`."""
        self.step()
        _, called, *given = args
        called = getattr(called, "__wrapped__", called)  # jinja2 puts one of its own around format
        own = getattr(called, "__self__", None)
        if isinstance(own, str | bytes | list | tuple):
            _require_small(called.__name__, (own, *given), kwargs)
        return self.made(super().call(*args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """What an operator makes of two values. HpctrainError where that would be large."""
        letters, bits = _size(operator, left, right)
        if letters > MOST_LETTERS or bits > MOST_BITS:
            raise _too_large()
        return self.made(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        for loop in list(parsed.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, _COUNTED)
        _Concatenations().visit(parsed)
        parsed.set_environment(self)
        return parsed


class _Concatenations(NodeTransformer):
    """Has what `~` makes be bounded, which is no operator to the sandbox."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - as jinja2 calls it
        """The same through a filter."""
        self.generic_visit(node)
        return _filtered(node, _BOUNDED)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _require_small(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """HpctrainError where a filter or a method of this name, of what comes first, would make something large
    of it.
    """
    value, *given = args
    given += kwargs.values()
    widths = [abs(each) for each in given if isinstance(each, int)]
    texts = [each for each in given if isinstance(each, str)]
    longest = max(map(len, texts), default=0)
    if name in {"format", "format_map"}:
        widths += map(int, re.findall(r"\d{1,18}", str(value)))
    elif name == "replace":
        places = str(value).count(texts[0]) if texts else 0
        longest *= places
    elif name == "join":
        # Of a filter what is joined comes first, of a method what stands between.
        items = next((each for each in (value, *given) if isinstance(each, list | tuple)), ())
        between = max(longest, len(value) if isinstance(value, str) else 0)
        longest = len(items) * between + sum(len(each) for each in items if isinstance(each, str))
    elif name == "indent":
        longest = max([4, longest, *widths]) * (1 + str(value).count("\n"))
    if longest > MOST_LETTERS or max(widths, default=0) > MOST_WIDTH:
        raise _too_large()


def _size(operator: str, left: Any, right: Any) -> tuple[int, int]:
    """Of what an operator makes of two values: characters or items at the least, bits of a whole number."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return 0, left.bit_length() * max(0, right)
        return 0, left.bit_length() + right.bit_length()
    many = [each for each in (left, right) if isinstance(each, str | bytes | list | tuple)]
    if operator == "%":
        # Widths, and what `*` takes for them.
        widths = map(int, re.findall(r"\d{1,18}", left)) if isinstance(left, str) else ()
        given = right if isinstance(right, tuple) else (right,)
        stars = [each for each in given if isinstance(each, int)] if "*" in str(left) else []
        return max([0, *widths, *stars]), 0
    if operator == "*":
        times = next((each for each in (left, right) if isinstance(each, int)), 1)
        return sum(map(len, many)) * max(0, times), 0
    return sum(map(len, many)), 0


def _too_large() -> HpctrainError:
    letters, bits = f"{MOST_LETTERS} characters", f"a number of more than {MOST_BITS} bits"
    return HpctrainError(f"the template makes more than {letters}, or {bits}, at once")


class Generated(Extension):
    """The tag `generation`, which marks what an assistant says."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Parser) -> CallBlock:
        """The block up to its end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = CallBlock(self.call_method("_remember"), [], [], body)
        block.set_lineno(line)
        return block

    @pass_eval_context
    def _remember(self, context: EvalContext, caller: Macro) -> str:  # noqa: ARG002 - as jinja2 calls it
        said: str = caller()
        environment = self.environment
        assert isinstance(environment, _Environment)
        environment.said.append((sum(map(len, environment.blocks)), said))
        return said


class _Dict:
    """What templates may call to make a dict, and nothing else of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    @staticmethod
    def fromkeys(*args: Any) -> dict[Any, Any]:
        """As dict has it."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Without names that begin with an underscore, by which a template gets at Python."""

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
