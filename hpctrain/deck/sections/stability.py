"""The section [stability], and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Duration, Section, key
from hpctrain.deck.problem import DeckProblem

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


class Stability(Section):
    """Detection of hangs, divergence, loss spikes and silent data corruption, and recovery from them."""

    hang_seconds: Duration = key(
        "Time without progress after which the job reports what each rank was doing and ends; 0: never.",
        600.0,
        unit="seconds",
        ge=0,
    )
    check_parameters: bool = key(
        "Whether to compare the initial parameters of all data-parallel copies before training.", True
    )
    straggler_factor: float = key(
        "Ranks that compute this many times longer than the median are reported; 0: none (none with NCCL).",
        1.5,
        ge=0,
    )
    z_loss: float = key(
        "Weight of the squared log-partition function in the loss (PaLM); 0: none.", 0.0, ge=0, le=1
    )
    spike: Literal["off", "skip", "rollback"] = key(
        "Reaction to a spike of loss or gradient norm: skip the update, or roll back to an earlier state.",
        "off",
    )
    spike_window: int = key(
        "Number of last steps whose median and deviation define a spike; detection begins after the warm-up.",
        128,
        unit="steps",
        ge=8,
        le=100_000,
    )
    spike_factor: float = key("A spike is this many deviations above the median.", 6.0, gt=1)
    spike_back: int = key(
        "Lowest number of steps that a rollback goes back; the samples of these steps are skipped.",
        100,
        unit="steps",
        ge=1,
    )
    spike_most: int = key(
        "Highest number of spikes of a run; with one more it stops, for you to examine it.", 20, ge=1
    )
    max_skipped_steps: int = key(
        "Consecutive steps without an update, or all steps of a run, that end it with an error (0: never).",
        50,
        unit="steps",
        ge=0,
    )
    corruption: Literal["off", "cheap", "full"] = key(
        "Detection of silent data corruption; cheap: memory, copies, sums; full: matrix products and "
        "messages too.",
        "off",
    )
    corruption_every: int = key(
        "Steps between comparisons of data that several ranks hold copies of.", 10, unit="steps", ge=1
    )
    verify_layout: bool = key(
        "Whether to verify this layout before training: one small step must equal that of a single rank.",
        False,
    )


_SPIKE = "stability.spike"


def stability_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of the reaction of a deck to spikes."""
    keys, checkpoint, steps = deck.stability, deck.checkpoint, deck.run.steps
    if keys.corruption == "off" and keys.corruption_every != _default("corruption_every"):
        sentence = 'has no effect with stability.corruption = "off" (leave it out)'
        yield DeckProblem("stability.corruption_every", sentence, ("stability.corruption",), no_effect=True)
    for name in _in_vain(keys):
        sentence = f'has no effect with {_SPIKE} = "{keys.spike}" (leave it out)'
        yield DeckProblem(f"stability.{name}", sentence, (_SPIKE,), no_effect=True)
    if keys.spike == "off":
        return
    judged = steps - deck.learning_rate.warmup
    if keys.spike_window >= steps:
        sentence = f"is no shorter than the run, of run.steps = {steps}, and no step would be judged"
        would = f" ({judged // 2} would)" if judged // 2 >= 8 else ""
        yield DeckProblem("stability.spike_window", sentence + would, ("run.steps",))
    if keys.spike != "rollback":
        return
    if not checkpoint.every and not checkpoint.memory_every:
        sentence = (
            "has nothing to go back to, without checkpoint.every or checkpoint.memory_every "
            f"({keys.spike_back} steps would do for either)"
        )
        yield DeckProblem(_SPIKE, sentence, ("checkpoint.every", "checkpoint.memory_every"))
    elif not checkpoint.memory_every and not checkpoint.keep_every:
        oldest = (checkpoint.keep - 1) * checkpoint.every
        if oldest < keys.spike_back:
            enough = -(-keys.spike_back // checkpoint.every) + 1
            sentence = (
                f"is further back than the oldest of {checkpoint.keep} checkpoints, one every "
                f"{checkpoint.every} steps (checkpoint.keep = {enough} would do, or checkpoint.memory_every)"
            )
            others = ("checkpoint.keep", "checkpoint.every", "checkpoint.memory_every")
            yield DeckProblem("stability.spike_back", sentence, others)


def _in_vain(keys: Stability) -> Iterator[str]:
    """Yield the names of keys that differ from their defaults and have no effect."""
    looked_at = {
        "off": (),
        "skip": ("spike_window", "spike_factor", "spike_most"),
        "rollback": ("spike_window", "spike_factor", "spike_most", "spike_back"),
    }[keys.spike]
    for name in ("spike_window", "spike_factor", "spike_back", "spike_most"):
        if name not in looked_at and getattr(keys, name) != _default(name):
            yield name


def _default(name: str) -> object:
    return Stability.model_fields[name].default
