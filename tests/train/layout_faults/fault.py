"""A fault that a test plants in a layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.train.layout_faults.planting import Plant
from tests.train.layout_faults.scene import Scene


@dataclass(frozen=True)
class LayoutFault:
    """A fault that shows on two ranks.

    Attributes:
        seam: Name of the place between parts of the program at which the fault is.
        name: Name of the fault, another one for each fault of a seam.
        keys: Keys of a deck with which the fault shows.
        plant: Plants the fault.
        module: Class of `tests/train/wrong_modules.py` that is trained; "" for a transformer.
    """

    seam: str
    name: str
    keys: tuple[str, ...]
    plant: Plant
    module: str = ""


@contextmanager
def planted(fault: LayoutFault) -> Iterator[None]:
    """Plant a fault in the steps of layouts that run in this block."""
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(Scene(patch))
        yield
