"""Bytes of the embedding and of output layers."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, DeferredBytes, SavedStorage
from hpctrain.costs.layer_bytes.byte_functions import deferred_bytes, saved_storages, workspace_bytes
from hpctrain.costs.layer_bytes.linear_bytes import saved_input
from hpctrain.costs.layer_bytes.matmul_bytes import product_workspace
from hpctrain.model.block import TransformerBlock
from hpctrain.model.prediction_module import PredictionModule
from hpctrain.model.transformer import Embedding, Predictor
from hpctrain.parallel.scalar_head import ScalarHead
from hpctrain.parallel.vocabulary import VocabularyHead, chunk_rows


@saved_storages.register
def _saved_by_embedding(layer: Embedding, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return token ids, the mask of those that other ranks look up, and positions."""
    ids = 8 if layer.tokens.layer_context.tensor.size == 1 else 9
    positions = (
        8 * sizes.tokens // (1 if layer.packed else sizes.micro_size) if layer.positions is not None else 0
    )
    return [SavedStorage(ids * sizes.tokens + positions, 8, features=False), *dropout_masks(layer, sizes)]


def dropout_masks(layer: Embedding | TransformerBlock, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what dropout saves of the hidden states."""
    return [SavedStorage(sizes.rows * layer.hidden, 1, features=False)] if layer.probability else []


@saved_storages.register
def _saved_by_predictor(layer: Predictor, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what norm, modules and head save.

    The gradient of the hidden states of all depths is computed in the forward pass.
    """
    modules = layer.prediction_modules
    ids = 8 if layer.head.layer_context.tensor.size == 1 else 9
    lookups = [SavedStorage(ids * sizes.tokens * len(modules), 8, features=False)] if modules else []
    return [
        *saved_storages(layer.norm, sizes),
        *lookups,
        *(storage for module in modules for storage in saved_storages(module, sizes)),
        *saved_storages(layer.head, sizes) * (1 + len(modules)),
    ]


@saved_storages.register
def _saved_by_prediction_module(module: PredictionModule, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return what the projection with both norms, the block, and the last norm save."""
    return [
        *saved_storages(module.embedding_norm, sizes),
        *saved_storages(module.hidden_norm, sizes),
        *saved_input(module.projection, sizes),
        *saved_storages.dispatch(TransformerBlock)(module, sizes),
        *saved_storages(module.final_norm, sizes),
    ]


@deferred_bytes.register
def _deferred_by_predictor(layer: Predictor, sizes: ActivationSizes) -> DeferredBytes:
    """Return the bytes for the weight gradients of modules. The head's own gradient is computed at once."""
    of_modules = [deferred_bytes(module, sizes) for module in layer.prediction_modules]
    return DeferredBytes(
        sum(each.deferred for each in of_modules), max((each.transient for each in of_modules), default=0)
    )


@workspace_bytes.register
def _predictor_workspace(layer: Predictor, sizes: ActivationSizes) -> int:
    tokens = sizes.tokens * (1 + len(layer.prediction_modules))
    return workspace_bytes(layer.head, replace(sizes, tokens=tokens))


@saved_storages.register
def _saved_by_vocabulary_head(head: VocabularyHead, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return the gradient of the hidden states, which the forward pass computes."""
    return [sizes.features(head.table.shard.shape[1])]


@workspace_bytes.register
def _vocabulary_head_workspace(head: VocabularyHead, sizes: ActivationSizes) -> int:
    """Return the temporary bytes of a loss.

    They are the logits of a chunk, or their gradients, and what products need; or, for torch's functions in
    16 bits, a copy in fp32. Logits with a soft cap also have the derivatives of the cap, until the loss is
    computed.
    """
    count = chunk_rows(sizes.tokens, len(head.table), sizes.gpu)
    logits = count * len(head.table)
    copied = 4 if sizes.itemsize < 4 and (head.cap or not head.layer_context.functions.compiled) else 0
    derivatives = 4 if head.cap else 0
    passing = max(logits * (copied + derivatives), product_workspace(head.product, count, sizes))
    return logits * sizes.itemsize + passing


@saved_storages.register
def _saved_by_scalar_head(head: ScalarHead, sizes: ActivationSizes) -> list[SavedStorage]:
    """Return the gradient of this rank's hidden states."""
    return [sizes.row_features(head.table.shard.shape[1])]


@workspace_bytes.register
def _scalar_head_workspace(head: ScalarHead, sizes: ActivationSizes) -> int:
    """Return the temporary bytes of a loss: scores, their gradients, and hidden states in fp32."""
    wide = 4 * sizes.rows * head.table.shard.shape[1] if sizes.itemsize < 4 else 0
    return wide + 3 * 4 * sizes.tokens
