"""Rotary positions: scaled frequencies are those of `transformers`, and layouts agree about them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.model.attention.rotary import Rotary, RotaryFrequencies
from hpctrain.train.layout_verification import compare
from hpctrain.train.scaled_down_deck import scale_down_family
from tests.engines import LLAMA, small_deck
from tests.rope_scalings import LONGROPE_KEYS, SCALINGS, YARN_KEYS, hf_rope_parameters

LAYOUTS = [
    ("layout.tensor=2", "layout.sequence_parallel=true"),
    ("layout.pipeline=2",),
    ("layout.context=2",),
    ("layout.context=2", "layout.context_form=all_to_all", "memory.recompute=selective"),
]


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("sequence", [8, 24])
def test_frequencies_are_those_of_transformers(name: str, sequence: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = SCALINGS[name]
    longest = 12 if scaling.kind == "dynamic" else 48
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=longest,
        rope_parameters=hf_rope_parameters(scaling, 50.0),
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, None, seq_len=sequence)
    frequencies = RotaryFrequencies(8, 50.0, scaling, sequence)
    angles = frequencies.angles_per_position(torch.device("cpu"))
    torch.testing.assert_close(angles.float(), expected, rtol=1e-6, atol=0)
    assert frequencies.attention_factor == pytest.approx(factor, rel=1e-12)
    unscaled = RotaryFrequencies(8, 50.0, None, sequence).angles_per_position(torch.device("cpu"))
    assert (scaling.kind == "dynamic" and sequence == 8) == torch.equal(angles, unscaled)


def test_tables_have_the_attention_factor() -> None:
    positions, frequencies = torch.arange(5), RotaryFrequencies(8, 50.0, SCALINGS["yarn"], 24)
    cosine, sine = Rotary(positions, frequencies, torch.float64).tables
    squares: Any = cosine**2 + sine**2
    torch.testing.assert_close(squares, torch.full_like(squares, frequencies.attention_factor**2))
    assert frequencies.attention_factor > 1.1


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("keys", [YARN_KEYS, LONGROPE_KEYS], ids=["yarn", "longrope"])
def test_first_steps_are_those_of_one_rank(world: World, keys: tuple[str, ...]) -> None:
    for layout in LAYOUTS if keys is YARN_KEYS else LAYOUTS[:1]:
        deck = small_deck(*LLAMA, "model.head_size=6", *keys, *layout, "batch.global_size=4")
        small = scale_down_family(deck)
        assert small.model.rope_scaling is not None
        for difference in compare(small, world, make_mesh(deck, world)):
            bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
            assert difference.error <= bound, (layout, difference)
