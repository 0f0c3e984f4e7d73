"""Activation memory in closed form: what is kept for backward, and what the published formula says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.deck.schema import Deck
from hpctrain.memory.compress import ActivationFormat, compressed_bytes
from hpctrain.memory.recompute import segment_size
from hpctrain.model.build import bare_model
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape, Recomputed
from hpctrain.parallel.saved import Saving, Storage, total


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


def packed_bytes(storage: Storage, form: ActivationFormat) -> int:
    """Bytes of a storage in a format."""
    length = storage.bytes // storage.itemsize
    return compressed_bytes(length, storage.itemsize, form if storage.features else "exact")


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes that autograd saves of one micro-batch on one rank; see `activation_bytes`.

    `storages` of a block whose forward pass is kept, in the order of the forward pass, `hidden` of the hidden
    states between blocks, `shared` of what all blocks of a part share, `embedding` of the part that embeds,
    `head` of the one that predicts: final norm and loss. `waiting` is held of a block by weight gradients
    that are computed later than the rest of its backward pass; `waiting_first` is there besides before
    anything of it goes, `waiting_core` while the core of its attention is computed again. The workspaces are
    what the backward pass of a block and the loss need in passing. `tokens` are those of the rank's piece.
    """

    tokens: int
    storages: tuple[Storage, ...]
    hidden: Storage
    shared: int
    embedding: int
    head: int
    waiting: int
    waiting_first: int
    waiting_core: int
    block_workspace: int
    head_workspace: int
    recompute: Recomputed = "none"

    @property
    def block(self) -> int:
        """Of a block whose forward pass is kept."""
        return total(self.storages)

    def segments(self, blocks: int, silent: int = 0) -> int:
        """Of how many pieces of a part something is kept: blocks, or what is computed again as a whole.

        None is of those that lie within the first `silent` blocks, which autograd does not see.
        """
        size = segment_size(self.recompute, blocks) or 1
        return -(-self.seen(blocks, silent) // size)

    def seen(self, blocks: int, silent: int) -> int:
        """Blocks of these pieces."""
        size = segment_size(self.recompute, blocks) or 1
        return blocks - silent // size * size if silent < blocks else 0

    @property
    def segment(self) -> tuple[Storage, ...]:
        """What is kept of a segment of blocks."""
        return self.storages if self.recompute in {"none", "selective"} else (self.hidden,)

    def of_part(self, blocks: int, embeds: bool = False, predicts: bool = False) -> int:
        """What a part of the model keeps from a micro-batch's forward to its backward."""
        size = self.segments(blocks) * total(self.segment) + (self.shared if blocks else 0)
        return size + (self.embedding if embeds else 0) + (self.head if predicts else 0)

    def again(self, blocks: int) -> int:
        """What is there besides while the longest segment of a part is computed again, in backward."""
        size = segment_size(self.recompute, blocks)
        return size * self.block - self.hidden.bytes if size else 0


def activation_bytes(deck: Deck, shape: ModelShape, gpu: bool, recompute: Recomputed) -> ActivationBytes:
    """What autograd saves of a micro-batch on one rank of the deck's layout with this recomputation, each
    storage once; `gpu` decides what norms save.
    """
    layout, micro_size = deck.layout, deck.batch.micro_size
    tensor, split = layout.tensor, layout.sequence_parallel
    model = bare_model(replace(shape, layers=1), tensor, split, layout.context, layout.context_form)
    tokens = shape.sequence // layout.context * micro_size
    rows = tokens // tensor if split else tokens
    formats = Precision.of(deck)
    itemsizes = formats.storage.itemsize, formats.gradient.itemsize
    at = Saving(tokens, rows, micro_size, *itemsizes, gpu, recompute == "selective")
    embedding, block, predictor = model.layers
    waiting, waiting_first, waiting_core = block.waiting(at)
    return ActivationBytes(
        tokens=tokens,
        storages=tuple(block.saved(at)),
        hidden=at.row_features(shape.hidden),
        shared=model.shared_bytes(at),
        embedding=total(embedding.saved(at)),
        head=total(predictor.saved(at)),
        waiting=waiting,
        waiting_first=waiting_first,
        waiting_core=waiting_core,
        block_workspace=block.workspace(at),
        head_workspace=predictor.workspace(at),
        recompute=recompute,
    )
