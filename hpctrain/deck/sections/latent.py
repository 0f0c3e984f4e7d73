"""The table [model.latent], multi-head latent attention (DeepSeek-V2), and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpctrain.deck.families import FAMILIES
from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import GIVEN, Above, Conflicts, Relations, Requires
from hpctrain.deck.sections.experts import LARGEST_SIZE

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


class LatentTable(Section):
    """Latent attention (MLA): the keys and values of all heads follow from a few features of a token."""

    key_value_rank: int = key(
        "Features from which the keys and values of all heads follow (kv_lora_rank).", ge=1, le=LARGEST_SIZE
    )
    query_rank: int | None = key(
        "Features from which the queries of all heads follow (q_lora_rank).",
        None,
        derived="none: queries follow from hidden states",
        ge=1,
        le=LARGEST_SIZE,
    )
    rotary_size: int = key(
        "Features of model.head_size that are rotated; those of keys are common to all heads.",
        ge=2,
        le=LARGEST_SIZE,
    )
    value_size: int = key(
        "Width of the values of one head (v_head_dim).", derived="model.head_size", ge=1, le=LARGEST_SIZE
    )


_TABLE, _KEY = "model.latent", "model.latent.key_value_rank"

RELATIONS: Relations = (
    Requires(_KEY, "model.positions", ("rotary",)),
    Conflicts(
        "model.query_key_norm",
        _TABLE,
        ("head", "all", "layer_per_head"),
        GIVEN,
        because="latent attention has norms of its own",
    ),
    Conflicts("model.attention_sinks", _TABLE, (True,), GIVEN),
    Conflicts(
        "model.query_key_value_clip",
        _TABLE,
        Above(0),
        GIVEN,
        because="latent attention has no projection to queries, keys and values to clamp",
    ),
    Conflicts(
        "model.attention_bias",
        _TABLE,
        ("query_key_value", "all"),
        GIVEN,
        because="latent attention has no biases",
    ),
    Conflicts(
        "model.adapters", _TABLE, GIVEN, GIVEN, because="matrices of latent attention cannot have adapters"
    ),
    Conflicts(
        "model.parametrization",
        _TABLE,
        ("mup",),
        GIVEN,
        because="the learning rates of its ranks have no known rule",
    ),
)
"""Relations of keys that only transformers have."""


def latent_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of [model.latent] with other sizes of the model."""
    model, latent = deck.model, deck.model.latent
    if latent is None:
        if FAMILIES[model.family].has_latents:
            sentence = f'requires the table [{_TABLE}], the sizes of latent attention (or use "llama")'
            yield DeckProblem("model.family", sentence, (_TABLE,))
        return
    plain = model.head_size - latent.rotary_size
    if latent.rotary_size % 2:
        sentence = f"must be even, since features are rotated in pairs (use {latent.rotary_size + 1})"
        yield DeckProblem(f"{_TABLE}.rotary_size", sentence)
    elif plain < 2 and model.head_size % 2 == 0:
        sentence = f"must leave at least 2 other features of model.head_size = {model.head_size}"
        yield DeckProblem(f"{_TABLE}.rotary_size", sentence, ("model.head_size",))
    if latent.value_size > model.head_size:
        sentence = f"must be at most model.head_size = {model.head_size}, the size of queries and keys"
        yield DeckProblem(f"{_TABLE}.value_size", sentence, ("model.head_size",))
    if model.key_value_heads != model.heads:
        sentence = f"must be model.heads = {model.heads} with [{_TABLE}], since each head has its own keys"
        yield DeckProblem("model.key_value_heads", sentence, ("model.heads", _TABLE))
    if model.rotary_fraction != 1:
        sentence = f"must be 1 with [{_TABLE}], whose rotary_size says what is rotated"
        yield DeckProblem("model.rotary_fraction", sentence, (_TABLE,))
