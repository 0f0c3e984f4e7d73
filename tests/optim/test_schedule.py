from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import hpctrain
from hpctrain.deck.decays import DECAYS
from hpctrain.optim.schedule import LearningRate


def test_warm_up_then_cosine_to_the_floor() -> None:
    rate = LearningRate(peak=2.0, warmup=4, decay="cosine", decay_steps=14, floor=0.1)
    assert [rate.at(step, 8) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert rate.at(4, 8) == 2.0
    assert rate.at(9, 8) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rate.at(14, 8) == pytest.approx(0.2)
    assert rate.at(1000, 8) == pytest.approx(0.2)


def test_cosine_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.05)
    ours = LearningRate(peak=1.0, warmup=0, decay="cosine", decay_steps=20, floor=0.05)
    for step in range(20):
        assert ours.at(step, 1) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_linear_and_constant() -> None:
    linear = LearningRate(peak=1.0, warmup=2, decay="linear", decay_steps=12, floor=0.5)
    assert linear.at(7, 1) == pytest.approx(0.75)
    constant = LearningRate(peak=1.0, warmup=2, decay="constant", decay_steps=12, floor=0.5)
    assert constant.at(99, 1) == 1.0


def test_wsd_stays_at_the_peak_and_then_decays_linearly() -> None:
    rate = LearningRate(peak=3.0, warmup=4, decay="wsd", decay_steps=20, floor=0.1, cooldown=6)
    # The n-th step, from 1, has made n of the warm-up; the decay is drawn through steps from 0.
    expected = [3.0 * n / 4 for n in range(1, 5)] + list(np.interp(range(4, 40), [14, 20], [3.0, 0.3]))
    assert [rate.at(step, 1) for step in range(40)] == pytest.approx(expected, rel=1e-12)
    assert {rate.at(step, 1) for step in range(3, 15)} == {3.0}


@pytest.mark.parametrize("name", DECAYS)
def test_every_decay_has_its_stated_properties(name: str) -> None:
    form, keys = DECAYS[name], {"warmup": 4, "decay_steps": 24, "floor": 0.2, "cooldown": 6}
    rates = [LearningRate(2.0, decay=name, **keys).at(step, 1) for step in range(150)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and max(rates) == 2.0
    assert all(after <= before for before, after in pairwise(rates[3:]))
    assert (min(rates[3:]) == pytest.approx(0.4)) == form.has_floor
    assert (len(set(rates[24:])) == 1 and rates[24] < 2.0) == form.ends

    def changed(**others: float) -> bool:
        return rates != [LearningRate(2.0, decay=name, **keys | others).at(step, 1) for step in range(150)]

    assert changed(decay_steps=30) == form.ends and changed(floor=0.4) == form.has_floor
    assert changed(cooldown=9) == form.has_cooldown


def test_decays_are_named_in_one_file() -> None:
    """Other files, except those that convert other tools' decks, read the properties of a decay."""
    names = [f'"{name}"' for name in ("wsd", "inverse-sqrt", "linear")]
    package = Path(hpctrain.__file__).parent
    files = [*package.glob("deck/*.py"), *package.glob("train/**/*.py"), *package.glob("optim/*.py")]
    naming = [file.name for file in files if any(name in file.read_text() for name in names)]
    assert naming == ["decays.py"]


def test_wsd_with_only_a_cooldown_is_linear() -> None:
    of = {
        name: LearningRate(1.0, 3, name, 17, 0.2, cooldown=14 if name == "wsd" else 0)
        for name in ("wsd", "linear")
    }
    assert [of["wsd"].at(step, 1) for step in range(30)] == [of["linear"].at(step, 1) for step in range(30)]


def test_inverse_square_root_is_that_of_the_paper() -> None:
    width, warmup = 512, 40
    peak = width**-0.5 * warmup**-0.5
    rate = LearningRate(peak, warmup, "inverse-sqrt", 1, floor=0.0)
    paper = [width**-0.5 * min(n**-0.5, n * warmup**-1.5) for n in range(1, 400)]
    assert [rate.at(n - 1, 1) for n in range(1, 400)] == pytest.approx(paper, rel=1e-12)


def test_inverse_square_root_ends_at_the_floor_and_needs_no_warm_up() -> None:
    rate = LearningRate(2.0, 0, "inverse-sqrt", 1, floor=0.25)
    assert [rate.at(step, 1) for step in (0, 3, 15, 16, 10**6)] == [2.0, 1.0, 0.5, 0.5, 0.5]


def test_the_rate_scales_with_the_batch_if_requested() -> None:
    rate = LearningRate(1.0, 0, "constant", 10, 0.0, reference_batch=32)
    assert [rate.at(5, batch) for batch in (16, 32, 64)] == [0.5, 1.0, 2.0]
