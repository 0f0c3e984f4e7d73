"""Passes of a module of `transformers` that continues texts: each token takes a pass over the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.errors import HpctrainError
from hpctrain.generate.continuing import Draw, Drawn, GeneratedText, PassTokens, at_once
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.modules.module_call import find_logits
from hpctrain.model.modules.module_part import ModulePart


@torch.no_grad()
def module_logits(part: ModulePart, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, V] of tokens [b, s] by a module in one part.

    Raises:
        HpctrainError: The module returns no logits.
    """
    given = tokens.to(part.layer_context.tensor.device)
    fields = {"tokens": given, "targets": torch.full_like(given, -1)}
    logits = find_logits(part(ModelInputs(fields, torch.arange(given.shape[1], device=given.device))))
    if logits is None or logits.dim() != 3:
        raise HpctrainError(f"{part.title}: returns no logits, so no text can be generated")
    return logits


class ModulePasses:
    """Passes of a module without a cache; see ForwardPasses. Local.

    Args:
        part: The module, whole on this rank.
        places: Largest number of texts that grow at the same time.
    """

    reach = 0
    rows = 1
    turns = 1
    longest_short_text: int | None = None

    def __init__(self, part: ModulePart, places: int) -> None:
        self.part, self.places = part, places
        self.window = part.sequence

    def open(self) -> int:
        """Raise NotImplementedError: there is no cache."""
        raise NotImplementedError

    def close(self, place: int) -> None:
        """Raise NotImplementedError: there is no cache."""
        raise NotImplementedError

    def share(self, source: int, place: int, count: int) -> None:
        """Raise NotImplementedError: there is no cache."""
        raise NotImplementedError

    def cached(self, pieces: Sequence[PassTokens]) -> Tensor:
        """Raise NotImplementedError: there is no cache."""
        raise NotImplementedError

    def windowed(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, V] of the tokens after windows, int64 [b, s]."""
        return module_logits(self.part, tokens)[:, -1]

    def start_draw(self, draw: Draw, texts: Sequence[GeneratedText], logits: Tensor) -> Drawn:
        """Draw the next tokens of texts from their logits."""
        return at_once(draw, texts, logits)
