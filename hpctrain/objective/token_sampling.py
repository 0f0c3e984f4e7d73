"""Distribution from which a policy samples tokens, and to which its log-probabilities belong."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.parallel.kernels.logits import SplitLogits


@dataclass(frozen=True)
class TokenSampling:
    """Restriction of the vocabulary and temperature of a policy.

    Attributes:
        tokens: Number of tokens, from 0, that may be sampled, as many as the tokenizer has; None for the
            whole vocabulary.
        temperature: Divisor of the logits.
    """

    tokens: int | None = None
    temperature: float = 1.0

    def adjust(self, logits: SplitLogits, first: int) -> SplitLogits:
        """Return a rank's logits, restricted and divided by the temperature.

        Args:
            logits: Logits of consecutive tokens on this rank.
            first: Number of the first of these tokens.
        """
        if self.tokens is not None:
            logits = replace(logits, columns=min(logits.columns, max(0, self.tokens - first)))
        multiplier, cap = logits.multiplier / self.temperature, logits.cap / self.temperature
        return replace(logits, multiplier=multiplier, cap=cap)
