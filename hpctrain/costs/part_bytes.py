"""Closed forms of activation memory: what autograd keeps for the backward pass, and a published formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hpctrain.costs.compressed_bytes import compressed_bytes
from hpctrain.costs.layer_bytes import byte_functions
from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, SavedStorage, total
from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.deck.schema import Deck
from hpctrain.memory.compress import ActivationFormat
from hpctrain.memory.recompute import segment_size
from hpctrain.model.parameters.frozen import blocks_without_backward, embedding_trained
from hpctrain.model.part import Layer, ModelPart, blocks_of
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape, Recomputed
from hpctrain.model.transformer import Predictor
from hpctrain.objective.factory import make_objective


def has_gpt_layers(shape: ModelShape) -> bool:
    """Return True if the layers save what those of GPT save: `gpt_activation_bytes` is for them."""
    layers = shape.positions, shape.norm, shape.norm_placement, shape.parallel_residual, shape.query_key_norm
    are_gpt = layers == ("learned", "layer", "before", "none", "none") and shape.norm_bias
    return are_gpt and not ACTIVATIONS[shape.activation].gated and shape.mlp == 4 * shape.hidden


def gpt_activation_bytes(shape: ModelShape, micro_size: int, tensor: int, sequence_parallel: bool) -> int:
    """Return the bytes of one GPT-2 layer's saved activations on one rank, in a 16-bit format, with dropout.

    Korthikanti et al. 2022 (arXiv 2205.05198), equations 2 and 4 without the terms 5as/h of the attention
    matrix, which fused attention does not keep: s b h (10 + 24/t), with sequence parallelism 34 s b h / t.
    Without dropout the two masks of a byte per element do not exist: 2 s b h, or 2 s b h / t, less.
    """
    assert has_gpt_layers(shape), shape
    elements = shape.sequence * micro_size * shape.hidden
    unsplit = 10 if shape.dropout else 8
    if sequence_parallel:
        return elements * (unsplit + 24) // tensor
    return elements * unsplit + 24 * elements // tensor


def packed_bytes(storage: SavedStorage, form: ActivationFormat) -> int:
    """Return the bytes of a saved storage after compression."""
    length = storage.bytes // storage.itemsize
    return compressed_bytes(length, storage.itemsize, form if storage.features else "exact")


@dataclass(frozen=True)
class PartBytes:
    """Bytes that autograd saves of one micro-batch in one part of a model on one rank.

    Attributes:
        part: The part.
        sizes: Sizes of a micro-batch on this rank.
        recompute: Kind of recomputation.
    """

    part: ModelPart
    sizes: ActivationSizes
    recompute: Recomputed

    @property
    def blocks(self) -> list[Layer]:
        """Blocks of the part."""
        return blocks_of(self.part)

    @property
    def segment_size(self) -> int:
        """Number of blocks of a segment; 1 without recomputation."""
        return segment_size(self.recompute, len(self.blocks)) or 1

    @property
    def hidden(self) -> SavedStorage:
        """Hidden states between layers."""
        size = prod(self.part.hidden_shape(self.sizes.micro_size)) * self.sizes.itemsize
        return SavedStorage(size, self.sizes.itemsize)

    @property
    def embedding(self) -> int:
        """Bytes saved before the blocks; in a user's module also between them."""
        return self._end_bytes(self.part.layers[0], self.part.span.has_embedding)

    @property
    def head(self) -> int:
        """Bytes saved after the blocks, by the final norm and the loss."""
        return self._end_bytes(self.part.layers[-1], self.part.span.has_head)

    def _end_bytes(self, layer: Layer, is_end: bool) -> int:
        """Return the bytes saved by the first or the last layer, or 0 if it is a block.

        For the only layer of a part, `is_end` decides: True if the part has that end of the model.
        """
        is_end = is_end if len(self.part.layers) == 1 else not layer.is_block
        return total(byte_functions.saved_storages(layer, self.sizes)) if is_end else 0

    @property
    def head_deferred(self) -> int:
        """Bytes that deferred weight gradients keep after the blocks: those of MTP modules."""
        last = self.part.layers[-1]
        return byte_functions.deferred_bytes(last, self.sizes).deferred if isinstance(last, Predictor) else 0

    @property
    def shared(self) -> int:
        """Bytes of tensors that all blocks share."""
        return byte_functions.shared_bytes(self.part, self.sizes) if self.blocks else 0

    def saved_blocks(self, unsaved: int = 0) -> list[Layer]:
        """Return the blocks of the segments that save something.

        Args:
            unsaved: Number of first blocks that save nothing, since nothing before or in them is trained.
        """
        blocks, size = self.blocks, self.segment_size
        return blocks[unsaved // size * size :] if unsaved < len(blocks) else []

    def saved_segments(self, unsaved: int = 0) -> list[list[SavedStorage]]:
        """Return the saved storages of each of these blocks or, with recomputation, of each segment."""
        blocks = self.saved_blocks(unsaved)
        if self.recompute in {"none", "selective"}:
            saved = [byte_functions.saved_storages(block, self.sizes) for block in blocks]
            if blocks and not embedding_trained(self.part) and not self.part.residency.gathers:
                saved[0] = saved[0][len(byte_functions.unsaved_inputs(blocks[0], self.sizes)) :]
            return saved
        segments = [
            byte_functions.recomputed_bytes(block, self.sizes) for block in blocks[:: self.segment_size]
        ]
        return [[self.hidden] if each is None else each[0] for each in segments]

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that this rank sends to experts and back per micro-batch, if their loads are balanced.

        They include forward, backward and recomputation.
        """
        unsaved = blocks_without_backward(self.part)
        recomputed = self.saved_blocks(unsaved) if segment_size(self.recompute, len(self.blocks)) else []
        passes = *self.blocks, *self.blocks[unsaved:], *recomputed
        return 2 * sum(byte_functions.exchanged_bytes(block, self.sizes) for block in passes)

    @property
    def unknown_reason(self) -> str | None:
        """Explanation why the bytes are not known; None if they are."""
        reasons = (byte_functions.unknown_reason(layer, self.sizes) for layer in self.part.layers)
        return next(filter(None, reasons), None)

    @property
    def block_bytes(self) -> int:
        """Bytes that the blocks keep of a micro-batch between forward and backward."""
        return sum(map(total, self.saved_segments())) + self.shared

    @property
    def total_bytes(self) -> int:
        """Bytes that the whole part keeps of a micro-batch between forward and backward."""
        return self.block_bytes + self.embedding + self.head

    @property
    def core_peaks(self) -> list[int]:
        """For each block, the additional bytes while it recomputes the core of attention."""
        return [byte_functions.core_peak_bytes(block, self.sizes) for block in self.blocks]

    @property
    def recompute_bytes(self) -> list[int]:
        """For each segment, the additional bytes while it is recomputed in the backward pass."""
        saved, size = (
            [byte_functions.saved_storages(block, self.sizes) for block in self.blocks],
            self.segment_size,
        )
        if not segment_size(self.recompute, len(saved)):
            return [0] * len(saved)
        recomputed = [byte_functions.recomputed_bytes(block, self.sizes) for block in self.blocks]
        if any(recomputed):
            return [each[1] for each in recomputed if each is not None]
        block_bytes = [total(storages) for storages in saved]
        # The first block saves the segment's input, which exists anyway, unless its norm saves a copy.
        input_bytes = [storages[0].bytes if storages[0] == self.hidden else 0 for storages in saved]
        return [
            sum(block_bytes[first : first + size]) - input_bytes[first]
            for first in range(0, len(block_bytes), size)
        ]


def part_bytes(deck: Deck, parts: Sequence[ModelPart], gpu: bool, recompute: Recomputed) -> list[PartBytes]:
    """Return the bytes that autograd saves of a micro-batch in each of the parts.

    Args:
        deck: The deck.
        parts: Model parts of one rank.
        gpu: True for the kernels of a GPU, whose norms save other tensors.
        recompute: Kind of recomputation.
    """
    layout, micro_size = deck.layout, deck.batch.micro_size
    tokens = deck.batch.sequence // layout.context * micro_size
    rows = tokens // layout.tensor if layout.sequence_parallel else tokens
    formats = Precision.of(deck)
    itemsizes = formats.storage.itemsize, formats.gradient.itemsize
    objective = None if deck.model.module is None else make_objective(deck)
    recomputed = recompute not in {"none", "selective"}
    sizes = ActivationSizes(
        tokens, rows, micro_size, *itemsizes, gpu, recompute == "selective", recomputed, objective
    )
    return [PartBytes(part, sizes, recompute) for part in parts]
