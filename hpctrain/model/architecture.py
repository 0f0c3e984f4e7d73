"""Facts about a model that are known before it is built, for all families of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Architecture(ABC):
    """Facts about a model that a deck describes. Equal architectures are built into equal models.

    All else, such as parameters, FLOPs and auxiliary losses, is derived from the layers: `model/count.py`.

    Attributes:
        sequence: Tokens of a sample.
    """

    sequence: int

    @property
    @abstractmethod
    def title(self) -> str:
        """Name of the model, printed at the start of a run."""

    @property
    def notes(self) -> Sequence[str]:
        """Notes that are printed at the start of a run, one sentence each."""
        return ()

    @property
    @abstractmethod
    def uses_random_numbers(self) -> bool:
        """True if the model draws random numbers in training, as dropout does."""

    @property
    @abstractmethod
    def block_count(self) -> int:
        """Number of layers between the first and the last one."""

    @property
    def begins_with_block(self) -> bool:
        """True if the first part of a pipeline must have a block."""
        return False
