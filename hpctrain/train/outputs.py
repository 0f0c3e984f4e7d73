"""What parts of a module give in a forward pass, by their names: where two passes first differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from hpctrain.errors import HpctrainError
from hpctrain.model.foreign.arguments import tensors_of


@contextmanager
def outputs_of(modules: Mapping[nn.Module, Callable[[], bool]]) -> Iterator[dict[str, Tensor]]:
    """The first fraction among what each submodule gives in its first pass within, in the order in which they
    end, while it is told of its module that it computes. What fails within one of them is an HpctrainError
    with its name, too.
    """
    found: dict[str, Tensor] = {}
    within: list[str] = []

    def enter(name: str, *_: object) -> None:
        within.append(name)

    def take(name: str, computing: Callable[[], bool], _: nn.Module, given: Any, output: Any) -> None:  # noqa: ARG001
        within.remove(name)
        fractions = (each for each in tensors_of(output) if each.is_floating_point())
        first = next(fractions, None)
        if name not in found and first is not None and computing():
            found[name] = first.detach().clone()

    parts = [
        (name, each, computing)
        for module, computing in modules.items()
        for name, each in module.named_modules()
        if name
    ]
    hooks = [each.register_forward_pre_hook(partial(enter, name)) for name, each, _ in parts]
    hooks += [each.register_forward_hook(partial(take, name, computing)) for name, each, computing in parts]
    try:
        yield found
    except HpctrainError as error:
        told = [f"  it was in {within[-1]}"] if within else []
        raise type(error)([*error.problems, *told]) from error
    finally:
        for hook in hooks:
            hook.remove()
