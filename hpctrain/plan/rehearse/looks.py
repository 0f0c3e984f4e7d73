"""Which ranks of a kind of stage are taken to do the same: by what is asked of some of them.

A rank's look are numbers that are known beforehand, such as how nodes cut its groups, and a number for its
coordinate along every axis that tells ranks apart, of both ways in which a stage's ranks are folded. Some
ranks are asked first, spread over all axes; then of every look the first rank, one in the middle and the last
one, and those around what begins along an axis. Where two of a look do not do the same, it is found along
which axis that begins, and all coordinates along it are asked there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from hpctrain.comm.mesh import AXES, EXPERT_AXES, expert_sizes
from hpctrain.plan.rehearse.programme import Numbers

SPREAD = 8
"""How many places, spread evenly, are asked where there may be very many."""


class Axis(NamedTuple):
    """One along which the places of a stage lie: how far neighbours are from each other, and how many."""

    name: str
    stride: int
    size: int

    def of(self, place: int) -> int:
        """A place's coordinate."""
        return place // self.stride % self.size

    def moved(self, place: int, coordinate: int) -> int:
        """The place with that coordinate in place of its own."""
        return place + (coordinate - self.of(place)) * self.stride


def folds_of(sizes: Mapping[str, int]) -> list[list[Axis]]:
    """The ways in which a mesh of these sizes folds the ranks of a stage, that of experts too where these are
    split; of each its axes of several ranks, the shortest first.
    """
    along = {**expert_sizes(sizes), **sizes}
    split = along["expert"] * along["expert_tensor"] > 1
    found = []
    for names in (EXPERT_AXES, AXES) if split else (AXES,):
        axes = [
            Axis(name, prod(along[inner] for inner in names[number + 1 :]), along[name])
            for number, name in enumerate(names)
            if name != "pipeline" and along[name] > 1
        ]
        found.append(sorted(axes, key=lambda axis: axis.size))
    return found


class Looks:
    """The looks of the places of a kind of stage, which begin as those that are `given` [places].

    `ask` tells what a place does, as a number.
    """

    def __init__(self, folds: list[list[Axis]], given: Numbers, ask: Callable[[int], int]) -> None:
        self.folds, self.ask = folds, ask
        self.numbers: dict[Axis, Numbers] = {}
        self._given = given
        self._places = np.arange(len(given))

    def find(self, others: Sequence[int]) -> Numbers:
        """The look of each place [places]; asked are `others` too."""
        for place in dict.fromkeys((*self._spread(), *others)):
            self._compare(place)
        while True:
            of_place = self.of_place()
            for place in dict.fromkeys((*_ends(of_place), *self._borders())):
                self._compare(place)
            if self.of_place().max() == of_place.max():  # no look was parted
                return of_place

    def of_place(self) -> Numbers:
        """The look of each place, by what is known so far [places]."""
        keys = [self._given]
        for axis, numbers in self.numbers.items():
            keys.append(numbers[self._places // axis.stride % axis.size])
        found: Numbers = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
        return found

    def _spread(self) -> Iterator[int]:
        """One in the middle and the last one along every axis, the last one along all but one, and some that
        differ along all.
        """
        last = len(self._given) - 1
        yield last
        for axis in (axis for fold in self.folds for axis in fold):
            yield axis.moved(0, axis.size // 2)
            yield axis.moved(0, axis.size - 1)
            yield axis.moved(last, axis.size // 2)
            yield axis.moved(last, 0)
        # Multiples of the golden ratio are even over all lengths.
        yield from (int(len(self._given) * (number * 0.6180339887 % 1)) for number in range(1, SPREAD + 1))

    def _borders(self) -> Iterator[int]:
        """On both sides of where something begins along an axis, at other coordinates along the others: there
        it may begin elsewhere.
        """
        for fold in self.folds:
            for axis in (axis for axis in fold if axis in self.numbers):
                begins = np.flatnonzero(np.diff(self.numbers[axis])).tolist()
                sides = [side for at in _some(begins) for side in (at, at + 1)]
                for other in (other for other in fold if other is not axis):
                    for coordinate in _some(range(other.size)):
                        yield from (axis.moved(other.moved(0, coordinate), side) for side in sides)

    def _compare(self, place: int) -> None:
        """Tell a place from the first one of its look as long as that does other things."""
        while True:
            of_place = self.of_place()
            first = int((of_place == of_place[place]).argmax())
            if first == place or self.ask(first) == self.ask(place):
                return
            self._tell_apart(first, place)

    def _tell_apart(self, first: int, place: int) -> None:
        """Ask along the shortest axis at which a place on its way to the first begins to do other things."""
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
        told = np.array([self.ask(axis.moved(here, coordinate)) for coordinate in range(axis.size)])
        keys = np.stack([self.numbers.get(axis, np.zeros_like(told)), told], axis=1)
        self.numbers[axis] = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


def _ends(of_place: Numbers) -> Iterator[int]:
    """Of each look a place in the middle and the last one."""
    for look in range(int(of_place.max()) + 1):
        alike = np.flatnonzero(of_place == look)
        yield from (int(alike[len(alike) // 2]), int(alike[-1]))


def _some(values: Sequence[int]) -> Iterator[int]:
    """At most SPREAD of these, the first and the last one too."""
    places = np.linspace(0, len(values) - 1, min(len(values), SPREAD))
    yield from (values[int(place)] for place in places)
