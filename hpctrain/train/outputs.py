"""What parts of a module give in a forward pass, by their names: where two passes first differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import HpctrainError
from hpctrain.model.modules.nested_tensors import tensors_of


@contextmanager
def outputs_of(modules: Mapping[nn.Module, Callable[[], bool]]) -> Iterator[dict[str, list[Tensor]]]:
    """The first fraction among what each submodule gives in each of its calls in its module's first forward
    pass within, in the order in which they first end, while it is told of its module that it computes. What
    fails within one of them is an HpctrainError with its name, too.
    """
    found: dict[str, list[Tensor]] = {}
    owners: dict[str, nn.Module] = {}
    passes = dict.fromkeys(modules, 0)
    within: list[str] = []

    def begin(module: nn.Module, _: Any) -> None:
        passes[module] += 1
        within.clear()

    def enter(name: str, *_: object) -> None:
        if not in_backward():
            within.append(name)

    def take(name: str, owner: nn.Module, _: nn.Module, given: Any, output: Any) -> None:  # noqa: ARG001
        if in_backward():
            return
        within.remove(name)
        fractions = (each for each in tensors_of(output) if each.is_floating_point())
        first = next(fractions, None)
        if first is None or passes[owner] != 1 or not modules[owner]():
            return
        if owners.setdefault(name, owner) is owner:
            found.setdefault(name, []).append(first.detach().clone())

    parts = [(name, each, module) for module in modules for name, each in module.named_modules() if name]
    hooks = [module.register_forward_pre_hook(begin) for module in modules]
    hooks += [each.register_forward_pre_hook(partial(enter, name)) for name, each, _ in parts]
    hooks += [each.register_forward_hook(partial(take, name, owner)) for name, each, owner in parts]
    try:
        yield found
    except HpctrainError as error:
        told = [f"  in submodule {within[-1]}"] if within else []
        raise type(error)([*error.problems, *told]) from error
    finally:
        for hook in hooks:
            hook.remove()


def in_order_of(expected: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """What one part gives in its calls, `given` in the order of what is `expected` of as many: each time the
    nearest of its shape that is left, as a module may call a part in an order that differs between processes.
    """
    left, found = list(given), []
    for wanted in expected:
        alike = [each for each in left if each.shape == wanted.shape]
        nearest = min(alike, key=lambda each: _distance(each, wanted))
        left = [each for each in left if each is not nearest]
        found.append(nearest)
    return found


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().nan_to_num(nan=float("inf")).max()) if one.numel() else 0.0


def in_backward() -> bool:
    """Whether what runs is computed again, in the midst of a backward pass."""
    return torch._C._current_graph_task_id() != -1
