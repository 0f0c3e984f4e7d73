"""What layers compute, told in sizes, so that the seconds of a layer follow from the rates of a machine."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hpctrain.deck.activations import Activation

Cut = Literal["outputs", "inputs", "whole"]
"""Of which features of a matrix each rank of an axis has a part, if of any."""

ElementwiseKind = Literal["norm", "add", "activation", "gate", "rotation", "loss", "lookup"]
"""What is done to elements: normalized; added to others; an activation; a gated one; turned by their
position; made losses of logits; looked up in a table.
"""


class MatrixSize(NamedTuple):
    """A whole matrix, `outputs` by `inputs`, that activations are multiplied with; tensor ranks `cut` it.

    There are as many as `experts`, of which a token is multiplied with `met`: these lie on ranks of the
    expert axis, and those of the expert_tensor axis cut them. What is multiplied `beside` another has no
    messages of its own. A bias is added to the product if it is `biased`.
    """

    outputs: int
    inputs: int
    cut: Cut
    met: int = 1
    experts: int = 1
    beside: bool = False
    biased: bool = False

    @property
    def elements(self) -> int:
        """Of those that a token is multiplied with."""
        return self.outputs * self.inputs * self.met

    @property
    def idle_elements(self) -> int:
        """Of the others."""
        return self.outputs * self.inputs * (self.experts - self.met)


class AttentionSize(NamedTuple):
    """Attention between queries, keys and values: heads, those of keys and values, features of each one, and
    tokens of a sequence.
    """

    heads: int
    key_value_heads: int
    head_size: int
    sequence: int

    @property
    def flops(self) -> int:
        """Of a token's forward pass: both products; the causal mask is not subtracted."""
        return 4 * self.heads * self.head_size * self.sequence


class ElementwiseSize(NamedTuple):
    """So many `features` of a token come out of what is done to each by itself; `split` says that tensor
    ranks have a part each, where they otherwise have all, or under sequence parallelism a part of the tokens.
    """

    kind: ElementwiseKind
    features: int
    split: bool = False


def kind_of(activation: Activation) -> ElementwiseKind:
    """Return the kind by which the time of an activation is planned."""
    return "gate" if activation.gated else "activation"
