"""Arguments as a shell's script, or a file of them, has them; nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_ASSIGNED = re.compile(
    r"""(?:^|;)\s*(?:export\s+)?(\w+)=([^\s("'`;&|]+|"[^"`\n]*"|'[^'\n]*')[ \t]*(?=;|\#|$)""", re.MULTILINE
)
_USUAL = re.compile(r"\$\{\w+:-[\"']?([^}\"']*)[\"']?\}")
_LISTS = re.compile(r"""(\w+)=[("'][^)"']*--""")
"""What a script names lists of arguments."""
_END = "\x1e"
"""A word between lines."""
_NAMED = re.compile(r"^\w+=\(?(?=--)")
_OTHERS = re.compile(r"\$.*(?:ARGS|@)|\.py$|[;&|<>]|\w+=\(?$|\x1e")
"""Words that are no value: variables of more arguments, the program, and what a shell does besides."""


def arguments_of(script: str) -> dict[str, object]:
    """The arguments in a text: a file of them, or a shell's script: values as text, True of a flag
    alone. Variables that it sets are put in.
    """
    script = script.replace("\\\r\n", " ").replace("\\\n", " ")
    variables = _variables(script)
    lists = {f"${name}" for name in _LISTS.findall(script)}
    given: dict[str, object] = {}
    name = ""
    for word in _words(script.replace("\n", f"\n {_END} ")):
        known = _VARIABLE.sub(lambda found: variables.get(found[1], found[0]), word)
        flag, equals, value = known.partition("=")
        if _FLAG.fullmatch(flag):
            name = flag.replace("_", "-")
            given[name] = value if equals else True
        elif _OTHERS.search(known) or _VARIABLE.sub(r"$\1", known) in lists:
            name = ""
        elif name:
            before = given[name]
            given[name] = known if before is True else f"{before} {known}"
    return given


def _variables(script: str) -> dict[str, str]:
    """What a script sets, in one way alone: by a value, or by one for where the environment has none."""
    found: dict[str, set[str]] = {}
    for name, written in _ASSIGNED.findall(script):
        value = written.strip("\"'")
        usual = _USUAL.fullmatch(value)
        found.setdefault(name, set()).add(usual[1] if usual else value)
    alone = {name: values.pop() for name, values in found.items() if len(values) == 1}
    return {name: value for name, value in alone.items() if "$" not in value and "--" not in value}


def _words(script: str) -> Iterator[str]:
    """As a shell takes it apart; texts in quotes that have arguments are so, too, and lists are opened."""
    lines = script.split("\n")
    try:
        words = shlex.split(script, comments=True)
    except ValueError:
        # No shell's text: line by line, without quotes.
        unquoted = (line.replace('"', " ").replace("'", " ") for line in lines)
        words = [
            word for line in unquoted if not line.lstrip(f"{_END} ").startswith("#") for word in line.split()
        ]
    for word in words:
        for part in word.split() if "--" in word else [word]:
            opened = _NAMED.sub("", part).strip("\"'")
            if plain := opened.rstrip(")") if "(" not in opened else opened:
                yield plain
