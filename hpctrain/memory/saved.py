"""Activation memory in closed form: what is kept for backward, and what the published formula says."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpctrain.memory.compress import ActivationFormat, compressed_bytes
from hpctrain.memory.recompute import segment_size
from hpctrain.model.shape import ModelShape, Recomputed
from hpctrain.parallel.groups import ContextForm


def gpt_activation_bytes(
    shape: ModelShape, micro_size: int, tensor: int, sequence_parallel: bool, context: int = 1
) -> int:
    """Bytes of one GPT-2 layer's saved activations on one rank, in a 16-bit format, with dropout.

    Korthikanti et al. 2022 (arXiv 2205.05198), equations 2 and 4 without the terms 5as/h of the attention
    matrix, which fused attention does not keep: s b h (10 + 24/t), with sequence parallelism 34 s b h / t.
    Without dropout the two masks of a byte an element are not there: 2 s b h, or 2 s b h / t, less.
    """
    assert shape.family == "gpt2" and shape.mlp == 4 * shape.hidden, shape
    rows = shape.sequence // context * micro_size * shape.hidden
    masks = 2 if shape.dropout else 0
    whole = 8 + masks
    return rows * (whole + 24) // tensor if sequence_parallel else rows * whole + 24 * rows // tensor


def statistics_bytes(
    shape: ModelShape, micro_size: int, tensor: int, sequence_parallel: bool, context: int = 1
) -> int:
    """Bytes that the formula leaves out: means and deviations of two norms, log-sum-exps of attention.

    The former are kept in the activations' 16-bit format on the CPU, the latter in fp32.
    """
    tokens = shape.sequence // context * micro_size
    norms = 2 * 2 * 2 * tokens // (tensor if sequence_parallel else 1)
    return norms + 4 * tokens * shape.heads // tensor


@dataclass(frozen=True)
class Storage:
    """Memory that autograd saves: bytes, bytes of an element, and whether these are features of tokens, which
    may be compressed.
    """

    bytes: int
    itemsize: int
    features: bool = True

    def compressed(self, form: ActivationFormat) -> int:
        """Bytes in a format."""
        return compressed_bytes(
            self.bytes // self.itemsize, self.itemsize, form if self.features else "exact"
        )


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes that autograd saves of one micro-batch on one rank; see `activation_bytes`.

    `storages` of a block whose forward pass is kept, in the order of the forward pass, `hidden` of the hidden
    states between blocks, `shared` of what all blocks of a part share, `embedding` of the part that embeds,
    `head` of the one that predicts: final norm and loss. `waiting` is held of a block by weight gradients
    that are computed later than the rest of its backward pass; `waiting_first` is there besides before
    anything of it goes, `waiting_core` while the core of its attention is computed again.
    """

    storages: tuple[Storage, ...]
    hidden: Storage
    shared: int
    embedding: int
    head: int
    waiting: int
    waiting_first: int
    waiting_core: int
    recompute: Recomputed = "none"

    @property
    def block(self) -> int:
        """Of a block whose forward pass is kept."""
        return sum(storage.bytes for storage in self.storages)

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
        kept = self.segments(blocks) * sum(storage.bytes for storage in self.segment)
        kept += self.shared if blocks else 0
        return kept + (self.embedding if embeds else 0) + (self.head if predicts else 0)

    def again(self, blocks: int) -> int:
        """What is there besides while the longest segment of a part is computed again, in backward."""
        size = segment_size(self.recompute, blocks)
        return size * self.block - self.hidden.bytes if size else 0


def activation_bytes(
    shape: ModelShape,
    micro_size: int,
    dtype: torch.dtype,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    context: int = 1,
    context_form: ContextForm = "ring",
    recompute: Recomputed = "none",
    device: str = "cpu",
) -> ActivationBytes:
    """What autograd saves of `micro_size` sequences, each storage once.

    `dtype` is that of weights and activations; `device` ("cpu" or "cuda") decides what norms save.
    """
    size = dtype.itemsize
    tokens = shape.sequence // context * micro_size
    rows = tokens // tensor if sequence_parallel else tokens
    hidden = Storage(size * rows * shape.hidden, size)
    mask = [Storage(rows * shape.hidden, 1, features=False)] if shape.dropout else []
    norm = _norm(shape, rows, size, device)
    inner = size * tokens * shape.mlp // tensor
    gated = shape.family == "llama"
    # GELU's input and output; or gate and up, which are one, their product's other factor, and the product.
    expanded = [Storage(2 * inner, size)] if gated else []
    expanded += [Storage(inner, size)] * 2
    core = _attention(shape, tokens, size, tensor, context, context_form, recompute)
    tables = 2 * size * shape.sequence // context * shape.head_size if gated else 0
    # Token ids, with a mark of those that other ranks look up; and the places of the learned positions.
    embedding = (8 if tensor == 1 else 9) * tokens + sum(storage.bytes for storage in mask)
    if shape.family == "gpt2":
        embedding += 8 * shape.sequence // context
    # Inputs and output gradients of the four linear layers.
    unit = size * tokens * shape.head_size
    heads, shared = shape.heads // tensor, max(1, shape.key_value_heads // tensor)
    whole = size * tokens * shape.hidden
    waiting = hidden.bytes + (heads + 2 * shared) * unit + heads * unit + whole
    waiting += hidden.bytes + (2 if gated else 1) * inner + inner + whole
    masks = sum(storage.bytes for storage in mask)
    again = heads * unit - sum(storage.bytes for storage in core)
    again += sum(s.bytes for s in _attention(shape, tokens, size, tensor, context, context_form, "none"))
    # By then masks are gone, what the second norm keeps for itself alone, and one factor of a gate.
    gone = 2 * masks + sum(storage.bytes for storage in norm[1:]) + (inner if gated else 0)
    return ActivationBytes(
        storages=(*norm, hidden, *core, *mask, *norm, hidden, *expanded, *mask),
        hidden=hidden,
        shared=tables,
        embedding=embedding,
        head=sum(storage.bytes for storage in norm) + whole,
        waiting=waiting,
        waiting_first=whole - masks,
        waiting_core=whole - gone + again if recompute == "selective" else 0,
        recompute=recompute,
    )


def _norm(shape: ModelShape, rows: int, size: int, device: str) -> list[Storage]:
    """A norm's input and statistics; RMSNorm on the CPU keeps input and normalized input in fp32."""
    statistic = 4 if device == "cuda" else size
    if shape.family == "gpt2":
        return [Storage(size * rows * shape.hidden, size), *[Storage(statistic * rows, statistic, False)] * 2]
    inputs = [size] if device == "cuda" else [4, 4]
    return [
        *(Storage(each * rows * shape.hidden, each) for each in inputs),
        Storage(4 * rows, 4, features=False),
    ]


def _attention(
    shape: ModelShape,
    tokens: int,
    size: int,
    tensor: int,
    context: int,
    context_form: ContextForm,
    recompute: Recomputed,
) -> list[Storage]:
    """The core's inputs as it keeps them, its output, and the log-sum-exp unless it is computed again."""
    unit = size * tokens * shape.head_size
    heads, shared = shape.heads // tensor, max(1, shape.key_value_heads // tensor)
    projected, output = Storage((heads + 2 * shared) * unit, size), Storage(heads * unit, size)
    if recompute == "selective":
        return [projected, output]
    log_sum = Storage(4 * tokens * heads, 4, features=False)
    if context > 1 and context_form == "all_to_all":
        # The exchanged queries, keys, values and output, and the output as it comes back.
        exchanged = Storage(max(shared, context) * unit, size)
        return [output, exchanged, exchanged, output, log_sum, output]
    rotated = [output, Storage(shared * unit, size)] if shape.family == "llama" else []
    return [projected, *rotated, output, log_sum]
