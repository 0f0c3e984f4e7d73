"""Bytes of transformer blocks, and of what all blocks of a transformer share."""

from __future__ import annotations

from hpctrain.costs.layer_bytes import feed_forward_bytes, mixture_bytes
from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, DeferredBytes, SavedStorage, total
from hpctrain.costs.layer_bytes.attention_bytes import core_recompute_bytes
from hpctrain.costs.layer_bytes.linear_bytes import saved_by_adapter, saved_input
from hpctrain.costs.layer_bytes.questions import (
    allocator_gaps,
    deferred_bytes,
    exchanged_bytes,
    saved_storages,
    shared_bytes,
    unsaved_inputs,
    workspace_bytes,
)
from hpctrain.costs.layer_bytes.vocabulary_bytes import dropout_masks
from hpctrain.model.mixture import Mixture
from hpctrain.model.norm import Norm
from hpctrain.model.part import Layer
from hpctrain.model.transformer import Transformer, TransformerBlock

_GAPS, _ROTATED_GAPS = 2.4, 3.5
"""Freed memory between used blocks that the C library keeps, in units of the activations of one block.

Measured with glibc 2.36 on models of 2M to 124M parameters: the difference to the peak of a process with
MALLOC_MMAP_THRESHOLD_, which leaves no gaps and costs half of the speed. gpt2: 0.3 to 3.9 blocks. llama, with
rotary positions: 2.6 blocks after five steps and 3.8 after 250, because its norms, rotation and gate free
temporary tensors between saved ones.
"""


@saved_storages.register
def saved_by_block(block: TransformerBlock, at: ActivationSizes) -> list[SavedStorage]:
    """Return what a block saves, in the order of the forward pass."""
    masks, attention, expanding = dropout_masks(block, at), block.attention, block.feed_forward
    if isinstance(expanding, Mixture):
        expanded_input = [at.row_features(block.hidden)]
    else:
        expanded_input = saved_input(expanding.up, at)
    before_expanding = _saved_by_norm(block.feed_forward_norm, at)
    if block.parallel and block.feed_forward_norm is None:
        expanded_input = []  # attention saves the same input
    elif block.parallel:
        before_expanding = before_expanding[1:]  # both norms save the same input
    return [
        *_saved_by_norm(block.attention_norm, at),
        *saved_input(attention.inner, at),
        *saved_by_adapter(attention.inner, at),
        *saved_storages(attention, at),
        *_saved_by_norm(block.attention_output_norm, at),
        *masks,
        *before_expanding,
        *expanded_input,
        *saved_storages(expanding, at),
        *_saved_by_norm(block.feed_forward_output_norm, at),
        *masks,
    ]


def _saved_by_norm(norm: Norm | None, at: ActivationSizes) -> list[SavedStorage]:
    """Return what a norm saves: nothing if there is none."""
    return [] if norm is None else saved_storages(norm, at)


@unsaved_inputs.register
def _unsaved_of_block(block: TransformerBlock, at: ActivationSizes) -> list[SavedStorage]:
    norm = block.attention_norm
    if norm is None or (norm.weight is not None and norm.weight.requires_grad):
        return []
    return saved_storages(norm, at)


@workspace_bytes.register
def _block_workspace(block: TransformerBlock, at: ActivationSizes) -> int:
    return max(workspace_bytes(block.feed_forward, at), workspace_bytes(block.attention, at))


@deferred_bytes.register
def deferred_by_block(block: TransformerBlock, at: ActivationSizes) -> DeferredBytes:
    """Return the bytes that deferred weight gradients of a block need.

    The peak is before any of them is freed, or while the core of attention is recomputed.
    """
    attention, expanding = block.attention, block.feed_forward
    held, masks = deferred_bytes.dispatch(Layer)(block, at).deferred, total(dropout_masks(block, at))
    if isinstance(expanding, Mixture):
        most, left = mixture_bytes.transient_bytes(expanding, at)
    else:
        most, left = feed_forward_bytes.transient_bytes(expanding, at)
    if not at.selective:
        return DeferredBytes(held, most - masks)
    again = core_recompute_bytes(attention, at) + at.features(attention.inner.split_sizes[0]).bytes
    # Masks are freed by then, and the statistics of the second norm.
    gone = 2 * masks + total(_saved_by_norm(block.feed_forward_norm, at)[1:])
    return DeferredBytes(held, max(left + again - gone, most - masks))


@exchanged_bytes.register
def _exchanged_by_block(block: TransformerBlock, at: ActivationSizes) -> int:
    if not isinstance(block.feed_forward, Mixture):
        return 0
    ranks = block.feed_forward.layer_context.expert.size
    return mixture_bytes.result_storage(block.feed_forward, at).bytes * (ranks - 1) // ranks


@allocator_gaps.register
def _gaps_of_block(block: TransformerBlock, at: ActivationSizes) -> int:
    return int((_ROTATED_GAPS if block.rotated else _GAPS) * total(saved_storages(block, at)))


@shared_bytes.register
def _rotary_bytes(part: Transformer, at: ActivationSizes) -> int:
    """Return the bytes of the rotary tables."""
    rotary = 2 * at.itemsize * at.tokens // at.micro_size * part.shape.head_size
    rotary *= 1 if part.shape.rope_local_base is None else 2
    return rotary if part.shape.positions == "rotary" else 0
