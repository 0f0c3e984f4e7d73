"""What a deck says of mixtures that cannot be, or that has no effect."""

from __future__ import annotations

import pytest

from hpctrain.deck.check import world_problems
from hpctrain.deck.read import parse_deck
from hpctrain.deck.reading.old_keys import old_keys
from hpctrain.errors import HpctrainError

DECK = """\
[run]
steps = 20
[model]
family = "llama"
layers = 4
hidden = 64
heads = 8
mlp = 96
experts = 8
[data]
tokens = "t.h5"
[batch]
global_size = 8
sequence = 64
"""

DENSE = DECK.replace("experts = 8\n", "")


def problems(*overrides: str, ranks: int | None = None, deck: str = DECK) -> list[str]:
    """What is said of the deck with these overrides, without "--set"."""
    with pytest.raises(HpctrainError) as caught:
        parse_deck(deck, overrides, ranks=ranks)
    return [problem.removeprefix("--set ") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ([], None),
        (["layout.expert=8"], 8),
        (["layout.expert=2", "layout.expert_tensor=4"], 8),
        (["layout.expert=4", "layout.tensor=2", "layout.pipeline=2"], 8),
        (["layout.expert=2", "layout.zero=3", "layout.zero_group=2"], 4),
        (["model.experts.per_token=8"], None),
        (["model.experts.per_token=1", "model.experts.router_normalize=false"], None),
        (["model.experts.every=4"], None),
        (["model.experts.dense_first=3"], None),
        (["model.experts.pattern=[false,true,true]"], None),
        (["model.experts.pattern=[true]", "model.mlp=97", "model.experts.mlp=96", "layout.tensor=2"], None),
        (["model.experts.router_groups=4", "model.experts.router_groups_per_token=1"], None),
        (
            [
                "model.experts.balance=bias",
                "model.experts.balance_loss=0.001",
                "model.experts.balance_over=sequence",
            ],
            None,
        ),
        (["model.experts.balance=bias", "model.experts.balance_rate=0.01"], None),
        (["model.experts.balance=none", "model.experts.router_z_loss=0.001"], None),
        (
            ["model.experts.capacity=0.0625"],
            None,
        ),  # one token of 64 for each of 8 experts, which take two of a token
        (["model.experts.shared=1", "layout.tensor=8"], None),
        (["model.mlp=97", "model.experts.mlp=96", "layout.tensor=2"], None),  # no block is dense
    ],
)
def test_mixtures_that_can_be(overrides: list[str], ranks: int | None) -> None:
    deck = parse_deck(DECK, overrides)
    assert ranks is None or not world_problems(deck, ranks)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("layout.expert=3", "layout.expert=3: must divide model.experts.count = 8 (use 1, 2, 4 or 8)"),
        (
            "layout.expert_tensor=5",
            "layout.expert_tensor=5: must divide model.experts.mlp = 96 (use 2, 3, 4 or 6)",
        ),
        ("model.experts.per_token=9", "model.experts.per_token=9: must be at most model.experts.count = 8"),
        (
            "model.experts.router_groups=3",
            "model.experts.router_groups=3: must divide model.experts.count = 8 (use 1, 2, 4 or 8)",
        ),
        (
            "model.experts.per_token=1 model.experts.router_normalize=true",
            (
                "model.experts.router_normalize=true: conflicts with model.experts.per_token = 1: "
                "the weight of a token's only expert is 1, and the router learns nothing from the "
                "loss"
            ),
        ),
        (
            "model.experts.router_groups_per_token=2",
            ("model.experts.router_groups_per_token=2: must be at most model.experts.router_groups = 1"),
        ),
        (
            "model.experts.every=5",
            "model.experts.every=5: leaves no block with experts: must be from 1 to model.layers = 4",
        ),
        (
            "model.experts.dense_first=4",
            "model.experts.dense_first=4: leaves no block with experts: must be from 0 to 3",
        ),
        (
            "model.experts.pattern=[false,false]",
            "model.experts.pattern=[false,false]: leaves no block with experts (use true for those that have "
            "them)",
        ),
        ("model.experts.pattern=3", "model.experts.pattern=3: must be a list of true and false"),
        (
            "model.experts.pattern=[true,true,true,false,true]",
            "model.experts.pattern=[true,true,true,false,true]: must have at most one value for each of the "
            "4 blocks",
        ),
        (
            "model.experts.pattern=[true,false] model.experts.dense_first=1",
            "model.experts.pattern=[true,false]: conflicts with model.experts.dense_first = 1: the pattern "
            "says for each block whether it has experts (leave it out)",
        ),
        (
            "model.experts.pattern=[true,false] model.experts.every=2",
            "model.experts.pattern=[true,false]: conflicts with model.experts.every = 2: the pattern "
            "says for each block whether it has experts (leave it out)",
        ),
        (
            "model.experts.shared_gate=true",
            "model.experts.shared_gate=true: requires shared experts (set model.experts.shared = 1 or more)",
        ),
        (
            "model.experts.capacity=0.0001",
            "model.experts.capacity=0.0001: limits an expert to 0.0016 of the 64 tokens of a "
            "micro-batch, which is less than one token (use 0.0625 or more)",
        ),
        (
            "model.experts.balance_rate=0.01",
            (
                "model.experts.balance_rate=0.01: has no effect without model.experts.balance = "
                '"bias" (leave it out)'
            ),
        ),
        (
            "model.experts.balance_loss=0 model.experts.balance_over=step",
            "model.experts.balance_over=step: has no effect with model.experts.balance_loss = 0 "
            "(leave it out, or give a "
            "weight "
            "above 0)",
        ),
        (
            "model.experts.balance=none model.experts.balance_loss=0.1",
            ('model.experts.balance_loss=0.1: conflicts with model.experts.balance = "none" (leave it out)'),
        ),
        (
            "model.experts.router_groups=4 model.experts.per_token=3",
            "deck.toml: model.experts.router_groups_per_token = 1 (default): selects 2 of 8 experts for "
            "a token, which requires model.experts.per_token = 3 of them (use 2 to 4)",
        ),
        (
            "model.experts.shared=1 model.experts.mlp=20 layout.tensor=8",
            "layout.tensor=8: must divide model.experts.shared x model.experts.mlp = 1 x 20 = 20 (use "
            "1, 2, 4 or 5)",
        ),
        (
            "model.experts.dense_first=1 model.mlp=97 model.experts.mlp=96 layout.tensor=2",
            "layout.tensor=2: must divide model.mlp = 97 (use 1, given model.heads = 8)",
        ),
    ],
)
def test_mixtures_that_cannot_be(override: str, told: str) -> None:
    assert problems(*override.split()) == [told]


def test_biases_are_split_by_features() -> None:
    told = problems("model.family=gpt2", "layout.expert_tensor=3")
    assert told == [
        "layout.expert_tensor=3: must divide model.hidden = 64 to split biases (use 1, 2, 4 or 8)"
    ]


@pytest.mark.parametrize("axis", ["expert", "expert_tensor"])
def test_axes_of_experts_need_experts(axis: str) -> None:
    (told,) = problems(f"layout.{axis}=2", deck=DENSE)
    assert told.startswith(f"layout.{axis}=2: ")
    assert told.endswith(": requires model.experts.count, which is not given")


VALUES = {
    "experts_per_token": "3",
    "expert_mlp": "128",
    "shared_experts": "1",
    "expert_every": "2",
    "dense_first": "1",
    "router": "sigmoid",
    "router_normalize": "false",
    "router_scale": "2.5",
    "router_groups": "2",
    "router_groups_per_token": "2",
    "router_dtype": "compute",
    "router_z_loss": "0.001",
    "balance": "bias",
    "balance_loss": "0.02",
    "balance_over": "sequence",
    "balance_rate": "0.01",
    "capacity": "1.5",
    "record_routing": "4",
}


@pytest.mark.parametrize("name", VALUES)
def test_keys_of_mixtures_need_experts(name: str) -> None:
    told = problems(f"model.{name}={VALUES[name]}", deck=DENSE)
    assert told == [f"model.{name}={VALUES[name]}: has no effect without [model.experts] (leave it out)"]


def test_every_key_of_mixtures_is_among_those() -> None:
    names = {key.rpartition(".")[2] for key in old_keys() if key.startswith("model.")} - {"experts"}
    assert names == set(VALUES)


@pytest.mark.parametrize(
    ("overrides", "ranks", "told"),
    [
        (
            "layout.expert=8",
            4,
            "layout.expert=8: must divide the 4 ranks of a pipeline stage (use 1, 2 or 4)",
        ),
        (
            "layout.expert=4 layout.expert_tensor=2 layout.pipeline=2",
            8,
            "layout.expert=4: must divide the 4 ranks of a pipeline stage / layout.expert_tensor = 4 / "
            "2 = 2 (use 1 or 2)",
        ),
        (
            "layout.expert_tensor=8",
            4,
            "layout.expert_tensor=8: must divide the 4 ranks of a pipeline stage (use 1, 2 or 4)",
        ),
        (
            "layout.expert=4 layout.zero=2 layout.zero_group=4",
            8,
            "layout.zero_group=4: must divide the 2 ranks that hold the same experts, because it shards "
            "these experts over them (use 1 or 2)",
        ),
    ],
)
def test_experts_that_do_not_fit_the_ranks(overrides: str, ranks: int, told: str) -> None:
    assert problems(*overrides.split(), ranks=ranks) == [told]


def test_a_capacity_is_a_number_that_tokens_can_be_counted_with() -> None:
    (told,) = problems("model.experts.capacity=1e300")
    assert told.startswith("model.experts.capacity=1e300: must be ")
    assert "at most" in told


def test_no_more_choices_are_written_down_than_a_file_may_have() -> None:
    # Two mixtures of two choices in each of 64 tokens, four bytes each: 1 KiB a sample.
    keys = ("model.experts.every=2", "model.experts.dense_first=1")
    parse_deck(DECK, (*keys, f"model.experts.record_routing={1 << 20}"))
    (problem,) = problems(*keys, f"model.experts.record_routing={1 << 20}", "model.experts.per_token=3")
    assert (
        "model.experts.record_routing=1048576: requires 1.61 GB on rank 0, more than the limit of 1.07 "
        "GB" in problem
    )
    assert "use 699050 samples or fewer" in problem
