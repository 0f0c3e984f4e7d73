"""Outputs of the submodules of a module in a forward pass, to find where two passes first differ."""

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
    """Record the outputs of all submodules in the first forward pass of each module during the block.

    Of each call, the first floating-point tensor is recorded. The submodules are in the order in which their
    first calls end. An HpctrainError in a submodule gets its name.

    Args:
        modules: Modules, each with a function that tells whether its passes count at present.
    """
    outputs: dict[str, list[Tensor]] = {}
    owners: dict[str, nn.Module] = {}
    passes = dict.fromkeys(modules, 0)
    open_submodules: list[str] = []

    def start_pass(module: nn.Module, _: Any) -> None:
        passes[module] += 1
        open_submodules.clear()

    def enter_submodule(name: str, *_: object) -> None:
        if not in_backward():
            open_submodules.append(name)

    def record_output(name: str, owner: nn.Module, _: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
        if in_backward():
            return
        open_submodules.remove(name)
        fractions = (each for each in tensors_of(output) if each.is_floating_point())
        first = next(fractions, None)
        if first is None or passes[owner] != 1 or not modules[owner]():
            return
        if owners.setdefault(name, owner) is owner:
            outputs.setdefault(name, []).append(first.detach().clone())

    parts = [(name, each, module) for module in modules for name, each in module.named_modules() if name]
    hooks = [module.register_forward_pre_hook(start_pass) for module in modules]
    hooks += [each.register_forward_pre_hook(partial(enter_submodule, name)) for name, each, _ in parts]
    hooks += [each.register_forward_hook(partial(record_output, name, owner)) for name, each, owner in parts]
    try:
        yield outputs
    except HpctrainError as error:
        place = [f"  in submodule {open_submodules[-1]}"] if open_submodules else []
        raise type(error)([*error.problems, *place]) from error
    finally:
        for hook in hooks:
            hook.remove()


def match_calls(expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a submodule's calls in the order of the expected outputs.

    A module may call a submodule in an order that differs between processes. So each expected output gets
    the nearest remaining output of its shape.
    """
    remaining, matched = list(outputs), []
    for target in expected:
        candidates = [each for each in remaining if each.shape == target.shape]
        nearest = min(candidates, key=lambda each: _distance(each, target))
        remaining = [each for each in remaining if each is not nearest]
        matched.append(nearest)
    return matched


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().nan_to_num(nan=float("inf")).max()) if one.numel() else 0.0


def in_backward() -> bool:
    """Return True if the present computation is part of a backward pass, such as recomputation."""
    return torch._C._current_graph_task_id() != -1
