"""The table [model.rope_scaling]: scaled frequencies of rotary positions, and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import AtMost, HasEffectWith, Relations, Requires
from hpctrain.text import counted

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

_LONGEST_SEQUENCE = 1_000_000_000
_LARGEST = 1_000_000


class RopeScaling(Section):
    """Scaled frequencies of rotary positions, as `transformers` computes them, for sequences that got longer.

    Keys that only some kinds have are refused with the other kinds.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"] = key(
        "Rule by which the frequencies change; its name in rope_parameters of a config.json."
    )
    factor: float = key("Factor by which the sequence got longer than before the scaling.", ge=1, le=_LARGEST)
    original_sequence: int | None = key(
        "Length of the sequence before the scaling (original_max_position_embeddings).",
        None,
        unit="tokens",
        derived="required by all kinds but linear",
        ge=2,
        le=_LONGEST_SEQUENCE,
    )
    low_frequency_factor: float = key(
        "Turns in original_sequence up to which frequencies are divided by factor (llama3).",
        1.0,
        gt=0,
        le=_LARGEST,
    )
    high_frequency_factor: float = key(
        "Turns in original_sequence from which frequencies stay as they are (llama3).",
        4.0,
        gt=0,
        le=_LARGEST,
    )
    beta_slow: float = key(
        "Turns in original_sequence up to which frequencies are divided by factor (yarn).",
        1.0,
        gt=0,
        le=_LARGEST,
    )
    beta_fast: float = key(
        "Turns in original_sequence from which frequencies stay as they are (yarn).",
        32.0,
        gt=0,
        le=_LARGEST,
    )
    truncate: bool = key(
        "Whether the frequencies at beta_slow and beta_fast are rounded to whole indices (yarn).", True
    )
    attention_factor: float | None = key(
        "Factor of rotated queries and of rotated keys (yarn, longrope).",
        None,
        derived="0.1 ln(factor) + 1 (yarn), sqrt(1 + ln(factor) / ln(original_sequence)) (longrope)",
        gt=0,
        le=_LARGEST,
    )
    short_factors: tuple[float, ...] = key(
        "Divisors of the frequencies if batch.sequence is at most original_sequence (longrope).",
        (),
        strict=False,
    )
    long_factors: tuple[float, ...] = key(
        "Divisors of the frequencies if batch.sequence is above original_sequence (longrope).",
        (),
        strict=False,
    )


_TABLE = "model.rope_scaling"
_KIND = f"{_TABLE}.kind"
_KINDS_WITH: dict[str, tuple[str, ...]] = {
    "original_sequence": ("dynamic", "llama3", "yarn", "longrope"),
    "low_frequency_factor": ("llama3",),
    "high_frequency_factor": ("llama3",),
    "beta_slow": ("yarn",),
    "beta_fast": ("yarn",),
    "truncate": ("yarn",),
    "attention_factor": ("yarn", "longrope"),
    "short_factors": ("longrope",),
    "long_factors": ("longrope",),
}
"""Kinds of scaling that have a key, by the name of the key. The other keys are those of all kinds."""

ORDERED_KEYS = (("low_frequency_factor", "high_frequency_factor", True), ("beta_slow", "beta_fast", False))
"""Pairs of keys of which the first has at most the value of the second, and True if it has to be below."""

RELATIONS: Relations = (
    Requires(_KIND, "model.positions", ("rotary",)),
    *(HasEffectWith(f"{_TABLE}.{name}", _KIND, kinds) for name, kinds in _KINDS_WITH.items()),
    *(AtMost(f"{_TABLE}.{name}", f"{_TABLE}.{limit}", below=below) for name, limit, below in ORDERED_KEYS),
)
"""Relations of keys that only transformers have."""


def keys_of_kind(kind: str) -> tuple[str, ...]:
    """Return the names of the keys of [model.rope_scaling] that a kind of scaling has, in their order."""
    names = RopeScaling.model_fields
    return tuple(name for name in names if kind in _KINDS_WITH.get(name, (kind,)))


def scaling_values(scaling: RopeScaling) -> dict[str, object]:
    """Return the keys of [model.rope_scaling] that the kind of a scaling has and that have a value."""
    values = {name: getattr(scaling, name) for name in keys_of_kind(scaling.kind)}
    return {name: value for name, value in values.items() if value is not None}


def rotated_features(head_size: int, fraction: float) -> int:
    """Return how many features of an attention head are rotated, as `transformers` rounds it."""
    return int(head_size * fraction)


def rope_scaling_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of [model.rope_scaling] with other sizes of the model; none without that table."""
    scaling, model = deck.model.rope_scaling, deck.model
    if scaling is None or model.positions != "rotary":
        return
    if scaling.original_sequence is None and scaling.kind in _KINDS_WITH["original_sequence"]:
        sentence = f"requires {_TABLE}.original_sequence, the length of the sequence before scaling"
        yield DeckProblem(_KIND, sentence, (f"{_TABLE}.original_sequence",))
    rotated = model.rotated_features
    for name, sentence in scaling_problems(scaling, rotated, model.rope_base):
        yield DeckProblem(f"{_TABLE}.{name}", sentence, ("model.head_size", "model.rope_base"))


def scaling_problems(scaling: RopeScaling, head_size: int, base: float) -> Iterator[tuple[str, str]]:
    """Yield the problems of a scaling with the rotary positions that it changes: key, and message about it.

    Args:
        scaling: The scaling, whose keys have values of the right types and ranges.
        head_size: Number of features of an attention head that are rotated.
        base: Base of the frequencies.
    """
    if scaling.kind == "yarn" and base <= 1:
        yield "kind", f"requires a base above 1, but it is {base:g}"
    if scaling.kind == "dynamic" and head_size < 4:
        yield "kind", f"requires a head size of at least 4, but it is {head_size}"
    if scaling.kind == "longrope":
        for name in ("short_factors", "long_factors"):
            divisors: tuple[float, ...] = getattr(scaling, name)
            if len(divisors) != head_size // 2:
                expected = counted(head_size // 2, "number")
                yield name, f"must have {expected}, half of the head size, but it has {len(divisors)}"
            elif not all(0 < divisor <= _LARGEST for divisor in divisors):
                yield name, f"must have numbers above 0 and up to {_LARGEST}"
