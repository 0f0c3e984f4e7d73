"""By which chances a policy draws tokens: what it learns from their log-probabilities is of the same ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.parallel.partition import SplitLogits


@dataclass(frozen=True)
class TokenSampling:
    """Of so many `tokens`, the first of a vocabulary, which are those that a tokenizer has (None: of all), by
    logits that are divided by the `temperature`.
    """

    tokens: int | None = None
    temperature: float = 1.0

    def of(self, logits: SplitLogits, first: int) -> SplitLogits:
        """Of a rank's logits, whose columns are tokens from the `first` on, those that are drawn by."""
        if self.tokens is not None:
            logits = replace(logits, columns=min(logits.columns, max(0, self.tokens - first)))
        return replace(logits, multiplier=logits.multiplier / self.temperature)
