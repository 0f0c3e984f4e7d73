"""Size of the key and value cache for generation."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.deck.head_split import HeadSplit
from hpctrain.model.attention.rotary import RotaryFrequencies
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.attention.paged import PageLayout
from hpctrain.parallel.kernels.functions.function_library import PAGE


@dataclass(frozen=True)
class CachePlan:
    """Size of a paged key and value cache on one rank.

    Attributes:
        sequences: Number of sequences that have space in the cache.
        tokens: Largest number of tokens of each.
        blocks: Number of blocks of the model on this rank.
        layout: Layout of a page.
        positions: Number of positions of the model, for which there are shared tables of rotary embeddings.
        rotary_tables: Number of pairs of such tables; 0 if each pass computes the rows that it needs.
    """

    sequences: int
    tokens: int
    blocks: int
    layout: PageLayout
    positions: int
    rotary_tables: int = 1

    @staticmethod
    def of(model: Transformer, sequences: int, tokens: int, as_in_training: bool = False) -> CachePlan:
        """Return a model's cache.

        Args:
            model: The model, or this rank's part of it.
            sequences: Number of sequences that have space in the cache.
            tokens: Largest number of tokens of each. The model's window limits it.
            as_in_training: True if scaled rotary positions depend on the length of the model's sequences,
                as in training. False if they depend on the length of each text.
        """
        shape, layer_context = model.shape, model.layer_context
        split = HeadSplit.of(shape.heads, shape.key_value_heads, layer_context.tensor.size)
        (_, heads), size = split.padded_heads, shape.head_size
        if (latent := shape.latent) is not None:  # a latent, with the features of keys that heads share
            heads, size = 1, latent.key_value_rank + latent.key_value_rank % 2 + latent.rotary_size
        compiled, has_rotary = layer_context.functions.compiled, shape.positions == "rotary"
        layout = PageLayout(heads, size, model.dtype, has_rotary, compiled)
        tables = 1 if shape.rope_local_base is None else 2
        if has_rotary and not as_in_training and RotaryFrequencies.of(shape).depend_on_length:
            tables = 0
        return CachePlan(
            sequences, min(tokens, shape.sequence), model.span.blocks, layout, shape.sequence, tables
        )

    @property
    def pages_per_sequence(self) -> int:
        """Largest number of pages of one sequence."""
        return -(-self.tokens // PAGE)

    @property
    def pages(self) -> int:
        """Number of pages of all sequences."""
        return self.sequences * self.pages_per_sequence

    @property
    def bytes(self) -> int:
        """Bytes of keys, values, the table of pages, and tables of rotary embeddings.

        Keys and values have 2 x blocks x tokens x heads x features elements.
        """
        elements = (
            2 * self.rotary_tables * self.positions * self.layout.head_size if self.layout.rotated else 0
        )
        return self.pages * (self.blocks * self.layout.bytes + 8) + elements * self.layout.dtype.itemsize
