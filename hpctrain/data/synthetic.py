"""Sequences made of random tokens, a function of seed and number: for benchmarks and comparisons."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.data.batches import Sequences

_SEEDS = 1 << 63
"""What torch takes is below it."""


@dataclass
class SyntheticSource(Sequences):
    """`count` sequences of `length` tokens below `vocabulary`; `masked` is the share of targets of -1. With
    `documents`, so large a share of tokens, drawn anew, ends a document, and documents do not see each other.
    """

    length: int
    vocabulary: int
    count: int = 1 << 20
    seed: int = 0
    masked: float = 0.0
    documents: float = 0.0

    def __post_init__(self) -> None:
        """The last token of the vocabulary ends documents."""
        self.end_of_document = self.vocabulary - 1 if self.documents else None

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of sequence `index`, each int64 [length]."""
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
