"""Source of random sequences for benchmarks and comparisons."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.data.batches import MASKED, SequenceSource

_SEEDS = 1 << 63
"""Number of seeds that torch accepts."""


@dataclass
class SyntheticSource(SequenceSource):
    """Sequences of random tokens.

    Attributes:
        length: Number of tokens of a sequence, with padding.
        vocabulary: Size of the vocabulary. The last token ends documents.
        count: Number of sequences.
        seed: Seed of the random tokens.
        masked: Mean share of the targets that are -1.
        documents: Share of tokens that end a document. If it is not 0, documents do not see each other.
        padding: Mean share of a sequence that is padding, which differs from sequence to sequence.
    """

    length: int
    vocabulary: int
    count: int = 1 << 20
    seed: int = 0
    masked: float = 0.0
    documents: float = 0.0
    padding: float = 0.0

    def __post_init__(self) -> None:
        self.end_of_document = self.vocabulary - 1 if self.documents else None

    def real_tokens(self, index: int) -> int:
        """Return the number of tokens of a sequence in front of its padding."""
        random = torch.Generator().manual_seed((self.seed * self.count + index) % _SEEDS)
        share = 2 * self.padding * float(torch.rand((), generator=random))
        return max(1, self.length - round(share * self.length))

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of sequence `index`, each int64 [length]."""
        tokens, targets = self._full_sequence(index)
        real = self.real_tokens(index)
        tokens[real:], targets[real:] = 0, MASKED
        return tokens, targets

    def _full_sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a sequence without padding."""
        random = torch.Generator().manual_seed((self.seed * self.count + index) % _SEEDS)
        window = torch.randint(self.vocabulary, (self.length + 1,), generator=random)
        targets = window[1:].clone()
        if self.masked:
            # A share that differs from sequence to sequence, so that ranks get uneven token counts.
            share = 2 * self.masked * torch.rand((), generator=random)
            targets[torch.rand(self.length, generator=random) < share] = -1
        if self.end_of_document is not None:
            ends = torch.rand(self.length, generator=random) < self.documents
            return window[:-1].masked_fill(ends, self.end_of_document), targets
        return window[:-1], targets
