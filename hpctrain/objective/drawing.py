"""By which chances a policy draws tokens: what it learns from their log-probabilities is of the same ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.parallel.partition import Logits


@dataclass(frozen=True)
class Drawing:
    """Of so many `tokens`, the first of a vocabulary, which are those that a tokenizer has; None: of all."""

    tokens: int | None = None

    def of(self, logits: Logits, first: int) -> Logits:
        """Of a rank's logits, whose columns are tokens from the `first` on, those that are drawn by."""
        if self.tokens is None:
            return logits
        return replace(logits, columns=min(logits.columns, max(0, self.tokens - first)))


WHOLE = Drawing()
"""Of all tokens that a model has, as it is."""
