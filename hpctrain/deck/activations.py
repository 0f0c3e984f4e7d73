"""Activations of feed-forward parts. A new activation takes an entry of `ACTIVATIONS`, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PointFunction:
    """A function of one number, by which activations are made.

    Attributes:
        value: Return a new tensor with the function of every element.
        gradient: Write the gradient with respect to the input `x` into `out`: `gradient(dy, x, out)`.
        hidden_act: Names in a config.json of `transformers`; the first one is written.
        saves_input: True if torch's own autograd of `value` keeps the input alone for backward. Otherwise
            `gradient` is used there, too, so that all activations keep as many bytes.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], object]
    hidden_act: tuple[str, ...]
    saves_input: bool = True


@dataclass(frozen=True)
class Activation:
    """What a feed-forward part does between its matrices.

    Memory and time are planned by whether it is gated and compiled: a gated one expands to a gate and its
    factor, and computes function(gate) x factor.

    Attributes:
        function: Function of an element, or of an element of the gate.
        gated: True if the feed-forward part has a gate.
        kernel: Name of the method of `parallel.functions.CompiledFunctions` that computes it at once; None if
            torch's operations do with `machine.compile` as well.
    """

    function: PointFunction
    gated: bool = False
    kernel: str | None = None

    @property
    def copies(self) -> int:
        """Number of matrices that expand: two with a gate."""
        return 2 if self.gated else 1


def _gelu_tanh(x: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.gelu(x, approximate="tanh")


def _gelu_tanh_gradient(dy: Tensor, x: Tensor, out: Tensor) -> object:
    from torch import ops

    return ops.aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=out)


def _silu(x: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.silu(x)


def _silu_gradient(dy: Tensor, x: Tensor, out: Tensor) -> object:
    from torch import ops

    return ops.aten.silu_backward.grad_input(dy, x, grad_input=out)


def _relu_squared(x: Tensor) -> Tensor:
    return x.relu().square_()


def _relu_squared_gradient(dy: Tensor, x: Tensor, out: Tensor) -> object:
    from torch import mul

    return mul(dy, x.relu().mul_(2), out=out)


GELU_TANH = PointFunction(
    _gelu_tanh,
    _gelu_tanh_gradient,
    ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"),
)
"""GELU by tanh (arXiv 1606.08415)."""

SILU = PointFunction(_silu, _silu_gradient, ("silu", "swish"))
"""x sigmoid(x)."""

RELU_SQUARED = PointFunction(_relu_squared, _relu_squared_gradient, ("relu2",), saves_input=False)
"""max(x, 0)^2 (arXiv 2109.08668)."""

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({
    "gelu-tanh": Activation(GELU_TANH, kernel="gelu"),
    "swiglu": Activation(SILU, gated=True, kernel="gated"),
    "geglu": Activation(GELU_TANH, gated=True),
    "relu2": Activation(RELU_SQUARED),
    "gated-relu2": Activation(RELU_SQUARED, gated=True),
})  # fmt: skip
"""Activations by the name that a deck has for each."""

GATED = tuple(name for name, activation in ACTIVATIONS.items() if activation.gated)
"""Activations with a gate."""

OF_FAMILY: Mapping[str, str] = MappingProxyType({"gpt2": "gelu-tanh", "llama": "swiglu"})
"""The usual activation of a family."""


def imported_activation(hidden_act: object, gated: bool) -> str | None:
    """Return the name of the activation that a config.json of `transformers` means; None if there is none."""
    for name, activation in ACTIVATIONS.items():
        if activation.gated == gated and hidden_act in activation.function.hidden_act:
            return name
    return None
