"""Chat templates beside transformers', whatever they do, and what is said of those that fail.

Tests of data/chat_template.py, data/template_process.py and data/template_worker.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpctrain.data import template_limits
from hpctrain.data.chat_template import BUILT_IN, ChatTemplate
from hpctrain.data.template_process import TemplateLimitError
from hpctrain.errors import HpctrainError
from tests.data.chats import bpe, talk

GENERATED = """{%- for message in messages %}
  {%- if message['role'] == 'assistant' %}
    {{- '<|im_start|>assistant\\n' }}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}
    {{- '\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

ODD = """{% set ns = namespace(found=false, seen=dict(a=1)) %}
{% macro shout(text) %}{{ text | upper }}!{% endmacro %}
{%- for message in messages %}
    {% if loop.first and message.role == 'system' %}
        {% set ns.found = true %}{% continue %}
    {% endif %}
    {{- loop.index0 }} of {{ loop.length }}{{ ' last' if loop.last }}
    {{ loop.previtem.role if loop.index > 1 }}
    {%- if loop.index > 4 %}{% break %}{% endif %}
    {{ shout(message.content | trim) }}{{ message | tojson }}{{ bos_token }}{{ eos_token }}
{% endfor %}
{{ ns.found }}{{ ns.seen }}{% for key, value in messages[0].items() %}{{ key }}{% else %}none{% endfor %}
{% for word in messages[0].content.split(' ') if word %}[{{ word }}]{% endfor %}{{ tools is none }}"""

MESSAGES = talk("  Hello <b>ü</b> ", "one\ntwo", "and?", "", "more", "end", system="be kind")


@pytest.mark.parametrize("template", [*BUILT_IN.values(), GENERATED, ODD])
def test_text_is_that_of_transformers(tmp_path: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = bpe(
        tmp_path / "t",
        template,
        {
            "bos_token": "<|im_start|>",
            "pad_token": {"__type": "AddedToken", "content": "<pad>", "special": True},
        },
    )
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTemplate.of(None, str(folder), "<|endoftext|>")
    assert ours.tokens["bos_token"] == "<|im_start|>" and ours.tokens["eos_token"] == "<|im_end|>"
    assert ours.tokens["pad_token"] == "<pad>"
    for messages in (MESSAGES, MESSAGES[1:2], MESSAGES[1:]):
        for prompt in (False, True):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
            assert ours.render(messages, prompt)[0] == expected
    thinking = [{**MESSAGES[1], "reasoning": "so"}]
    assert ours.render(thinking)[0] == theirs.apply_chat_template(thinking, tokenize=False)


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    folder = bpe(tmp_path / "t", "of the config")
    assert ChatTemplate.of(None, str(folder), "e").text == "of the config"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.of(None, str(folder), "e").text == "y"
    assert ChatTemplate.of(None, str(folder), "e").tokens == {"eos_token": "e"}
    (folder / "chat_template.jinja").write_text("of its file\n")
    assert ChatTemplate.of(None, str(folder), "e").render([])[0] == "of its file"
    own = tmp_path / "own.jinja"
    own.write_text("{{ strftime_now('%d %b %Y') }}{{ messages | length }}")
    assert ChatTemplate.of(str(own), "bytes", "e").now and not ChatTemplate.of("plain", "bytes", "e").now
    made = ChatTemplate.from_json(ChatTemplate(own.read_text(), {}, "t", "2026-01-02T03:04:05").to_json())
    assert made.render(MESSAGES)[0] == "02 Jan 20267"


def test_operators_make_what_they_make() -> None:
    """Numbers and lists, too; loops that call themselves."""
    text = "{{ 3 * 'a' ~ 2 ** 10 ~ 7 % 4 ~ '%05d' % 3 ~ (1 + 2) ~ ([1] + [2]) ~ 0.5 * 3 }}"
    loop = "{% for a in [1, [2, 3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}"
    assert ChatTemplate(f"{text} {loop}").render([])[0] == "aaa10243000033[1, 2]1.5 123"


GROWING = (
    "'a' | center(9999999999)",
    "'a'.ljust(9999999999)",
    "'a'.zfill(9999999999)",
    "'{:9999999999}'.format(3)",
    "'{:{}}'.format(3, 9999999999)",
    "'%9999999999d' | format(3)",
    "'%9999999999d' % 1",
    "'%*d' % (9999999999, 1)",
    "'a' | indent(9999999999, true)",
    "('a\\n' * 1000000) | indent(60000)",
    "messages | tojson(indent=9999999999)",
    "[1] | batch(9999999999, 0) | list",
    "('b' * 1000000) | replace('b', 'c' * 100000)",
    "('c' * 100000).join(['b'] * 100000)",
    "'ab' * 2 ** 40",
    "[[[[0] * 9999] * 9999] * 9999] | string",
    "([['ab' * 99] * 99999] * 99999) | tojson",
    "('\\t' * 9999999).expandtabs(9999)",
    "('a' * 9999999).translate({97: 'b' * 9999})",
    "('%s' * 9999999) % (('b' * 9999,) * 9999999)",
    "(('%%' * 9999999) % () ~ 'a' * 9999999) * 9999",
    "range(99999) | map('string') | join('a' * 99999)",
)
"""What would take more memory than there is, by operations, filters and methods."""

ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set a = 'ab' * 4000000 %}{% for i in range(99999) %}{% set b = a | upper %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set a = range(99999) | list %}{% for i in a %}{% set b = a | sort | reverse | list %}{% endfor %}",
)
"""What would compute for hours, also while it is parsed."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize("expression", GROWING)
def test_what_takes_much_memory_is_one_sentence(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "PROCESSOR_SECONDS", 2.0)
    monkeypatch.setattr(template_limits, "MEMORY_BYTES", 256 << 20)
    template = ChatTemplate(f"{{{{ {expression} }}}}", title="x.jinja")
    with pytest.raises(HpctrainError) as caught:
        template.render(MESSAGES)
    template.process.close()
    memory = "takes more than 256 MiB of memory"
    seconds = "takes more than 2 s of processor time to (parse it|render one conversation)"
    assert re.fullmatch(f"x.jinja: ({memory}|{seconds})", str(caught.value)), str(caught.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ENDLESS)
def test_what_computes_without_end_is_one_sentence(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "PROCESSOR_SECONDS", 0.5)
    template = ChatTemplate(text, title="x.jinja")
    with pytest.raises(TemplateLimitError) as caught:
        template.render(MESSAGES)
    assert re.fullmatch(
        "x.jinja: takes more than 500 ms of processor time to (parse it|render one conversation)",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{% if", "x.jinja, line 1: is not a valid Jinja template"),
        ("a\n{% for m in messages %}", "x.jinja, line 2: is not a valid Jinja template"),
        (
            "{{ 10**4299 * 10**4299 }}",
            "x.jinja: is not a valid Jinja template (ValueError: Exceeds the limit",
        ),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "(SyntaxError: too many statically nested blocks"),
        ("{{ raise_exception('roles must alternate') }}", "x.jinja: roles must alternate"),
        ("{{ messages[70].content }}", "list object has no element 70"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% set ns = namespace(_a=1) %}", "begins with an underscore"),
        ("{% set x = messages.append(1) %}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ 1 + 'a' }}", "fails with TypeError: unsupported operand"),
        ("{{ lipsum(n=100) }}", "'lipsum' is undefined"),
        *(
            (
                each + "{% generation %}b{% endgeneration %}" + after,
                "block inside a macro",
            )
            for each, after in (
                ("{% macro f() %}a", "{% endmacro %}, {{ f() }}"),
                ("{% set f %}a", "{% endset %}, {{ f }}"),
            )
        ),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "x.jinja: recurses too deeply"),
    ],
)
def test_what_fails_is_one_sentence(tmp_path: Path, template: str, wanted: str) -> None:
    file = tmp_path / "x.jinja"
    file.write_text(template)
    with pytest.raises(HpctrainError) as caught:
        ChatTemplate.of(str(file), "bytes", "e").render(MESSAGES)
    assert wanted in str(caught.value) and len(caught.value.problems) == 1


def test_templates_that_are_not_there(tmp_path: Path) -> None:
    for argument, tokenizer, wanted in [
        (
            None,
            "bytes",
            "--tokenizer bytes: has no chat template; give --template chatml, llama3, plain, raw or",
        ),
        ("chatlm", "bytes", "--template chatlm: no such file (did you mean chatml?)"),
        ("/none.jinja", "bytes", "no such file (expected chatml, "),
        (None, str(bpe(tmp_path / "t")), "has no chat template"),
    ]:
        with pytest.raises(HpctrainError) as caught:
            ChatTemplate.of(argument, tokenizer, "e")
        assert wanted in str(caught.value)
    (tmp_path / "t" / "tokenizer_config.json").write_text("{")
    with pytest.raises(HpctrainError, match=r"tokenizer_config.json: is not readable as JSON"):
        ChatTemplate.of(None, str(tmp_path / "t"), "e")
