"""`hpctrain check` finds faults of every seam between parts of the program, and nothing where there are none.

Tests of train/layout_verification.py, train/scaled_down_deck.py, train/layout_state.py and
train/layout_difference.py.
"""

from __future__ import annotations

from collections import Counter

import pytest

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.train.layout_verification import compare_scaled_down
from tests.engines import LLAMA, small_deck
from tests.train.layout_faults import FAULTS, LayoutFault, planted
from tests.train.test_check_module import DECK, MODULES

SOUND = dict.fromkeys((fault.keys, fault.module) for fault in FAULTS)
"""What the faults are planted in."""


def deck_of(keys: tuple[str, ...], module: str) -> Deck:
    """Return the deck of a fault. Late positions of its sequences are far beyond those of a miniature."""
    if module:
        return parse_deck(DECK.format(module=f"{MODULES}:{module}", more="", zero=0), keys)
    return small_deck(*LLAMA, "batch.sequence=4096", *keys)


def differing(world: World, deck: Deck) -> list[str]:
    """Return the sentences that the check has for a deck."""
    try:
        _, findings, differences = compare_scaled_down(deck, world, make_mesh(deck, world))
    except HpctrainError as error:
        return list(error.problems)
    return [str(each) for each in (*findings, *differences) if each.fails]


@pytest.mark.sampled(6)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.seam}: {fault.name}")
def test_a_fault_is_found(world: World, fault: LayoutFault) -> None:
    with planted(fault):
        assert differing(world, deck_of(fault.keys, fault.module))


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("keys", "module"), SOUND)
def test_sound_layouts_raise_no_alarm(world: World, keys: tuple[str, ...], module: str) -> None:
    assert differing(world, deck_of(keys, module)) == []


def test_every_seam_has_at_least_ten_faults() -> None:
    counts = Counter(fault.seam for fault in FAULTS)
    assert counts.pop("tried") == 7
    assert min(counts.values()) >= 10, counts


def test_faults_have_names_of_their_own() -> None:
    assert len({(fault.seam, fault.name) for fault in FAULTS}) == len(FAULTS)


def test_faults_are_planted_in_functions_that_exist() -> None:
    for fault in FAULTS:
        with planted(fault):  # AttributeError for a function that was renamed
            pass
