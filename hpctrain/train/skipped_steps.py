"""Check that ends a run whose steps make no optimizer updates.

A run ends with an error if too many steps in a row, or all of its steps, are skipped.
"""

from __future__ import annotations

from hpctrain.deck.schema import Deck
from hpctrain.text import counted
from hpctrain.train.step import StepResult, TrainState, learns


def skip_reason(result: StepResult) -> str:
    """Return why a step made no optimizer update, as a clause for messages."""
    if result.spike is not None:
        return result.spike.why
    if not learns(result.tokens, result.loss):
        return "its samples contain no target tokens"
    return f"loss {result.loss:g} or gradient norm {result.grad_norm:g} is not finite"


def reason_to_stop(deck: Deck, state: TrainState) -> str:
    """Return the reason why a run must end because it makes no updates; "" if it may continue.

    A run must end after `stability.max_skipped_steps` steps in a row without an update. It must also end
    after its last step if none of its steps made an update. A value of 0 turns both checks off.

    Args:
        deck: The deck of the run.
        state: The state after the step. Its counters include the step.
    """
    max_skipped_steps = deck.stability.max_skipped_steps
    if not max_skipped_steps:
        return ""
    if state.skipped_in_a_row >= max_skipped_steps:
        steps = counted(state.skipped_in_a_row, "step")
        return f"the last {steps} made no update (stability.max_skipped_steps = {max_skipped_steps})"
    if state.step == deck.run.steps and state.skipped == state.step:
        return f"none of its {counted(state.step, 'step')} made an update"
    return ""
