"""Tests of the warning that the learning rate of a resumed run jumps."""

from __future__ import annotations

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.deck.toml_text import deck_text
from hpctrain.train.rate_change import rate_change
from tests.engines import small_deck

STEPS = ("run.steps=200", "learning_rate.peak=3e-4")
WSD = ("learning_rate.decay=wsd", "learning_rate.cooldown=20")
CONSTANT = ("learning_rate.decay=constant",)
DEFAULT_WARMUP = ("learning_rate.warmup=",)


def warning(before: tuple[str, ...], step: int, *changes: str) -> str:
    stored = deck_text(small_deck(*STEPS, *before))
    return rate_change(parse_deck(stored, changes), parse_deck(stored), step)


def test_warning_names_both_rates_and_the_remedy() -> None:
    assert warning((), 200, "run.steps=400") == (
        "--set run.steps=400: the learning rate rises from 3.00e-05 in step 200 to 1.66e-04 in step 201 "
        "(--set learning_rate.decay_steps=200 keeps the schedule of the checkpoint)"
    )


def test_keys_that_do_not_keep_the_schedule_are_not_recommended() -> None:
    told = "the learning rate rises from 3.00e-05 in step 200 to 5.54e-03 in step 201"
    changes = ("run.steps=400", "learning_rate.peak=1e-2")
    assert warning((), 200, *changes) == f"--set learning_rate.peak=1e-2: {told}"


JUMPS: list[tuple[tuple[str, ...], int, tuple[str, ...], str]] = [
    (
        DEFAULT_WARMUP,
        200,
        ("run.steps=4000",),
        "rises from 3.00e-05 in step 200 to 3.00e-04 in step 201 (--set learn",
    ),
    (
        (),
        100,
        ("run.steps=400",),
        "to 2.62e-04 in step 101 instead of 1.67e-04 as in the checkpoint's deck (--set learning_rate",
    ),
    ((), 100, ("learning_rate.peak=1e-4",), "falls from 1.69e-04 in step 100 to 5.57e-05 in step 101 ins"),
    (DEFAULT_WARMUP, 5, ("run.steps=400",), "falls from 7.50e-05 in step 5 to 4.50e-05 in step 6"),
    (
        (),
        100,
        ("learning_rate.warmup=150",),
        "101 instead of 1.67e-04 as in the checkpoint's deck; it warms up again until step",
    ),
    (CONSTANT, 100, ("learning_rate.decay=cosine",), "falls from 3.00e-04 in step 100 to 1.67e-04 in step"),
    (WSD, 190, ("learning_rate.cooldown=30",), "(checkpoints up to step 180 precede the decay)"),
    (WSD, 150, ("learning_rate.cooldown=90",), "(--set learning_rate.cooldown=50 starts the decay here)"),
    (
        ("learning_rate.reference_batch=8",),
        100,
        ("batch.global_size=16",),
        "batch.global_size=16: the learning rate rises from 1.69e-04 in step 100 to 3.34e-04 in step 101",
    ),
]


@pytest.mark.parametrize(("before", "step", "changes", "sentence"), JUMPS)
def test_jumps(before: tuple[str, ...], step: int, changes: tuple[str, ...], sentence: str) -> None:
    assert sentence in warning(before, step, *changes)


@pytest.mark.parametrize(
    ("before", "step", "changes"),
    [
        ((), 100, ()),
        ((), 100, ("model.dropout=0.1", "batch.global_size=16")),
        ((), 200, ("run.steps=400", "learning_rate.decay_steps=200")),
        (("learning_rate.decay_steps=200",), 200, ("run.steps=400",)),
        (WSD, 150, ("run.steps=300",)),
        (WSD, 150, ("learning_rate.cooldown=50",)),
        (CONSTANT, 200, ("run.steps=400",)),
        ((), 0, ("run.steps=400",)),
    ],
)
def test_no_jump(before: tuple[str, ...], step: int, changes: tuple[str, ...]) -> None:
    assert not warning(before, step, *changes)
