"""Policy of what layers save for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpctrain.parallel.shards import Parameter


@dataclass(frozen=True)
class LayerPass:
    """One forward pass of a layer, which may be repeated with the same bits.

    Attributes:
        compute: Function from hidden states to hidden states.
        parameters: Parameters that it uses.
    """

    compute: Callable[[Tensor], Tensor]
    parameters: Sequence[Parameter]


class SavedPolicy:
    """Policy that saves all that autograd saves. Subclasses save less, or save it elsewhere.

    Attributes:
        keeps_core: False if `attend` computes the core of attention (rotation, softmax and its products)
            again in the backward pass, and so saves only the core's operands and the rotary tables.
        recomputes_calls: True if `call` recomputes its function in the backward pass.
        rounds_activations: True if activations are saved in a format that rounds them.
    """

    keeps_core = True
    recomputes_calls = False
    rounds_activations = False

    def run(self, layers: Sequence[LayerPass], x: Tensor, shared: Sequence[Tensor] = ()) -> Tensor:  # noqa: ARG002
        """Return the result of layers that are applied to `x` one after the other.

        Args:
            layers: Layers to apply.
            x: Hidden states.
            shared: Further tensors that every layer uses.
        """
        for layer in layers:
            x = layer.compute(x)
        return x

    def call(self, compute: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return the result of a layer of any signature, under the policy of `run`."""
        return compute(*arguments, **named)

    def attend(
        self, compute: Callable[..., Tensor], inputs: Sequence[Tensor], shared: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return `compute(*inputs, *shared)`, the output of the core of attention.

        Args:
            compute: Function of the core. It uses no parameters except those in `inputs`.
            inputs: Operands of the core: queries, keys and values, or what they are computed from, and the
                sinks if the model has any. Gradients flow to them.
            shared: Rotary tables, which need no gradient; empty without rotation.
        """
        return compute(*inputs, *shared)
