"""Bytes that autograd keeps for backward."""

from __future__ import annotations

from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Part


def block_activations(
    shape: ModelShape, micro_size: int, itemsize: int, tensor: int, context: int, sequence_parallel: bool
) -> int:
    """Bytes that one block keeps of a micro-batch."""
    tokens = shape.sequence // context * micro_size
    local = tokens // tensor if sequence_parallel else tokens
    heads, shared = shape.heads * shape.head_size / tensor, shape.key_value_heads * shape.head_size
    shared = max(shared // tensor, shape.head_size)
    inner = heads + 2 * shared
    if shape.family == "gpt2":
        split = inner + heads + 2 * shape.mlp / tensor
    else:
        split = inner + (heads + shared) + heads + 4 * shape.mlp / tensor
    masks = 2 * local * shape.hidden if shape.dropout else 0
    statistics = 4 * tokens * shape.heads // tensor + 4 * local * itemsize
    return int(itemsize * (4 * local * shape.hidden + tokens * split)) + masks + statistics


def part_activations(
    shape: ModelShape,
    part: Part,
    micro_size: int,
    itemsize: int,
    tensor: int,
    context: int,
    sequence_parallel: bool,
) -> int:
    """Bytes that one part of the model keeps of a micro-batch."""
    tokens = shape.sequence // context * micro_size
    local = tokens // tensor if sequence_parallel else tokens
    block = block_activations(shape, micro_size, itemsize, tensor, context, sequence_parallel)
    total = (part.last - part.first) * block
    if part.embeds:
        total += 8 * tokens + (local * shape.hidden if shape.dropout else 0)
    if part.predicts:
        total += itemsize * shape.hidden * (local + tokens)
    return total
