"""The section [stability], and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Duration, Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import Conflicts, HasEffectWith, Relations

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
        "Ranks that compute this many times longer than the median are reported (not with NCCL); 0: none.",
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
    spike_factor: float = key("Deviations above the median from which a value is a spike.", 6.0, gt=1)
    spike_back: int = key(
        "Minimum number of steps that a rollback goes back; their samples are skipped.",
        100,
        unit="steps",
        ge=1,
    )
    spike_most: int = key("Maximum number of spikes of a run; a run with more spikes stops.", 20, ge=1)
    max_skipped_steps: int = key(
        "Consecutive steps without an update (or all steps) after which a run ends with an error; 0: never.",
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

RELATIONS: Relations = (
    HasEffectWith("stability.corruption_every", "stability.corruption", ("cheap", "full")),
    HasEffectWith("stability.spike_window", _SPIKE, ("skip", "rollback")),
    HasEffectWith("stability.spike_factor", _SPIKE, ("skip", "rollback")),
    HasEffectWith("stability.spike_most", _SPIKE, ("skip", "rollback")),
    HasEffectWith("stability.spike_back", _SPIKE, ("rollback",)),
    Conflicts(
        "stability.corruption", "communication.server.mode", because="the state of servers is not checked"
    ),
    Conflicts(_SPIKE, "communication.server.mode", because="servers update the weights with each gradient"),
    Conflicts(
        "stability.verify_layout",
        "communication.server.mode",
        because="it compares steps that all ranks make together",
    ),
)


def stability_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of straggler_factor, and of the reaction to spikes.

    The latter are a spike_window that is not shorter than the run, and a rollback without checkpoints or
    copies that are old enough. Relations in RELATIONS are checked elsewhere.
    """
    keys, checkpoint, steps = deck.stability, deck.checkpoint, deck.run.steps
    if 0 < keys.straggler_factor <= 1:
        sentence = "must be above 1, or 0 to report no rank: half of the ranks are slower than the median"
        yield DeckProblem("stability.straggler_factor", sentence)
    if keys.spike == "off":
        return
    examined_steps = steps - deck.learning_rate.warmup
    if keys.spike_window >= steps:
        sentence = f"must be below run.steps = {steps}: otherwise no step is examined"
        would = f" (use {examined_steps // 2})" if examined_steps // 2 >= 8 else ""
        yield DeckProblem("stability.spike_window", sentence + would, ("run.steps",))
    if keys.spike != "rollback":
        return
    if not checkpoint.every and not checkpoint.memory_every:
        sentence = (
            f"requires checkpoint.every or checkpoint.memory_every (use {keys.spike_back} steps for either)"
        )
        yield DeckProblem(_SPIKE, sentence, ("checkpoint.every", "checkpoint.memory_every"))
    elif not checkpoint.memory_every and not checkpoint.keep_every:
        oldest = (checkpoint.keep - 1) * checkpoint.every
        if oldest < keys.spike_back:
            enough = -(-keys.spike_back // checkpoint.every) + 1
            sentence = (
                f"is longer than the age of the oldest of {checkpoint.keep} checkpoints, one every "
                f"{checkpoint.every} steps (use checkpoint.keep = {enough}, or checkpoint.memory_every)"
            )
            others = ("checkpoint.keep", "checkpoint.every", "checkpoint.memory_every")
            yield DeckProblem("stability.spike_back", sentence, others)
