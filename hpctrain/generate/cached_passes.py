"""Forward passes of a transformer with a key and value cache.

They have the bits of passes over whole texts, except for texts beyond the original length of the rotary
scaling "dynamic": cached keys keep the frequencies of the text length at which they were computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.costs.cache_plan import CachePlan
from hpctrain.generate.continuous_batching import (
    ForwardPasses,
    GeneratedText,
    PassTokens,
    PendingTokens,
    TokenSampler,
)
from hpctrain.generate.key_value_cache import KeyValueCache
from hpctrain.generate.pipeline_stages import PipelineStages
from hpctrain.model.attention.rotary import RotaryFrequencies
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.vocabulary import VocabularyHead

MAX_TOKENS_PER_PASS = 256
"""Largest number of tokens of a pass. Most belong to prompts, and other texts wait for them."""


def can_cache(model: Transformer) -> bool:
    """Return True if the hidden states of a token depend only on the earlier tokens of its text.

    They depend on other texts if experts have a capacity, which makes them drop tokens.
    """
    experts = model.shape.experts
    return experts is None or experts.capacity is None


class CachedPasses(ForwardPasses):
    """Forward passes of a transformer with a KeyValueCache.

    Args:
        model: The model, or the layers of this rank's pipeline stage.
        plan: Size of the cache.
        min_rows: Number of rows to which passes are padded, see `min_invariant_rows`.
        max_tokens_per_pass: Largest number of tokens of a pass.

    Attributes:
        cache: The cache.
        stages: Stages of the model.
    """

    def __init__(
        self,
        model: Transformer,
        plan: CachePlan,
        min_rows: int,
        max_tokens_per_pass: int = MAX_TOKENS_PER_PASS,
    ) -> None:
        self.model, self.min_rows, self.max_tokens_per_pass = model, min_rows, max_tokens_per_pass
        self.cache, self.stages = KeyValueCache(model, plan), PipelineStages(model)
        self.group_count = self.stages.count
        self.window, self.slot_count = model.shape.sequence, plan.sequences
        self.max_cached_length = self.window if can_cache(model) else 0
        self.short_text_limit = None
        if plan.layout.rotated and not plan.rotary_tables:
            self.short_text_limit = RotaryFrequencies.of(model.shape).short_text_limit

    @override
    def allocate_slot(self) -> int:
        return self.cache.allocate_slot()

    @override
    def free_slot(self, slot: int) -> None:
        self.cache.free_slot(slot)

    @override
    @torch.no_grad()
    def share_prefix(self, source: int, slot: int, count: int) -> None:
        self.cache.share_prefix(source, slot, count)

    @override
    @torch.no_grad()
    def run_cached(self, pieces: Sequence[PassTokens]) -> Tensor:
        runs = [(piece.slot, piece.first, len(piece.tokens)) for piece in pieces]
        token_ids = [token for piece in pieces for token in piece.tokens]
        padding = max(0, self.min_rows - len(token_ids))
        text_lengths = [piece.text_length for piece in pieces]
        if padding:
            runs.append((-1, 0, padding))
            text_lengths.append(1)
        cache_pass = self.cache.start_pass(runs, text_lengths)
        device = self.model.layer_context.tensor.device
        tokens = torch.tensor([token_ids + [0] * padding], device=device)
        inputs = ModelInputs({"tokens": tokens}, cache_pass.token_positions.positions, cache=cache_pass)
        hidden = self.stages.run_layers(inputs)
        rows = list(_predicting_rows(pieces))
        if not self.model.span.has_head:
            return hidden.new_empty(len(rows), 0)
        if not rows:
            return hidden.new_empty(0, self.model.shape.vocabulary)
        padded_rows = rows + rows[:1] * (self.min_rows - len(rows))
        logits: Tensor = self.model.predict(hidden[padded_rows], VocabularyHead.logits)[: len(rows), 0]
        return logits

    @override
    @torch.no_grad()
    def run_windows(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self.model.layer_context.tensor.device)
        hidden = self.stages.run_layers(ModelInputs.of_texts(tokens))
        if not self.model.span.has_head:
            return hidden.new_empty(len(tokens), 0)
        logits: Tensor = self.model.predict(hidden[-self.min_rows :], VocabularyHead.logits)[-1]
        return logits

    @override
    def start_sampling(
        self, sampler: TokenSampler, texts: Sequence[GeneratedText], logits: Tensor
    ) -> PendingTokens:
        return self.stages.start_sampling(sampler, texts, logits)


def _predicting_rows(pieces: Sequence[PassTokens]) -> Iterable[int]:
    """Yield the row of the last token of each piece that predicts a token."""
    end = 0
    for piece in pieces:
        end += len(piece.tokens)
        if piece.predicts:
            yield end - 1
