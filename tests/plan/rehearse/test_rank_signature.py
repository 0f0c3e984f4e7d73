"""Which ranks are taken to do the same, by what few of them say: as where all were asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from hpctrain.comm.mesh import coordinates
from hpctrain.plan.rehearse.rank_signature import SignatureSearch, folds_of

Does = Callable[[Mapping[str, int]], object]

SIZES = {"pipeline": 1, "data": 256, "context": 1, "tensor": 4, "expert": 32, "expert_tensor": 1}


def find(does: Does, sizes: Mapping[str, int], given: int = 1) -> tuple[bool, int, int]:
    """Return whether calls follow from signatures, the number of signatures, and that of places asked."""
    known: dict[object, int] = {}
    asked: set[int] = set()
    places = sizes["data"] * sizes["context"] * sizes["tensor"]
    done = [known.setdefault(does(coordinates(sizes, place)), len(known)) for place in range(places)]

    def ask(place: int) -> int:
        asked.add(place)
        return done[place]

    signatures = SignatureSearch(folds_of(sizes), np.arange(places) // (places // given), ask).find([])
    pairs = set(zip(signatures.tolist(), done, strict=True))
    return len(pairs) == signatures.max() + 1, int(signatures.max()) + 1, len(asked)


@pytest.mark.parametrize(
    ("does", "signatures"),
    [
        (lambda at: 0, 1),
        (lambda at: (at["expert"] > 9) + (at["expert"] > 10), 3),
        (lambda at: at["tensor"] // 3, 2),
        (lambda at: (at["tensor"] // 3, at["expert"] > 20), 3),
        (lambda at: at["expert"] == 31, 2),
        (lambda at: 96 < at["data"] < 160, 0),
    ],
    ids=["alike", "loads", "tensor", "two axes", "last", "middle"],
)
def test_places_of_a_look_do_the_same(does: Does, signatures: int) -> None:
    right, count, asked = find(does, SIZES)
    assert right
    assert count >= signatures
    assert asked < (200 if signatures else 400)


def test_loads_may_change_elsewhere_on_each_tensor_rank() -> None:
    """As where these have other numbers of rows; along the first ones alone that is not seen."""
    sizes = {**SIZES, "expert_tensor": 4}
    right, count, asked = find(lambda at: at["expert"] > 10 + 2 * at["tensor"], sizes)
    assert right
    assert count >= 2
    assert asked < 300


def test_what_differs_along_experts_is_not_asked_along_data() -> None:
    sizes = {**SIZES, "data": 1024, "tensor": 1}
    right, count, asked = find(lambda at: at["expert"] > 9, sizes)
    assert right
    assert count == 2
    assert asked < 80


def test_places_that_look_otherwise_from_the_start_are_told_apart_without_being_asked() -> None:
    right, count, asked = find(lambda at: at["data"] // 16, {**SIZES, "expert": 1}, given=16)
    assert right
    assert count == 16
    assert asked < 80


def test_folds_have_the_axes_of_several_ranks() -> None:
    """Those of experts where these are split, in strides of a stage's places."""
    named = [[tuple(axis) for axis in fold] for fold in folds_of(SIZES)]
    assert named == [
        [("expert_data", 32, 32), ("expert", 1, 32)],
        [("tensor", 1, 4), ("data", 4, 256)],
    ]
    assert folds_of({**SIZES, "expert": 1}) == folds_of(SIZES)[1:]
