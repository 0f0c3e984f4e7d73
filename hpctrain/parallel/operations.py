"""Sizes of the work of layers, from which plans predict FLOPs and, with the rates of a machine, seconds."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hpctrain.deck.activations import Activation

MatrixSplit = Literal["outputs", "inputs", "whole", "replicated"]
"""Features of a matrix that the ranks of an axis split: of its outputs, of its inputs, or none.

Tensor ranks split the tokens that are multiplied with a "whole" matrix. With a "replicated" one they do so
only under sequence parallelism.
"""

ElementwiseKind = Literal["norm", "add", "activation", "gate", "rotation", "loss", "lookup"]
"""Elementwise operation: normalization, addition, activation, gated activation, rotation by position, losses
of logits, or lookup in a table.
"""


class MatrixSize(NamedTuple):
    """Global matrix that activations are multiplied with.

    Attributes:
        outputs: Output features.
        inputs: Input features.
        split: Features that tensor ranks split, or `expert_tensor` ranks in a mixture.
        experts_per_token: Number of experts with such a matrix that each token is multiplied with.
        experts: Number of experts with such a matrix, which `expert` ranks split.
        adapter: True for a factor of an adapter, which needs no messages of its own.
        biased: True if a bias is added to the product.
        by_heads: True if tensor ranks split its features by heads, which they may divide unevenly.
    """

    outputs: int
    inputs: int
    split: MatrixSplit
    experts_per_token: int = 1
    experts: int = 1
    adapter: bool = False
    biased: bool = False
    by_heads: bool = False

    @property
    def elements(self) -> int:
        """Number of elements that a token is multiplied with."""
        return self.outputs * self.inputs * self.experts_per_token

    @property
    def idle_elements(self) -> int:
        """Number of elements of the experts that do not compute a token, with their biases."""
        return self.outputs * (self.inputs + self.biased) * (self.experts - self.experts_per_token)


class AttentionSize(NamedTuple):
    """Attention between queries, keys and values.

    Attributes:
        heads: Heads of queries.
        key_value_heads: Heads of keys and values.
        head_size: Features of a head, in the kernel also those of values.
        sequence: Tokens of a sequence.
        window: Keys that a query sees, with its own; 0 for all earlier ones.
        value_size: Features of the values of a head, which the kernel may pad; None for `head_size`.
    """

    heads: int
    key_value_heads: int
    head_size: int
    sequence: int
    window: int = 0
    value_size: int | None = None

    @property
    def keys(self) -> int:
        """Keys of a query by which FLOPs are counted: twice the mean number of unmasked ones.

        Without a window it is `sequence`, as if there were no causal mask.
        """
        window, sequence = self.window or self.sequence, self.sequence
        return sequence if window >= sequence else window * (2 * sequence - window) // sequence

    @property
    def flops(self) -> int:
        """FLOPs of both products in the forward pass of a token."""
        values = self.head_size if self.value_size is None else self.value_size
        return 2 * self.heads * (self.head_size + values) * self.keys

    @property
    def kernel_flops(self) -> int:
        """FLOPs of a kernel, which computes values of the size of queries and keys."""
        return 4 * self.heads * self.head_size * self.keys


class ElementwiseSize(NamedTuple):
    """Elementwise operation on the features of a token.

    Attributes:
        kind: The operation.
        features: Number of features that it returns.
        split: True if tensor ranks split the features. Otherwise each has all of them, under sequence
            parallelism of a piece of the tokens.
    """

    kind: ElementwiseKind
    features: int
    split: bool = False


def elementwise_kind(activation: Activation) -> ElementwiseKind:
    """Return the kind by which the time of an activation is planned."""
    return "gate" if activation.gated else "activation"
