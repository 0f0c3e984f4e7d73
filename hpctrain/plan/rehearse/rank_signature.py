"""Search for the ranks of a stage that make the same calls, by the programmes of a few of them.

A place is the number of a rank in its stage. Its signature combines numbers that are known beforehand, such
as how nodes divide its groups, with a number for its coordinate along each axis on which calls depend. Ranks
with equal signatures are taken to make the same calls. The axes are those of both foldings of the ranks,
with and without expert axes.

First, places spread over all axes are compared. Then, for each signature, its first, middle and last place
are compared, and places on both sides of each coordinate at which calls change. If two places of a signature
differ, the search finds the axis along which calls change, and compares all coordinates along it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from hpctrain.comm.mesh import AXES, EXPERT_AXES, expert_sizes
from hpctrain.plan.rehearse.programme import Numbers

SPREAD = 8
"""Number of evenly spread places that are compared if there may be very many."""


class Axis(NamedTuple):
    """Axis of the mesh: the distance between places of neighbors along it, and its size."""

    name: str
    stride: int
    size: int

    def of(self, place: int) -> int:
        """Return the coordinate of a place."""
        return place // self.stride % self.size

    def moved(self, place: int, coordinate: int) -> int:
        """Return the place with another coordinate along this axis."""
        return place + (coordinate - self.of(place)) * self.stride


def folds_of(sizes: Mapping[str, int]) -> list[list[Axis]]:
    """Return the foldings of the ranks of a stage: the axes of each that have several ranks, shortest first.

    Expert axes are a folding of their own if experts are split.

    Args:
        sizes: Size of each axis of the mesh.
    """
    along = {**expert_sizes(sizes), **sizes}
    split = along["expert"] * along["expert_tensor"] > 1
    foldings = []
    for names in (EXPERT_AXES, AXES) if split else (AXES,):
        axes = [
            Axis(name, prod(along[inner] for inner in names[number + 1 :]), along[name])
            for number, name in enumerate(names)
            if name != "pipeline" and along[name] > 1
        ]
        foldings.append(sorted(axes, key=lambda axis: axis.size))
    return foldings


class SignatureSearch:
    """Search for the signatures of the places of a kind of stage.

    Args:
        folds: Foldings of the places, from `folds_of`.
        initial: Signatures by what is known beforehand, [places].
        ask: Function that returns a number for the calls of a place, equal for equal calls. It is slow.
    """

    def __init__(self, folds: list[list[Axis]], initial: Numbers, ask: Callable[[int], int]) -> None:
        self.folds, self.ask = folds, ask
        self.numbers: dict[Axis, Numbers] = {}
        self._initial = initial
        self._places = np.arange(len(initial))

    def find(self, further_places: Sequence[int]) -> Numbers:
        """Return the signature of each place, [places]. The `further_places` are compared, too."""
        for place in dict.fromkeys((*self._spread(), *further_places)):
            self._compare(place)
        while True:
            by_place = self.by_place()
            for place in dict.fromkeys((*_ends(by_place), *self._borders())):
                self._compare(place)
            if self.by_place().max() == by_place.max():  # no signature was split
                return by_place

    def by_place(self) -> Numbers:
        """Return the signature of each place by what is known so far, [places]."""
        keys = [self._initial]
        for axis, numbers in self.numbers.items():
            keys.append(numbers[self._places // axis.stride % axis.size])
        signatures: Numbers = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
        return signatures

    def _spread(self) -> Iterator[int]:
        """Yield places that differ from the first or last one along one axis, and some over all axes."""
        last = len(self._initial) - 1
        yield last
        for axis in (axis for fold in self.folds for axis in fold):
            yield axis.moved(0, axis.size // 2)
            yield axis.moved(0, axis.size - 1)
            yield axis.moved(last, axis.size // 2)
            yield axis.moved(last, 0)
        # Multiples of the golden ratio are even over all lengths.
        yield from (int(len(self._initial) * (number * 0.6180339887 % 1)) for number in range(1, SPREAD + 1))

    def _borders(self) -> Iterator[int]:
        """Yield places on both sides of each coordinate at which calls change.

        They have different coordinates along the other axes, since calls may change elsewhere there.
        """
        for fold in self.folds:
            for axis in (axis for axis in fold if axis in self.numbers):
                begins = np.flatnonzero(np.diff(self.numbers[axis])).tolist()
                sides = [side for at in _some(begins) for side in (at, at + 1)]
                for other in (other for other in fold if other is not axis):
                    for coordinate in _some(range(other.size)):
                        yield from (axis.moved(other.moved(0, coordinate), side) for side in sides)

    def _compare(self, place: int) -> None:
        """Split signatures until a place makes the calls of the first place of its signature."""
        while True:
            by_place = self.by_place()
            first = int((by_place == by_place[place]).argmax())
            if first == place or self.ask(first) == self.ask(place):
                return
            self._split_signature(first, place)

    def _split_signature(self, first: int, place: int) -> None:
        """Renumber the coordinates of the shortest axis along which calls change between two places."""
        steps: list[tuple[Axis, int]] = []
        for fold in self.folds:
            here = place
            for axis in fold:
                there = axis.moved(here, axis.of(first))
                if there != here and self.ask(there) != self.ask(here):
                    steps.append((axis, here))
                    break
                here = there
        axis, here = min(steps, key=lambda step: step[0].size)
        calls = np.array([self.ask(axis.moved(here, coordinate)) for coordinate in range(axis.size)])
        keys = np.stack([self.numbers.get(axis, np.zeros_like(calls)), calls], axis=1)
        self.numbers[axis] = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


def _ends(by_place: Numbers) -> Iterator[int]:
    """Yield the middle and the last place of each signature."""
    for signature in range(int(by_place.max()) + 1):
        alike = np.flatnonzero(by_place == signature)
        yield from (int(alike[len(alike) // 2]), int(alike[-1]))


def _some(values: Sequence[int]) -> Iterator[int]:
    """Yield at most SPREAD of these values, with the first and the last one."""
    places = np.linspace(0, len(values) - 1, min(len(values), SPREAD))
    yield from (values[int(place)] for place in places)
