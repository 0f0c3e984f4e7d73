"""Bytes of transformer blocks, and of what all blocks of a transformer share."""

from __future__ import annotations

from hpctrain.costs.layer_bytes import feed_forward_bytes, mixture_bytes
from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, DeferredBytes, SavedStorage, total
from hpctrain.costs.layer_bytes.byte_functions import (
    core_peak_bytes,
    core_recompute_bytes,
    deferred_bytes,
    exchanged_bytes,
    saved_storages,
    shared_bytes,
    unsaved_inputs,
    workspace_bytes,
)
from hpctrain.costs.layer_bytes.linear_bytes import saved_input
from hpctrain.costs.layer_bytes.vocabulary_bytes import dropout_masks
from hpctrain.model.attention.latent_attention import LatentAttention
from hpctrain.model.block import FeedForward, TransformerBlock
from hpctrain.model.mixtures.mixture import Mixture
from hpctrain.model.norm import Norm
from hpctrain.model.part import Layer
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.fp8.quantized_matmul import QuantizedMatmul


@saved_storages.register
def saved_by_block(block: TransformerBlock, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what a block saves, in the order of the forward pass."""
    masks, attention, feed_forward = dropout_masks(block, sizes), block.attention, block.feed_forward
    if _shares_input(block):
        expanded_input = []
    elif isinstance(feed_forward, Mixture):
        expanded_input = [sizes.row_features(block.hidden)]
    else:
        expanded_input = saved_input(feed_forward.up, sizes)
    return [
        *_saved_by_norm(block.attention_norm, sizes),
        *saved_storages(attention, sizes),
        *_saved_by_norm(block.attention_output_norm, sizes),
        *masks,
        *_saved_by_second_norm(block, sizes),
        *expanded_input,
        *saved_storages(feed_forward, sizes),
        *_saved_by_norm(block.feed_forward_output_norm, sizes),
        *masks,
    ]


def _saved_by_norm(norm: Norm | None, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what a norm saves: nothing if there is none."""
    return [] if norm is None else saved_storages(norm, sizes)


def _saved_by_second_norm(block: TransformerBlock, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what the norm before the feed-forward part saves beside what the norm of attention saves."""
    saved = _saved_by_norm(block.feed_forward_norm, sizes)
    return saved[1:] if block.parallel else saved  # the norms of parallel parts save the same input


def _shares_input(block: TransformerBlock) -> bool:
    """Return True if attention saves the same input as the feed-forward part."""
    return block.parallel and block.feed_forward_norm is None


def _shares_gradient(block: TransformerBlock) -> bool:
    """Return True if the gradients of the outputs of both parts are one tensor."""
    unchanged = block.multiplier == 1 and block.probability == 0
    unchanged &= block.attention_output_norm is None and block.feed_forward_output_norm is None
    output = block.attention.output
    plain = output.sequence_group is None and not isinstance(output.product, QuantizedMatmul)
    return block.parallel and unchanged and plain and isinstance(block.feed_forward, FeedForward)


@unsaved_inputs.register
def _unsaved_of_block(block: TransformerBlock, sizes: ActivationSizes) -> list[SavedStorage]:
    norm = block.attention_norm
    if norm is None or (norm.weight is not None and norm.weight.requires_grad):
        return []
    return saved_storages(norm, sizes)


@workspace_bytes.register
def _block_workspace(block: TransformerBlock, sizes: ActivationSizes) -> int:
    return max(workspace_bytes(block.feed_forward, sizes), workspace_bytes(block.attention, sizes))


@core_peak_bytes.register
def _core_peak_of_block(block: TransformerBlock, sizes: ActivationSizes) -> int:
    """Return the bytes of the recomputed core beyond what the layers after it in the block have freed."""
    if not sizes.recomputes_core:
        return 0
    attention = block.attention
    before = total(_saved_by_norm(block.attention_norm, sizes)) + total(saved_storages(attention, sizes))
    freed = total(saved_storages(block, sizes)) - before + total(saved_input(attention.output, sizes))
    return max(0, core_recompute_bytes(attention, sizes) - freed)


@deferred_bytes.register
def deferred_by_block(block: TransformerBlock, sizes: ActivationSizes) -> DeferredBytes:
    """Return the bytes that deferred weight gradients of a block need.

    The peak is at the beginning of the backward pass, in that of the feed-forward part, or in that of the
    output layer of attention, after which the core of attention may be recomputed.
    """
    attention, feed_forward = block.attention, block.feed_forward
    deferred, mask = deferred_bytes.dispatch(Layer)(block, sizes).deferred, total(dropout_masks(block, sizes))
    output_gradient = sizes.features(block.hidden).bytes
    if isinstance(feed_forward, Mixture):
        most, remaining = mixture_bytes.transient_bytes(feed_forward, sizes)
    else:
        most, remaining = feed_forward_bytes.transient_bytes(feed_forward, sizes)
        deferred -= total(saved_input(feed_forward.up, sizes)) if _shares_input(block) else 0
    if isinstance(attention, LatentAttention) and attention.query_norm is None:
        deferred -= total(saved_input(attention.query, sizes))  # the layer of latents saves the same input
    if _shares_gradient(block):
        deferred, output_gradient = deferred - output_gradient, 0
    freed = mask + total(_saved_by_norm(block.feed_forward_output_norm, sizes))
    peak = most - freed
    freed += mask + total(_saved_by_second_norm(block, sizes))
    freed += total(_saved_by_norm(block.attention_output_norm, sizes))
    after = remaining + output_gradient - freed
    if sizes.recomputes_core:
        after += core_recompute_bytes(attention, sizes)
    return DeferredBytes(deferred, max(0, peak, after))


@exchanged_bytes.register
def _exchanged_by_block(block: TransformerBlock, sizes: ActivationSizes) -> int:
    if not isinstance(block.feed_forward, Mixture):
        return 0
    ranks = block.feed_forward.layer_context.expert.size
    return mixture_bytes.result_storage(block.feed_forward, sizes).bytes * (ranks - 1) // ranks


@shared_bytes.register
def _rotary_bytes(part: Transformer, sizes: ActivationSizes) -> int:
    """Return the bytes of the rotary tables: those of its blocks, or all if blocks are recomputed."""
    if not part.rotates:
        return 0
    rotary = 2 * sizes.itemsize * sizes.tokens // sizes.micro_size * part.shape.head_size
    kinds = 1 if part.shape.rope_local_base is None else 2
    if not sizes.recomputes_blocks:
        rotated = (each for each in part.layers if isinstance(each, TransformerBlock) and each.uses_rotary)
        kinds = min(kinds, len({block.attention.uses_local_tables for block in rotated}))
    return kinds * rotary
