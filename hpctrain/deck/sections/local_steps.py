"""The table [layout.local_steps], replicas that train independently for some steps, and its checks."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Section, key, table
from hpctrain.deck.problem import DeckProblem, divisors, nearest_numbers
from hpctrain.deck.relations import AtMost, Relations
from hpctrain.text import counted, either

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


class DilocoTable(Section):
    """DiLoCo (arXiv 2311.08105): an outer optimizer with Nesterov momentum."""

    learning_rate: float = key("Learning rate of the outer step.", 0.7, gt=0, le=1000)
    momentum: float = key("Momentum of the outer step.", 0.9, ge=0, lt=1)


class LocalStepsTable(Section):
    """Replicas that make several steps independently between two synchronizations (Local SGD, DiLoCo)."""

    replicas: int = key("Number of replicas, which are groups of data ranks with the same layout.", 1, ge=1)
    steps: int = key("Steps of each replica between two synchronizations.", 1, unit="steps", ge=1)
    outer: Literal["average", "diloco"] = key(
        "Outer step of a synchronization: the mean of weights, or DiLoCo's step towards it.", "average"
    )
    fragments: int = key(
        "Parts of the model, made of alternate blocks, that are synchronized in different steps.", 1, ge=1
    )
    delay: int = key(
        "Steps that replicas make while a synchronization is in flight; then it takes effect.",
        0,
        unit="steps",
        ge=0,
    )
    blend: float = key(
        "Share of a replica's own weights that it keeps at a synchronization.", 0.0, ge=0, le=1
    )
    format: Literal["fp32", "bf16", "int8", "int4"] = key(
        "Format of the weight differences that are sent; int8 and int4 have a scale for every 256.", "fp32"
    )
    diloco: DilocoTable | None = table("Keys of the outer optimizer.", selected_by="outer")

    @property
    def has_outer_model(self) -> bool:
        """True if there is an outer model: several replicas, or one with outer steps."""
        return self.replicas > 1 or self.diloco is not None


_REPLICAS, _STEPS = "layout.local_steps.replicas", "layout.local_steps.steps"

RELATIONS: Relations = (
    AtMost(
        "layout.local_steps.delay",
        _STEPS,
        below=True,
        because="a synchronization must take effect before the next one starts",
    ),
)


def has_outer_model(deck: Deck) -> bool:
    """Return True if a deck has local steps with an outer model.

    Then replicas diverge, or the only replica makes outer steps.
    """
    return deck.layout.local_steps is not None and deck.layout.local_steps.has_outer_model


def local_step_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of [layout.local_steps] that do not depend on the number of ranks; none without it.

    These are a table without effect, since its only replica makes no outer steps, and too many fragments.
    """
    keys, layers = deck.layout.local_steps, deck.model.layers
    if keys is None:
        return
    if not keys.has_outer_model:
        sentence = f"has no effect with {_REPLICAS} = 1 (use 2 replicas or more, or leave the table out)"
        yield DeckProblem("layout.local_steps", sentence, (_REPLICAS,), no_effect=True)
    if keys.fragments > min(layers, keys.steps):
        limit = f"model.layers = {layers}: each fragment has one block or more"
        if layers >= keys.steps:
            limit = f"{_STEPS} = {keys.steps}: each fragment is synchronized in a different step"
        yield DeckProblem(
            "layout.local_steps.fragments", f"must be at most {limit}", ("model.layers", _STEPS)
        )


def replica_world_problems(deck: Deck, data_ranks: int, stage_ranks: int) -> Iterator[DeckProblem]:
    """Yield the problem of replicas that the ranks cannot form; at most one.

    Replicas of a single data rank also conflict with the compression of gradients. There is no problem
    without [layout.local_steps], nor if the experts do not fit the ranks, which `expert_world_problems`
    reports.

    Args:
        deck: The deck.
        data_ranks: Number of data ranks of all replicas together.
        stage_ranks: Number of ranks of a pipeline stage of all replicas together.
    """
    replicas, fitting = deck.layout.replicas, fitting_replicas(deck, data_ranks, stage_ranks)
    if fitting and replicas not in fitting:
        would = either(nearest_numbers(replicas, fitting))
        whole = "context and expert groups" if deck.model.experts else "context groups"
        sentence = f"must divide the {counted(data_ranks, 'data rank')} into replicas with complete {whole}"
        axes = ("layout.data", "layout.context", "layout.tensor", "layout.expert", "layout.expert_tensor")
        yield DeckProblem(_REPLICAS, f"{sentence} (use {would})", axes)
    elif (
        replicas > 1
        and deck.communication.compress != "none"
        and data_ranks * deck.layout.context == replicas
    ):
        form = (
            f"has no effect with {replicas} replicas of one data rank each: it sums gradients "
            'within a replica (use "none")'
        )
        yield DeckProblem("communication.compress", form, (_REPLICAS, "layout.data", "layout.context"))


def fitting_replicas(deck: Deck, data_ranks: int, stage_ranks: int) -> list[int]:
    """Return the possible numbers of replicas, from 1 on; empty if the experts do not fit the ranks.

    They are in ascending order. Batch sizes are not considered.

    Args:
        deck: The deck, whose own number of replicas does not count. It need not have [layout.local_steps].
        data_ranks: Number of data ranks of all replicas together.
        stage_ranks: Number of ranks of a pipeline stage of all replicas together.
    """
    layout = deck.layout
    experts = layout.expert * layout.expert_tensor if deck.model.experts else 1
    return [] if stage_ranks % experts else divisors(gcd(data_ranks, stage_ranks // experts))
