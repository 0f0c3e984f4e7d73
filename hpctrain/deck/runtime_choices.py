"""Choices that depend on measurements or on an earlier run, and that accompany a deck."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RuntimeChoices:
    """Measured or earlier choices (split, kernels, functions) of a run, which belong to no key of its deck.

    They are stored with the deck so that a resumed run repeats them. Copies of the deck with other keys keep
    them. All RuntimeChoices are equal, since they are not part of the deck's content.

    Attributes:
        split: Number of blocks in each part of the model; None if they are not chosen yet.
        kernels: Kernel of each measured matrix product, by the name of the product.
        kernels_note: Origin of these choices in words, such as "as measured".
        functions: `LayerFunctions` of the blocks; None if they are not chosen yet.
        compiled_record: Record of the compiled functions in the run that is resumed; "" if it used torch's.
        tokenizer_tokens: Number of tokens of the data's tokenizer, which may be smaller than the model's
            vocabulary; None without a tokenizer.
        uses_malloc: True if on some rank, malloc allocates CPU tensors instead of the heap of
            `host/tensor_heap`; None if that is not known yet.
    """

    split: tuple[int, ...] | None = field(default=None, compare=False)
    kernels: Mapping[str, str] = field(default_factory=dict, compare=False)
    kernels_note: str = field(default="", compare=False)
    functions: object = field(default=None, compare=False)
    compiled_record: str | None = field(default=None, compare=False)
    tokenizer_tokens: int | None = field(default=None, compare=False)
    uses_malloc: bool | None = field(default=None, compare=False)
