"""The end of a run that learns nothing: too many steps in a row, or all of them, were without an update."""

from __future__ import annotations

from hpctrain.deck.schema import Deck
from hpctrain.train.step import StepResult, TrainState, learns
from hpctrain.words import counted


def skip_reason(result: StepResult) -> str:
    """Return why a step was left without an update."""
    if result.spike is not None:
        return result.spike.why
    if not learns(result.tokens, result.loss):
        return "no token of its samples is to be learned"
    return f"loss {result.loss:g} or gradient norm {result.grad_norm:g} is not finite"


def learns_nothing(deck: Deck, state: TrainState) -> str:
    """Return why a run is to end because it makes no updates; "" where it may go on.

    It ends after `stability.max_skipped_steps` steps in a row without an update, or where none of its steps
    was one.
    """
    most = deck.stability.max_skipped_steps
    if not most:
        return ""
    if state.skipped_in_a_row >= most:
        steps = counted(state.skipped_in_a_row, "step")
        return f"the last {steps} made no update (stability.max_skipped_steps = {most})"
    if state.step == deck.run.steps and state.skipped == state.step:
        return f"none of its {counted(state.step, 'step')} made an update"
    return ""
