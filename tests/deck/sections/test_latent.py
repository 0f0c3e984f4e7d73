"""The table [model.latent]: its defaults, and what is refused, in which words."""

from __future__ import annotations

import pytest

from hpctrain.errors import HpctrainError
from tests.engines import small_deck

TABLE = "model.latent"
SIZES = ("model.family=llama", "model.head_size=12", f"{TABLE}.key_value_rank=10", f"{TABLE}.rotary_size=4")


def test_values_are_as_wide_as_heads_and_queries_have_no_latent_by_default() -> None:
    latent = small_deck(*SIZES).model.latent
    assert latent is not None and (latent.value_size, latent.query_rank) == (12, None)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ((f"{TABLE}.rotary_size=3",), "rotary_size=3: must be even, since features are rotated"),
        ((f"{TABLE}.rotary_size=12",), "must leave at least 2 other features of model.head_size = 12"),
        (("model.head_size=11",), "model.head_size=11: must be even for rotary positions (use 12)"),
        ((f"{TABLE}.value_size=14",), f"{TABLE}.value_size=14: must be at most model.head_size = 12"),
        (("model.key_value_heads=4",), "key_value_heads=4: must be model.heads = 8 with [model.latent]"),
        (("model.rotary_fraction=0.5",), "model.rotary_fraction=0.5: must be 1 with [model.latent]"),
        (("model.attention_bias=all",), "conflicts with [model.latent]: latent attention has no biases"),
        (("model.query_key_norm=head",), "latent attention has norms of its own"),
        (("model.query_key_value_clip=8",), "latent attention has no projection to queries, keys and values"),
        (("model.positions=none",), 'requires model.positions = "rotary", but it is "none"'),
        (("model.parametrization=mup",), "the learning rates of its ranks have no known rule"),
        (('model.adapters.targets=["query"]', "model.adapters.rank=2"), "cannot have adapters"),
        ((f"{TABLE}.rank=9",), f"{TABLE}.rank"),
        (("model.family=deepseek-v3", f"{TABLE}=none"), "requires the table [model.latent]"),
    ],
)  # fmt: skip
def test_tables_that_are_refused(keys: tuple[str, ...], told: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        small_deck(*SIZES, *keys)
    assert caught.value.exit_code == 2
    assert any(told in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("rotary_size", "head_size", "key"),
    [(3, 11, f"{TABLE}.rotary_size"), (3, 12, f"{TABLE}.rotary_size"), (4, 11, "model.head_size")],
)
def test_an_odd_size_gives_one_problem(rotary_size: int, head_size: int, key: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        small_deck(*SIZES, f"{TABLE}.rotary_size={rotary_size}", f"model.head_size={head_size}")
    (problem,) = caught.value.problems
    assert f"{key}=" in problem and "must be even" in problem
