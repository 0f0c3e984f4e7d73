"""Names of the submodules and parameters of a user's module, and patterns of them."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from torch import nn

from hpctrain.text import nearest

_MOST_NAMES = 6
"""Largest number of names in a suggestion."""


def matches_pattern(pattern: str, name: str) -> bool:
    """Return True if each part of a name between dots matches that of a pattern (`fnmatch`).

    Name and pattern have equally many parts, so `*` never matches a dot.
    """
    patterns, parts = pattern.split("."), name.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


class ModuleNames:
    """Submodules and parameters of a module by all their names.

    Attributes:
        module: The module.
        modules: Its submodules by name.
        parameters: Its parameters by name.
        first: First name of each submodule and parameter, by its `id`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = {name: each for name, each in module.named_modules(remove_duplicate=False) if name}
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.first: dict[int, str] = {}
        for name, each in (*self.modules.items(), *self.parameters.items()):
            self.first.setdefault(id(each), name)

    def matching(self, pattern: str) -> list[str]:
        """Return the first names of all submodules and parameters that match a pattern."""
        objects = {**self.modules, **self.parameters}
        return list(
            dict.fromkeys(self.first[id(each)] for n, each in objects.items() if matches_pattern(pattern, n))
        )

    def owner(self, name: str) -> str:
        """Return the first name of the module that has a parameter of this name."""
        owner_name = name.rpartition(".")[0]
        return self.first[id(self.modules[owner_name])] if owner_name else ""

    def no_match_message(self, pattern: str) -> str:
        """Return the message that nothing matches a pattern, with a suggestion."""
        plain = dict.fromkeys(re.sub(r"\d+(?=\.|$)", "*", n) for n in (*self.modules, *self.parameters))
        near = nearest(pattern, [*plain, *self.modules])
        leaves = [name for name, each in self.modules.items() if not any(True for _ in each.children())]
        short = list(dict.fromkeys(re.sub(r"\d+(?=\.|$)", "*", name) for name in leaves))
        known = f"did you mean {near}?" if near else f"the module has {', '.join(short[:_MOST_NAMES])}"
        return f"matches no submodule or parameter ({known})"
