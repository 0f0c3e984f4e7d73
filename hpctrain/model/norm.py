"""LayerNorm (arXiv 1607.06450) and RMSNorm (arXiv 1910.07467) over the last dim."""

from __future__ import annotations

from torch import Tensor, nn

from hpctrain.model.shape import ModelShape
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter, Shard


class Norm(nn.Module):
    """LayerNorm or RMSNorm of [s, b, h].

    Under sequence parallelism each rank sees its slice of s, so that the gradients of the weight and the bias
    are partial sums over the tensor axis.
    """

    def __init__(self, name: str, shape: ModelShape, groups: LayerContext) -> None:
        super().__init__()
        self.epsilon, self.size = shape.norm_epsilon, (shape.hidden,)
        self.functions, partial = groups.functions, groups.sequence_partial
        self.weight = Parameter(Shard.replicated(f"{name}.weight", self.size, partial), False, "ones")
        self.bias = (
            Parameter(Shard.replicated(f"{name}.bias", self.size, partial), False, "zeros")
            if shape.traits.norm == "layer"
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalized over the last dimension."""
        if self.bias is None:
            return self.functions.rms_norm(x, self.weight, self.epsilon)
        return self.functions.layer_norm(x, self.weight, self.bias, self.epsilon)
