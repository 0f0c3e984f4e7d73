"""What a deck says of products in 8 bits that cannot be, or that has no effect."""

from __future__ import annotations

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.deck.sections.precision import BLOCK_SIZES
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError
from hpctrain.parallel.fp8.recipes import GRADIENT_FORMS, RECIPES
from tests.deck.test_check import DECK, problems

FP8 = ["precision.compute=fp8"]
WIDE = ["model.hidden=512", "model.heads=8", "model.key_value_heads=8", "model.mlp=1024"]


@pytest.mark.parametrize(
    "overrides",
    [
        [*FP8, "precision.fp8_history=1", 'precision.fp8_exclude=["blocks.0.*"]'],
        [*FP8, "precision.fp8=row", "precision.fp8_gradients=e4m3", "layout.tensor=2"],
        [*FP8, "precision.fp8=tensor", "layout.context=2", "precision.gradients=compute"],
        [*FP8, "precision.fp8=block"],
        [*FP8, *WIDE, "precision.fp8=block", "layout.tensor=4"],
        [*FP8, *WIDE, "precision.fp8=mx", "layout.tensor=4", "layout.sequence_parallel=true"],
        [*FP8, "precision.fp8_messages=true", "layout.tensor=2", "layout.sequence_parallel=true"],
        [*FP8, "precision.fp8=mx", "layout.context=2", "batch.sequence=64", "batch.micro_size=2"],
        [*FP8, "precision.fp8=row", "communication.server=sync"],
        [*FP8, "precision.fp8_gather=true", "layout.zero=3", "precision.fp8_watch=4"],
        [*FP8, "precision.fp8_gather=true", "layout.zero=3", "precision.fp8=tensor", "layout.tensor=2"],
    ],
)
def test_products_in_8_bits_that_can_be(overrides: list[str]) -> None:
    parse_deck(DECK, overrides)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["precision.fp8=row"],
            'precision.fp8=row: has no effect without precision.compute = "fp8" (leave it out)',
        ),
        (
            ["precision.compute=bf16", "precision.fp8_history=4"],
            ('precision.fp8_history=4: has no effect without precision.compute = "fp8" (leave it out)'),
        ),
        (
            ["machine.products=onednn", "precision.compute=bf16"],
            (
                'machine.products=onednn: conflicts with precision.compute = "bf16": it multiplies fp32 '
                'matrices only (use "auto", "library", "fp32" or "fp32-onednn")'
            ),
        ),
        (
            ["machine.products=fp32"],
            (
                'machine.products=fp32: conflicts with precision.compute = "fp32": it multiplies bf16 '
                'and fp16 matrices only (use "auto", "library" or "onednn")'
            ),
        ),
        (
            ["precision.fp8_gradients=e4m3"],
            ('precision.fp8_gradients=e4m3: has no effect without precision.compute = "fp8" (leave it out)'),
        ),
        (
            ["precision.fp8_messages=true"],
            ('precision.fp8_messages=true: has no effect without precision.compute = "fp8" (leave it out)'),
        ),
        (
            [*FP8, "precision.fp8_messages=true", "layout.tensor=2"],
            "precision.fp8_messages=true: has no effect without layout.sequence_parallel = true "
            "(leave it out)",
        ),
        (
            ["precision.fp8_gather=true", "layout.zero=3"],
            ('precision.fp8_gather=true: has no effect without precision.compute = "fp8" (leave it out)'),
        ),
        (
            [*FP8, "precision.fp8_gather=true", "layout.zero=2"],
            "precision.fp8_gather=true: has no effect without layout.zero = 3 (leave it out)",
        ),
        (
            [*FP8, "precision.fp8_gather=true", "layout.zero=3", "precision.fp8=mx"],
            (
                'precision.fp8_gather=true: conflicts with precision.fp8 = "mx": ranks split blocks of '
                "elements with a common scale (use false)"
            ),
        ),
        (
            ['precision.fp8_exclude=["head"]'],
            (
                'precision.fp8_exclude=["head"]: has no effect without precision.compute = "fp8" '
                "(leave it out)"
            ),
        ),
        (
            ["precision.fp8_watch=4"],
            'precision.fp8_watch=4: has no effect without precision.compute = "fp8" (leave it out)',
        ),
        (
            [*FP8, "precision.fp8=row", "precision.fp8_watch=4", "communication.server=sync"],
            (
                "precision.fp8_watch=4: conflicts with [communication.server]: workers make steps "
                "independently, and no rank has the counts of all workers (use 0)"
            ),
        ),
        (
            [*FP8, "precision.fp8=block", "precision.fp8_history=4"],
            ('precision.fp8_history=4: has no effect without precision.fp8 = "delayed" (leave it out)'),
        ),
        (
            ["precision.compute=bf16", "precision.initial_loss_scale=1024"],
            (
                "precision.initial_loss_scale=1024: has no effect without precision.compute = "
                '"fp16" (leave it out)'
            ),
        ),
        (
            [*FP8, "precision.loss_scale_window=10"],
            (
                'precision.loss_scale_window=10: has no effect without precision.compute = "fp16" '
                "(leave it out)"
            ),
        ),
        (
            [*FP8, "precision.fp8=delayed", "communication.server=async"],
            (
                'precision.fp8=delayed: conflicts with communication.server.mode = "async": its scales '
                'follow steps that all ranks make together (use "tensor", "row", "block" or "mx")'
            ),
        ),
        (
            [*FP8, *WIDE, "precision.fp8=block", "layout.tensor=8"],
            "layout.tensor=8: splits model.heads x model.head_size = 512, which must be a multiple of "
            '128 x layout.tensor = 1024 with precision.fp8 = "block", which scales blocks of 128 '
            'elements (use 1024, or precision.fp8 = "tensor", "delayed" or "row")',
        ),
        (
            [*FP8, *WIDE, "precision.fp8=mx", "model.mlp=96", "layout.tensor=2"],
            "layout.tensor=2: splits model.mlp = 96, which must be a multiple of 32 x layout.tensor = "
            '64 with precision.fp8 = "mx", which scales blocks of 32 elements (use 64 or 128, or '
            'precision.fp8 = "tensor", "delayed" or "row")',
        ),
        (
            [*FP8, "precision.fp8=block", "layout.context=2", "batch.sequence=64", "batch.micro_size=4"],
            "layout.context=2: splits batch.micro_size x batch.sequence = 256 into 4 pieces, each of "
            'which must be a multiple of 128 with precision.fp8 = "block", which scales blocks of 128 '
            'elements (use 512 in total, or precision.fp8 = "tensor", "delayed" or "row")',
        ),
    ],
)
def test_what_it_says_in_vain_or_cannot_have_is_told(overrides: list[str], told: str) -> None:
    assert told in problems(*overrides)


def test_a_stored_deck_may_say_in_vain_what_it_said_before() -> None:
    text = f'{DECK}\n[precision]\ncompute = "bf16"\nfp8_history = 4\n'
    assert parse_deck(text, includes=False).precision.fp8_history == 4
    sharded = ["layout.zero=3", "layout.tensor=2", "layout.sequence_parallel=true"]
    sent = [*FP8, "precision.fp8_gather=true", "precision.fp8_messages=true"]
    other = ["layout.zero=1", "layout.sequence_parallel=false"]
    stored = deck_text(parse_deck(DECK, [*sent, *sharded]))
    assert parse_deck(stored, other, includes=False).precision.fp8_gather
    with pytest.raises(HpctrainError, match=r"fp8_gather=true: has no effect without layout.zero = 3"):
        parse_deck(stored, [*other, "precision.fp8_gather=true"], includes=False)


def test_the_deck_knows_every_recipe_and_the_blocks_that_it_has() -> None:
    blocks = {name: recipe.tokens.blocks.columns for name, recipe in RECIPES.items()}
    assert {name: size for name, size in blocks.items() if size} == dict(BLOCK_SIZES)
    for name in RECIPES:
        for form in GRADIENT_FORMS:
            keys = [f"precision.fp8={name}", f"precision.fp8_gradients={form}"]
            assert parse_deck(DECK, [*FP8, *keys]).precision.format_name == f"fp8 ({name})"


@pytest.mark.parametrize("scale", ["6e-5", "16777217", "1e300"])
def test_a_first_loss_scale_is_one_that_later_ones_may_be(scale: str) -> None:
    keys = ["precision.compute=fp16", f"precision.initial_loss_scale={scale}"]
    with pytest.raises(HpctrainError, match=r"must be a number from 6\.103515625e-05 to 16777216\.0"):
        parse_deck(DECK, keys, includes=False)
    largest = parse_deck(DECK, [keys[0], "precision.initial_loss_scale=16777216"], includes=False)
    assert largest.precision.initial_loss_scale == 2.0**24
