"""Colours of runs in pictures and pages, which colour-blind readers can distinguish (Okabe and Ito, 2008).

Yellow and black come last, since yellow is hard to see on white, and black on black.
"""

from __future__ import annotations

from collections.abc import Sequence

ON_LIGHT: Sequence[str] = (
    "#0072b2",  # blue
    "#d55e00",  # vermillion
    "#009e73",  # bluish green
    "#cc79a7",  # reddish purple
    "#e69f00",  # orange
    "#56b4e9",  # sky blue
    "#4d4d4d",  # in place of black, which is the colour of the axes
    "#a89a00",  # darker than the original yellow, which is hard to see on white
)

ON_DARK: Sequence[str] = (
    "#4a9fe0",
    "#f08746",
    "#1fc296",
    "#e39bc3",
    "#f2b632",
    "#9ad5f8",
    "#c4c8cf",
    "#f0e442",
)
"""The same hues, lighter, in the same order."""

DASHES: Sequence[Sequence[float]] = ((), (6, 3), (2, 2), (8, 3, 2, 3))
"""Dashes of lines after all colours are used; then colours start again."""


def line_of(index: int) -> tuple[int, Sequence[float]]:
    """Return the number of the colour and the dashes of the line of a run."""
    return index % len(ON_LIGHT), DASHES[index // len(ON_LIGHT) % len(DASHES)]
