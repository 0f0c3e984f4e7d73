"""What is known of a model before there is any of it, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Architecture(ABC):
    """Facts about a model that a deck describes. Equal architectures are built into equal models.

    `sequence` are the tokens of a sample. What else is to be known (parameters, FLOPs, the terms of layers)
    its parts tell: `model/count.py`.
    """

    sequence: int

    @property
    @abstractmethod
    def title(self) -> str:
        """What it is called where a run is introduced."""

    @property
    def notes(self) -> Sequence[str]:
        """What is to be said of it besides, a sentence each."""
        return ()

    @property
    @abstractmethod
    def draws(self) -> bool:
        """Whether it draws random numbers in training, as dropout does."""

    @property
    @abstractmethod
    def block_count(self) -> int:
        """Its layers between the first and the last."""

    @property
    def begins_with_block(self) -> bool:
        """Whether the first part of a pipeline has to have a block."""
        return False
