"""What is kept of a forward pass for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpctrain.parallel.shards import Parameter


@dataclass(frozen=True)
class LayerPass:
    """A layer in one forward pass: its computation, from hidden states to hidden states, and parameters.

    Computing it again gives the same bits.
    """

    compute: Callable[[Tensor], Tensor]
    parameters: Sequence[Parameter]


class SavedPolicy:
    """Keeps all that autograd saves. Whoever keeps less, or keeps it elsewhere, overrides these methods.

    `repeats` says that what is given to `call` may be computed again, `keeps_core` that the core of attention
    keeps its output, for its own backward.
    """

    keeps_core = True
    repeats = False

    def run(self, layers: Sequence[LayerPass], x: Tensor, shared: Sequence[Tensor] = ()) -> Tensor:  # noqa: ARG002
        """All layers, one after the other, of x. `shared` are tensors that every layer uses besides."""
        for layer in layers:
            x = layer.compute(x)
        return x

    def call(self, compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What a layer of any form gives, one of those that `run` would have."""
        return compute(*given, **named)

    def attend(
        self, compute: Callable[..., Tensor], inputs: Sequence[Tensor], shared: Sequence[Tensor] = ()
    ) -> Tensor:
        """`compute(*inputs, *shared)`, the core of attention: without parameters, and large inside."""
        return compute(*inputs, *shared)
