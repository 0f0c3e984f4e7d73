"""Base class of `Attention` and `LatentAttention`: the core of a block's attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from hpctrain.data.documents import Documents
from hpctrain.model.rotary import Rotary
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.attention.core import attention_core
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import AttentionSize


class BlockAttention(nn.Module):
    """Attention of one block, with the rule and the sizes of the core that a shape gives the block.

    Args:
        shape: Sizes of the model.
        layer_context: Process groups and settings of this rank's layers.
        block: Number of the block, by which a cache stores keys and values.
        value_size: Features of a head's values; None for those of queries and keys.

    Attributes:
        rule: Scale, window and soft cap of the block.
        compute_core: Softmax attention of this rank's heads, over the ranks of the context axis.
        core: Sizes of the core.
        rotated: True if queries and keys are rotated.
        local: True if they are rotated by the angles of layers with windows.
    """

    def __init__(
        self, shape: ModelShape, layer_context: LayerContext, block: int, value_size: int | None = None
    ) -> None:
        super().__init__()
        self.layer_context, self.head_size, self.block = layer_context, shape.head_size, block
        window = shape.window(block) if shape.window(block) < shape.sequence else 0
        self.rule = AttentionRule(shape.score_scale, window, shape.attention_cap)
        self.compute_core = attention_core(layer_context, self.rule)
        heads = shape.heads, shape.key_value_heads
        self.core = AttentionSize(*heads, shape.head_size, shape.sequence, window, value_size)
        self.rotated, self.local = shape.rotates(block), shape.is_local(block)

    @property
    def exchanges(self) -> bool:
        """True if the core's output is sent back by other ranks, into another tensor."""
        return self.layer_context.context.size > 1 and self.layer_context.context_form == "all_to_all"

    @property
    def has_compiled_core(self) -> bool:
        """True if one compiled function rotates and attends."""
        return self.layer_context.functions.compiled and self.layer_context.context.size == 1

    def attend(
        self, operands: Sequence[Tensor], rotary: Rotary | None, documents: Documents | None
    ) -> Tensor:
        """Return `_attend` of tensors, or save only these and compute it again in the backward pass.

        Args:
            operands: Tensors from which the core is computed.
            rotary: Tables of the positions; None in families without rotation.
            documents: Documents of packed sequences, to which attention is limited; None without packing.
        """
        tables: tuple[Tensor, ...] = ()
        if rotary is not None and self.rotated:
            tables = rotary.local_tables if self.local else rotary.tables
        compute = partial(self._attend, documents=documents)
        return self.layer_context.saved_policy.attend(compute, operands, tables)

    def _attend(self, *operands_and_tables: Tensor, documents: Documents | None) -> Tensor:
        """Return the attention [s, b, heads, v] of the operands, which precede the tables."""
        raise NotImplementedError
