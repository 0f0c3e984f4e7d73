"""jinja2's sandbox as transformers sets it up for chat templates, which also stops one that loops long.

What transformers does is in its `utils/chat_template_utils.py`; here a template moreover counts steps,
of loops and of calls, since those who publish one are not those who run it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hpctrain.errors import HpctrainError

MOST_STEPS = 1_000_000
"""Of loops and calls of one text: a conversation of 1000 messages takes some 10,000."""
_COUNTED = "hpctrain_counted"


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
        self.environment.filters.update({"tojson": _to_json, _COUNTED: self.environment.counted})
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
        environment.steps, environment.blocks, environment.generated = 0, [], []
        try:
            for block in self.template.generate(**variables):
                environment.blocks.append(block)
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
        return "".join(environment.blocks), environment.generated


class _Environment(ImmutableSandboxedEnvironment):
    """One that counts steps of loops, and calls, and has the ranges that are generated."""

    steps = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks: list[str] = []
        self.generated: list[tuple[int, int]] = []

    def step(self) -> None:
        """One more. HpctrainError where there are too many."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise HpctrainError(f"the template takes more than {MOST_STEPS} steps for one conversation")

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The same, each a step."""
        for item in items:
            self.step()
            yield item

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """A call of anything is a step."""
        self.step()
        return super().call(*args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        for loop in list(parsed.find_all(nodes.For)):
            if not loop.recursive:
                loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        parsed.set_environment(self)
        return parsed


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
        begin = sum(map(len, environment.blocks))
        environment.generated.append((begin, begin + len(said)))
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
