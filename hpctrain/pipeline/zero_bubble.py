"""Zero-bubble schedules made by hand: ZB-H1 and ZB-H2 (Qi and others, arXiv 2401.10241).

Backward is split. Only the gradient of the input is waited for by the stage before; the gradient of the
weights is put off, and fills the gaps that 1F1B leaves at the end of a step.
"""

from __future__ import annotations

from hpctrain.pipeline.action import Action, Schedule


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """As many activations as the first stage of 1F1B, p, on every stage; about a third of its bubble."""
    orders = (_stage(micro_batches, warm_up=stages - stage, lag=stage) for stage in range(stages))
    return Schedule(tuple(orders), "zb-h1")


def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """Nearly no bubble where all times are alike, for activations of 2 p - 1 micro-batches."""
    waits = ((2 * (stages - stage) - 1, 2 * stage) for stage in range(stages))
    return Schedule(tuple(_stage(micro_batches, warm_up, lag) for warm_up, lag in waits), "zb-h2")


def _stage(micro_batches: int, warm_up: int, lag: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then in turn an input gradient, the weight gradient `lag` before it, a forward."""
    actions = [Action("F", index) for index in range(min(warm_up, micro_batches))]
    for index in range(micro_batches):
        actions.append(Action("I", index))
        if index >= lag:
            actions.append(Action("W", index - lag))
        if index + warm_up < micro_batches:
            actions.append(Action("F", index + warm_up))
    actions += [Action("W", index) for index in range(max(0, micro_batches - lag), micro_batches)]
    return tuple(actions)
