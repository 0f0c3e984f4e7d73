"""LayerNorm (arXiv 1607.06450) and RMSNorm (arXiv 1910.07467) over the last dim."""

from __future__ import annotations

from torch import Tensor, nn

from hpctrain.model.shape import ModelShape
from hpctrain.parallel.kernels.normalization import normalize
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Initial, Parameter, Shard


class Norm(nn.Module):
    """LayerNorm or RMSNorm of [s, b, h].

    Under sequence parallelism each rank sees its slice of s, so that the gradients of the weight and the bias
    are partial sums over the tensor axis.

    Attributes:
        weight: Factor of the features, minus one if norm_weight is "one_plus"; None without a weight.
        bias: Bias of the features; None for a norm without bias.
    """

    def __init__(self, name: str, shape: ModelShape, layer_context: LayerContext) -> None:
        super().__init__()
        self.epsilon, self.size, self.kind = shape.norm_epsilon, (shape.hidden,), shape.norm
        self.offset = 1 if shape.norm_weight == "one_plus" else 0
        self.functions, partial = layer_context.functions, layer_context.sequence_partial
        weight, bias = (Shard.replicated(f"{name}.{each}", self.size, partial) for each in ("weight", "bias"))
        ones: Initial = "zeros" if self.offset else "ones"
        self.weight = Parameter(weight, False, ones) if shape.norm_weight != "none" else None
        self.bias = Parameter(bias, False, "zeros") if shape.norm_bias else None

    @property
    def has_fast_function(self) -> bool:
        """True if torch or the compiled library has a kernel of the norm; otherwise `normalize` computes it.

        Plans ask it, and `forward` chooses by itself. There are kernels for RMSNorm with a weight, for
        LayerNorm with weight and bias, and in the compiled library for RMSNorm with a weight plus one.
        """
        if self.weight is None or (self.offset and not self.functions.compiled):
            return False
        return self.kind == "rms" or self.bias is not None

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized over the last dimension."""
        if self.weight is not None and self.kind == "rms":
            return self.functions.rms_norm(x, self.weight, self.epsilon, self.offset)
        if self.weight is not None and self.bias is not None:
            return self.functions.layer_norm(x, self.weight, self.bias, self.epsilon)
        return normalize(x, self.weight, None, self.kind == "layer", self.epsilon)
