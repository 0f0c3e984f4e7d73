"""Activation memory: what autograd really keeps for backward, and what the published formula says."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from hpctrain.model.shape import ModelShape, Recomputed
from hpctrain.parallel.groups import ContextForm
from hpctrain.sharding.recompute import segment_size


class SavedTensors:
    """Counts the bytes that autograd saves while it is active, each storage once.

    Parameters and other tensors named in `without` are not counted.
    """

    def __init__(self, without: list[Tensor]) -> None:
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in without}
        self.bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


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
class ActivationBytes:
    """Bytes that autograd saves of one micro-batch on one rank; see `activation_bytes`.

    `block` of a block whose forward pass is kept, `hidden` of the hidden states between blocks, `shared` of
    what all blocks of a part share, `embedding` of the part that embeds, `head` of the one that predicts:
    final norm and loss.
    """

    block: int
    hidden: int
    shared: int
    embedding: int
    head: int
    recompute: Recomputed = "none"

    def of_part(self, blocks: int, embeds: bool = False, predicts: bool = False) -> int:
        """What a part of the model keeps from a micro-batch's forward to its backward."""
        size = segment_size(self.recompute, blocks)
        kept = -(-blocks // size) * self.hidden if size else blocks * self.block
        kept += self.shared if blocks else 0
        return kept + (self.embedding if embeds else 0) + (self.head if predicts else 0)

    def again(self, blocks: int) -> int:
        """What is there besides while the longest segment of a part is computed again, in backward."""
        size = segment_size(self.recompute, blocks)
        return size * self.block - self.hidden if size else 0


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
    hidden = size * rows * shape.hidden
    mask = rows * shape.hidden if shape.dropout else 0
    norm = _norm_bytes(shape, rows, size, device)
    inner = size * tokens * shape.mlp // tensor
    feed_forward = norm + hidden + (4 if shape.family == "llama" else 2) * inner + mask
    attention = norm + hidden + mask
    attention += _attention_bytes(shape, tokens, size, tensor, context, context_form, recompute)
    tables = 2 * size * shape.sequence // context * shape.head_size if shape.family == "llama" else 0
    # Token ids, with a mark of those that other ranks look up; and the places of the learned positions.
    embedding = (8 if tensor == 1 else 9) * tokens + mask
    if shape.family == "gpt2":
        embedding += 8 * shape.sequence // context
    return ActivationBytes(
        block=attention + feed_forward,
        hidden=hidden,
        shared=tables,
        embedding=embedding,
        head=norm + size * tokens * shape.hidden,
        recompute=recompute,
    )


def _norm_bytes(shape: ModelShape, rows: int, size: int, device: str) -> int:
    """A norm's input and statistics; RMSNorm on the CPU keeps input and normalized input in fp32."""
    statistic = 4 if device == "cuda" else size
    if shape.family == "gpt2":
        return size * rows * shape.hidden + 2 * statistic * rows
    return (size if device == "cuda" else 8) * rows * shape.hidden + 4 * rows


def _attention_bytes(
    shape: ModelShape,
    tokens: int,
    size: int,
    tensor: int,
    context: int,
    context_form: ContextForm,
    recompute: Recomputed,
) -> int:
    """The core's inputs as it keeps them, its output, and the log-sum-exp unless it is computed again."""
    unit = size * tokens * shape.head_size
    heads, shared = shape.heads // tensor, max(1, shape.key_value_heads // tensor)
    projected, output = (heads + 2 * shared) * unit, heads * unit
    if recompute == "selective":
        return projected + output
    log_sum = 4 * tokens * heads
    if context > 1 and context_form == "all_to_all":
        # The exchanged queries, keys, values and output, and the output as it comes back.
        return (heads + 2 * max(shared, context)) * unit + 2 * output + log_sum
    rotated = (heads + shared) * unit if shape.family == "llama" else 0
    return projected + rotated + output + log_sum
