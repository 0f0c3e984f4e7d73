"""Ways to plant a fault: each function returns a `Plant`, which a test applies to a `Scene`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hpctrain.model.attention.rotary import Rotary
from tests.train.layout_faults.scene import Change, Scene, When

Plant = Callable[[Scene], None]
"""Plants a fault in the steps of a layout."""


def changed_results(axis: str, operation: str, change: Change, when: When | None = None) -> Plant:
    """Change the results of a collective operation over the groups of an axis."""
    return lambda scene: scene.communicated(axis, operation, change, when)


def wrapped(owner: Any, name: str, change: Callable[..., Any], when: When | None = None) -> Plant:
    """Call `change(original, *arguments)` instead of a function of a module or class."""
    return lambda scene: scene.around(owner, name, change, when)


def scaled_argument(owner: Any, name: str, number: int, factor: float, when: When | None = None) -> Plant:
    """Multiply the argument of this number of a function by a factor."""

    def change(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        given = list(arguments)
        given[number] = given[number] * factor
        return original(*given, **options)

    return wrapped(owner, name, change, when)


def scaled_result(owner: Any, name: str, factor: float, when: When | None = None) -> Plant:
    """Multiply the result of a function by a factor."""
    return wrapped(
        owner, name, lambda original, *given, **options: original(*given, **options) * factor, when
    )


def skipped_calls(owner: Any, name: str, when: When | None = None) -> Plant:
    """Leave out the calls of a function that returns None."""
    return wrapped(owner, name, lambda *_, **__: None, when)


def scaled_state(rule: Any, name: str, factor: float, when: When | None = None) -> Plant:
    """Multiply a tensor of an optimizer's state by a factor after each update."""

    def update(original: Callable[..., None], optimizer: Any, parts: Sequence[Any], *rest: Any) -> None:
        original(optimizer, parts, *rest)
        for part in parts:
            part.state[name].mul_(factor)

    return wrapped(rule, "update", update, when)


def changed_positions(change: Callable[[Tensor], Tensor], when: When | None = None) -> Plant:
    """Rotate queries and keys as at other positions."""

    def rotate(original: Callable[..., None], rotary: Any, positions: Tensor, *rest: Any) -> None:
        original(rotary, change(positions), *rest)

    return wrapped(Rotary, "__init__", rotate, when)


def zero(values: Tensor) -> None:
    """Set all values to zero."""
    values.zero_()


def scale(factor: float) -> Change:
    """Return a change that multiplies values by a factor."""
    return lambda values: values.mul_(factor)


def swap_halves(values: Tensor) -> None:
    """Exchange the halves of the first dimension."""
    values.copy_(values.roll(len(values) // 2, 0))
