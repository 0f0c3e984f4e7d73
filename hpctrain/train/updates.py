"""Decision to end a run that does not learn: too many steps in a row, or all steps, made no update."""

from __future__ import annotations

from hpctrain.deck.schema import Deck
from hpctrain.train.step import StepResult, TrainState, learns
from hpctrain.words import counted


def skip_reason(result: StepResult) -> str:
    """Return why a step made no update, as a clause for messages."""
    if result.spike is not None:
        return result.spike.why
    if not learns(result.tokens, result.loss):
        return "its samples contain no token to learn"
    return f"loss {result.loss:g} or gradient norm {result.grad_norm:g} is not finite"


def no_update_reason(deck: Deck, state: TrainState) -> str:
    """Return the reason to end a run that makes no updates; "" if it may continue.

    It ends after `stability.max_skipped_steps` steps in a row without an update, or after its last step if
    none of its steps made an update.
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
