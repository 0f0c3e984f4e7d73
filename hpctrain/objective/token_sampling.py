"""Distribution from which a policy samples tokens, and to which its log-probabilities belong."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.parallel.kernels.logits import SplitLogits


@dataclass(frozen=True)
class TokenSampling:
    """Restriction of the vocabulary and temperature of a policy.

    Attributes:
        tokens: Size of the tokenizer: only ids below it may be sampled. None for the whole vocabulary of the
            model, which may be padded.
        temperature: Divisor of the logits.
    """

    tokens: int | None = None
    temperature: float = 1.0

    def adjust(self, logits: SplitLogits, first: int) -> SplitLogits:
        """Return a tensor rank's logits, restricted to ids of the tokenizer and divided by the temperature.

        Columns of other ids count as padding, whose logits are -inf: `columns` of the result is smaller.

        Args:
            logits: Logits [rows, columns] of this rank's part of the vocabulary, which is split over tensor
                ranks.
            first: Token id of this rank's first column.
        """
        if self.tokens is not None:
            logits = replace(logits, columns=min(logits.columns, max(0, self.tokens - first)))
        multiplier, cap = logits.multiplier / self.temperature, logits.cap / self.temperature
        return replace(logits, multiplier=multiplier, cap=cap)
