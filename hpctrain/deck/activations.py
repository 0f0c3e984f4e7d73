"""Activations of feed-forward layers. To add an activation, add an entry to `ACTIVATIONS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ElementwiseFunction:
    """Elementwise function with its gradient, from which activations are built.

    Attributes:
        value: Function that returns a new tensor with the function of every element.
        gradient: Function that writes the gradient with respect to the input `x` into `out`. It is called as
            `gradient(dy, x, out)`.
        hidden_act: Names in a config.json of `transformers`. An export writes the first one. Without names,
            families whose default it is have no other activation, whatever name their files have for it.
        saves_input: True if the autograd of torch keeps only the input of `value` for the backward pass. If
            False, `gradient` replaces it, so that all activations keep the same number of bytes.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], object]
    hidden_act: tuple[str, ...]
    saves_input: bool = True


@dataclass(frozen=True)
class Activation:
    """Activation between the two projections of a feed-forward layer (an MLP or an expert).

    A gated activation has two input projections, `gate` and `up`, and computes `function(gate) * up`, or
    `function(gate) * up_function(up)`.

    Attributes:
        function: Elementwise function. With a gate, it is applied to the gate.
        up_function: Elementwise function that is applied to `up`. None for `up` itself.
        gated: True if the feed-forward layer has a gate.
        kernel: Name of the function of `functions.c` (`parallel/kernels/functions/`) that computes the
            activation with `machine.compile`. None if no such function exists; then the operations of
            torch are used.
    """

    function: ElementwiseFunction
    gated: bool = False
    kernel: str | None = None
    up_function: ElementwiseFunction | None = None

    @property
    def input_projections(self) -> int:
        """Number of input projections: two with a gate, otherwise one."""
        return 2 if self.gated else 1


def _gelu_tanh(x: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.gelu(x, approximate="tanh")


def _gelu_tanh_gradient(dy: Tensor, x: Tensor, out: Tensor) -> object:
    from torch import ops

    return ops.aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=out)


def _gelu(x: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.gelu(x)


def _gelu_gradient(dy: Tensor, x: Tensor, out: Tensor) -> object:
    from torch import ops

    return ops.aten.gelu_backward.grad_input(dy, x, grad_input=out)


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


def _clamped_silu(x: Tensor) -> Tensor:
    x = x.clamp(max=CLAMP_LIMIT)
    return x * (CLAMPED_SLOPE * x).sigmoid_()


def _clamped_silu_gradient(dy: Tensor, x: Tensor, out: Tensor) -> object:
    from torch import mul

    clamped = x.clamp(max=CLAMP_LIMIT)
    share = (CLAMPED_SLOPE * clamped).sigmoid_()
    slope = clamped.mul_(CLAMPED_SLOPE).mul_(1 - share).add_(1).mul_(share)
    return mul(dy, slope.mul_(x <= CLAMP_LIMIT), out=out)


def _clamped_plus_one(x: Tensor) -> Tensor:
    return x.clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1)


def _clamped_plus_one_gradient(dy: Tensor, x: Tensor, out: Tensor) -> object:
    from torch import mul

    return mul(dy, x.abs() <= CLAMP_LIMIT, out=out)


CLAMP_LIMIT = 7.0
"""Largest gate, and largest absolute value of `up`, of the clamped SwiGLU of gpt-oss."""

CLAMPED_SLOPE = 1.702
"""Factor of the gate in the sigmoid of the clamped SwiGLU of gpt-oss."""

CLAMPED_SILU = ElementwiseFunction(_clamped_silu, _clamped_silu_gradient, (), saves_input=False)
"""min(x, 7) sigmoid(1.702 min(x, 7)) (gpt-oss, arXiv 2508.10925)."""

CLAMPED_PLUS_ONE = ElementwiseFunction(_clamped_plus_one, _clamped_plus_one_gradient, (), saves_input=False)
"""x, limited to -7 and 7, plus 1 (gpt-oss, arXiv 2508.10925)."""

GELU_TANH = ElementwiseFunction(
    _gelu_tanh,
    _gelu_tanh_gradient,
    ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"),
)
"""GELU by tanh (arXiv 1606.08415)."""

GELU = ElementwiseFunction(_gelu, _gelu_gradient, ("gelu", "gelu_python"))
"""GELU by the error function (arXiv 1606.08415)."""

SILU = ElementwiseFunction(_silu, _silu_gradient, ("silu", "swish"))
"""x sigmoid(x)."""

RELU_SQUARED = ElementwiseFunction(_relu_squared, _relu_squared_gradient, ("relu2",), saves_input=False)
"""max(x, 0)^2 (arXiv 2109.08668)."""

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({
    "gelu-tanh": Activation(GELU_TANH, kernel="gelu"),
    "swiglu": Activation(SILU, gated=True, kernel="gated"),
    "geglu": Activation(GELU_TANH, gated=True, kernel="geglu"),
    "gelu": Activation(GELU),
    "geglu-exact": Activation(GELU, gated=True),
    "relu2": Activation(RELU_SQUARED),
    "swiglu-clamped": Activation(CLAMPED_SILU, gated=True, up_function=CLAMPED_PLUS_ONE),
    "gated-relu2": Activation(RELU_SQUARED, gated=True),
})  # fmt: skip
"""Activations by their names in a deck."""

GATED = tuple(name for name, activation in ACTIVATIONS.items() if activation.gated)
"""Names of the activations with a gate."""


def imported_activation(hidden_act: object, gated: bool) -> str | None:
    """Return the name of the activation for a `hidden_act` of `transformers`; None if there is none.

    Args:
        hidden_act: Value of `hidden_act` in a config.json.
        gated: True if the feed-forward layers of the architecture have a gate.
    """
    for name, activation in ACTIVATIONS.items():
        if activation.gated == gated and hidden_act in activation.function.hidden_act:
            return name
    return None
