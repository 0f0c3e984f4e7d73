"""The table [model.rope_scaling]: what is refused, and in which words."""

from __future__ import annotations

import pytest

from hpctrain.errors import HpctrainError
from tests.engines import LLAMA, small_deck
from tests.rope_scalings import LONGROPE_KEYS, YARN_KEYS

HEADS = (*LLAMA, "model.head_size=6")
SMALL = "model.head_size=2"
LOW = "model.rope_scaling.low_frequency_factor"
KIND, FACTOR, ORIGINAL = (f"model.rope_scaling.{name}" for name in ("kind", "factor", "original_sequence"))


@pytest.mark.parametrize("keys", [YARN_KEYS, LONGROPE_KEYS, (f"{KIND}=linear", f"{FACTOR}=1")])
def test_valid_scaling(keys: tuple[str, ...]) -> None:
    assert small_deck(*HEADS, *keys).model.rope_scaling is not None


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ((*HEADS, f"{KIND}=ntk", f"{FACTOR}=2"), f"{KIND}=ntk: must be "),
        ((*HEADS, f"{KIND}=linear"), f"{FACTOR} is missing: a number from 1"),
        ((*HEADS, f"{KIND}=linear", f"{FACTOR}=-2"), f"{FACTOR}=-2: must be a number from 1 to"),
        ((*HEADS, f"{KIND}=linear", f"{FACTOR}=2", f"{ORIGINAL}=8"), 'has no effect'),
        ((*HEADS, f"{KIND}=yarn", f"{FACTOR}=2"), f"{KIND}=yarn: requires {ORIGINAL}, the length"),
        ((*HEADS, f"{KIND}=yarn", f"{FACTOR}=2", f"{ORIGINAL}=1"), f"{ORIGINAL}=1: must be a whole number"),
        ((*HEADS, *YARN_KEYS, "model.rope_base=1"), "requires a base above 1, but it is 1"),
        ((*HEADS, *YARN_KEYS, "model.rope_scaling.beta_slow=3"), "beta_slow=3: must be at most"),
        ((*LLAMA, "model.head_size=4", *LONGROPE_KEYS), "must have 2 numbers, half of the head size"),
        ((*HEADS, *LONGROPE_KEYS, "model.rope_scaling.long_factors=[1, 0, 2]"), "must have numbers above 0"),
        ((*LLAMA, SMALL, f"{KIND}=dynamic", f"{FACTOR}=2", f"{ORIGINAL}=8"), "size of at least 4"),
        ((f"{KIND}=linear", f"{FACTOR}=2"), 'requires model.positions = "rotary", but it is '),
        (
            (*HEADS, f"{KIND}=llama3", f"{FACTOR}=2", f"{ORIGINAL}=8", f"{LOW}=4"),
            "low_frequency_factor=4: must be below",
        ),
    ],
)  # fmt: skip
def test_scaling_that_is_refused(keys: tuple[str, ...], told: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        small_deck(*keys)
    assert caught.value.exit_code == 2
    assert any(told in problem for problem in caught.value.problems), caught.value.problems
