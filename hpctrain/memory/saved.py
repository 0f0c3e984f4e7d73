"""Activation memory in closed form: what is kept for backward, and what the published formula says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hpctrain.deck.schema import Deck
from hpctrain.memory.compress import ActivationFormat, compressed_bytes
from hpctrain.memory.recompute import segment_size
from hpctrain.model.frozen import embedding_trained, silent_blocks
from hpctrain.model.part import Layer, ModelPart, blocks_of
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape, Recomputed
from hpctrain.objective.factory import make_objective
from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage, total


def gpt_activation_bytes(shape: ModelShape, micro_size: int, tensor: int, sequence_parallel: bool) -> int:
    """Bytes of one GPT-2 layer's saved activations on one rank, in a 16-bit format, with dropout.

    Korthikanti et al. 2022 (arXiv 2205.05198), equations 2 and 4 without the terms 5as/h of the attention
    matrix, which fused attention does not keep: s b h (10 + 24/t), with sequence parallelism 34 s b h / t.
    Without dropout the two masks of a byte an element are not there: 2 s b h, or 2 s b h / t, less.
    """
    assert shape.family == "gpt2" and shape.mlp == 4 * shape.hidden, shape
    elements = shape.sequence * micro_size * shape.hidden
    unsplit = 10 if shape.dropout else 8
    if sequence_parallel:
        return elements * (unsplit + 24) // tensor
    return elements * unsplit + 24 * elements // tensor


def packed_bytes(storage: SavedStorage, form: ActivationFormat) -> int:
    """Bytes of a storage in a format."""
    length = storage.bytes // storage.itemsize
    return compressed_bytes(length, storage.itemsize, form if storage.features else "exact")


@dataclass(frozen=True)
class PartBytes:
    """What autograd saves of one micro-batch in a part of a model on one rank, as its layers tell it."""

    part: ModelPart
    at: ActivationSizes
    recompute: Recomputed

    @property
    def blocks(self) -> list[Layer]:
        """Those of the part."""
        return blocks_of(self.part)

    @property
    def segment_size(self) -> int:
        """Blocks of a segment, or one where their forward passes are kept."""
        return segment_size(self.recompute, len(self.blocks)) or 1

    @property
    def hidden(self) -> SavedStorage:
        """The hidden states between layers."""
        size = prod(self.part.hidden_shape(self.at.micro_size)) * self.at.itemsize
        return SavedStorage(size, self.at.itemsize)

    @property
    def embedding(self) -> int:
        """Bytes of what comes before the blocks, or in a module also between them."""
        first = self.part.layers[0]
        return total(first.saved(self.at)) if self._is_beside(first, self.part.span.embeds) else 0

    @property
    def head(self) -> int:
        """Bytes of what comes after the blocks: final norm and loss."""
        last = self.part.layers[-1]
        return total(last.saved(self.at)) if self._is_beside(last, self.part.span.predicts) else 0

    def _is_beside(self, layer: Layer, of_end: bool) -> bool:
        """Whether a layer is none of the blocks: the only one is what it is at that end of the model."""
        return of_end if len(self.part.layers) == 1 else not layer.is_block

    @property
    def shared(self) -> int:
        """Bytes of what all blocks share."""
        return self.part.shared_bytes(self.at) if self.blocks else 0

    def seen(self, silent: int = 0) -> list[Layer]:
        """The blocks of the segments of which something is kept: none of those that lie within the first
        `silent` blocks, which autograd does not see.
        """
        blocks, size = self.blocks, self.segment_size
        return blocks[silent // size * size :] if silent < len(blocks) else []

    def segments(self, silent: int = 0) -> list[list[SavedStorage]]:
        """What is kept of each of these: of a block, or of what is computed again as a whole."""
        seen = self.seen(silent)
        if self.recompute in {"none", "selective"}:
            saved = [block.saved(self.at) for block in seen]
            if seen and not embedding_trained(self.part) and not self.part.residency.gathers:
                saved[0] = saved[0][len(seen[0].unseen(self.at)) :]
            return saved
        own = [block.computed_again(self.at) for block in seen[:: self.segment_size]]
        return [[self.hidden] if each is None else each[0] for each in own]

    @property
    def exchanged(self) -> int:
        """Bytes that a micro-batch's exchanges with experts take from this rank to others, where their loads
        are even: there and back, in forward, in backward, and in what is computed again.
        """
        silent = silent_blocks(self.part)
        again = 2 if segment_size(self.recompute, len(self.blocks)) else 0
        forward = sum(2 * block.exchanged(self.at) for block in self.blocks)
        backward = sum(2 * block.exchanged(self.at) for block in self.blocks[silent:])
        return forward + backward + sum(again * block.exchanged(self.at) for block in self.seen(silent))

    @property
    def unknown(self) -> str | None:
        """Why it is not known, where it is not."""
        return next((why for layer in self.part.layers if (why := layer.unknown(self.at))), None)

    @property
    def of_blocks(self) -> int:
        """Bytes that the blocks keep from a micro-batch's forward to its backward."""
        return sum(map(total, self.segments())) + self.shared

    @property
    def of_part(self) -> int:
        """Those that the whole part keeps."""
        return self.of_blocks + self.embedding + self.head

    @property
    def again(self) -> list[int]:
        """Bytes that are there besides while each segment of the part is computed again, in backward."""
        saved, size = [block.saved(self.at) for block in self.blocks], self.segment_size
        if not segment_size(self.recompute, len(saved)):
            return [0] * len(saved)
        own = [again for block in self.blocks if (again := block.computed_again(self.at)) is not None]
        if own:
            return [besides for _, besides in own]
        each = [total(storages) for storages in saved]
        # The first block saves the input itself, unless its norm keeps a copy in another format.
        known = [storages[0].bytes if storages[0] == self.hidden else 0 for storages in saved]
        return [sum(each[first : first + size]) - known[first] for first in range(0, len(each), size)]


def part_bytes(deck: Deck, parts: Sequence[ModelPart], gpu: bool, recompute: Recomputed) -> list[PartBytes]:
    """What autograd saves of a micro-batch in these parts with this recomputation; `gpu` decides what norms
    save.
    """
    layout, micro_size = deck.layout, deck.batch.micro_size
    tokens = deck.batch.sequence // layout.context * micro_size
    rows = tokens // layout.tensor if layout.sequence_parallel else tokens
    formats = Precision.of(deck)
    itemsizes = formats.storage.itemsize, formats.gradient.itemsize
    objective = None if deck.model.module is None else make_objective(deck)
    again = recompute not in {"none", "selective"}
    at = ActivationSizes(
        tokens, rows, micro_size, *itemsizes, gpu, recompute == "selective", again, objective
    )
    return [PartBytes(part, at, recompute) for part in parts]
