"""Pages of the guide's reference that are generated from the code: deck keys, verbs and the Python API."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress

import click

import hpctrain
from hpctrain.deck.reference import reference_text
from hpctrain.deck.schema import sections
from hpctrain.guide.pages import FOLDER

_WIDTH = 100
"""Columns of generated text."""
_FUNCTION = re.compile(r"<function \S+ at 0x\w+>")


def deck_keys() -> str:
    """Return the text of all deck keys: that of `hpctrain deck --reference` by section."""
    parts = [
        "Every section and key of an input deck, with its type, default and unit. "
        "`hpctrain deck --reference SECTION` prints one section.",
    ]
    for section in sections():
        parts += [f"## [{section}]", f"```text\n{reference_text(section, _WIDTH).rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def verbs(group: click.Group) -> str:
    """Return the help text of each verb.

    Args:
        group: The command `hpctrain`.
    """
    parts = ["Every verb with its options, as `hpctrain VERB --help` prints them."]
    settings = {"terminal_width": _WIDTH, "max_content_width": _WIDTH, **group.context_settings}
    root = click.Context(group, info_name="hpctrain", **settings)
    for name in group.list_commands(root):
        command = group.get_command(root, name)
        assert command is not None
        for words, each in _commands([name], command):
            context = click.Context(each, root, info_name=" ".join(words), terminal_width=_WIDTH)
            parts += [f"## hpctrain {' '.join(words)}", f"```text\n{each.get_help(context).rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def python_api() -> str:
    """Return the examples of the Python API, and signatures and docstrings of all public names."""
    examples = (FOLDER / "reference/python-api.md").read_text(encoding="utf-8").partition("\n")[2]
    parts = [examples.strip()]
    for name in hpctrain.__all__:
        parts += _described(name, getattr(hpctrain, name), "##")
        if inspect.isclass(getattr(hpctrain, name)):
            for method, value in _public_members(getattr(hpctrain, name)):
                parts += _described(f"{name}.{method}", value, "###")
    return "\n\n".join(parts) + "\n"


def _commands(words: list[str], command: click.Command) -> Iterator[tuple[list[str], click.Command]]:
    """Yield a command and all commands below it, each with the words that call it."""
    yield words, command
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from _commands([*words, name], each)


def _public_members(owner: type) -> Iterator[tuple[str, object]]:
    """Yield the public methods and properties that a class itself defines, with their names."""
    for name, value in vars(owner).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not name.startswith("_") and (inspect.isfunction(function) or isinstance(value, property)):
            yield name, function


def _described(name: str, value: object, heading: str) -> Iterator[str]:
    """Yield heading, signature and docstring of a function, class or property."""
    yield f"{heading} {name}"
    if callable(value):
        with suppress(ValueError):  # a class whose constructor is written in C
            signature = _FUNCTION.sub("...", str(inspect.signature(value)))
            yield f"```python\n{name}{signature}\n```"
    if doc := inspect.getdoc(value):
        yield f"```text\n{doc}\n```"
