"""Forward passes of a module of `transformers`: each token takes a pass over the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.errors import HpctrainError
from hpctrain.generate.continuous_batching import (
    ForwardPasses,
    GeneratedText,
    PassTokens,
    PendingTokens,
    TokenSampler,
    sample_now,
)
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.modules.module_call import find_logits
from hpctrain.model.modules.module_part import ModulePart


@torch.no_grad()
def module_logits(part: ModulePart, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, V] of tokens [b, s] by a module, all of which is on this rank.

    Raises:
        HpctrainError: The module returns no logits.
    """
    tokens = tokens.to(part.layer_context.tensor.device)
    fields = {"tokens": tokens, "targets": torch.full_like(tokens, -1)}
    logits = find_logits(part(ModelInputs(fields, torch.arange(tokens.shape[1], device=tokens.device))))
    if logits is None or logits.dim() != 3:
        raise HpctrainError(f"{part.title}: returns no logits, so no text can be generated")
    return logits


class ModulePasses(ForwardPasses):
    """Forward passes of a module without a cache. All methods are local.

    Args:
        part: The module, all of which is on this rank.
        slot_count: Largest number of texts that are generated at the same time.
    """

    max_cached_length = 0
    max_tokens_per_pass = 1
    group_count = 1
    short_text_limit: int | None = None

    def __init__(self, part: ModulePart, slot_count: int) -> None:
        self.part, self.slot_count = part, slot_count
        self.window = part.architecture.sequence

    @override
    def allocate_slot(self) -> int:
        raise NotImplementedError

    @override
    def free_slot(self, slot: int) -> None:
        raise NotImplementedError

    @override
    def share_prefix(self, source: int, slot: int, count: int) -> None:
        raise NotImplementedError

    @override
    def run_cached(self, pieces: Sequence[PassTokens]) -> Tensor:
        raise NotImplementedError

    @override
    def run_windows(self, tokens: Tensor) -> Tensor:
        return module_logits(self.part, tokens)[:, -1]

    @override
    def start_sampling(
        self, sampler: TokenSampler, texts: Sequence[GeneratedText], logits: Tensor
    ) -> PendingTokens:
        return sample_now(sampler, texts, logits)
