"""What parts of a module give in a forward pass, by their names: where two passes first differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from hpctrain.model.foreign.arguments import tensors_of


@contextmanager
def outputs_of(modules: list[nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The first fraction among what each submodule gives in its first pass within, in the order in which they
    end.
    """
    found: dict[str, Tensor] = {}

    def take(name: str, _: nn.Module, given: Any, output: Any) -> None:  # noqa: ARG001
        fractions = (each for each in tensors_of(output) if each.is_floating_point())
        first = next(fractions, None)
        if name not in found and first is not None:
            found[name] = first.detach().clone()

    hooks = [
        each.register_forward_hook(partial(take, name))
        for module in modules
        for name, each in module.named_modules()
        if name
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
