"""What was found for a deck beside what it says: measured where it runs, or by a run that it goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Found:
    """`split`, the blocks of every part of a model; `products`, which kernel computes each of them, by the
    names of what is measured, and in words `why` so; `functions`, what computes those of its blocks, and the
    record of those `compiled` in a run that is gone on with: of torch's it is empty; how many `tokens` the
    tokenizer has that its texts are of, where there is one: a model may have more.

    It goes with the deck through its changes. All Found are equal: it is no part of what a deck says.
    """

    split: tuple[int, ...] | None = field(default=None, compare=False)
    products: Mapping[str, str] = field(default_factory=dict, compare=False)
    why: str = field(default="", compare=False)
    functions: object = field(default=None, compare=False)
    compiled: str | None = field(default=None, compare=False)
    tokens: int | None = field(default=None, compare=False)
