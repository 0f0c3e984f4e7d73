"""Zero-bubble schedules made by hand: ZB-H1 and ZB-H2 (Qi and others, arXiv 2401.10241).

Backward is split. Only the gradient of the input is waited for by the stage before; the gradient of the
weights is put off, and fills the gaps that 1F1B leaves at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.pipeline.action import Action, Kind, Schedule

_KINDS: tuple[Kind, Kind, Kind] = ("F", "I", "W")


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """As many activations as the first stage of 1F1B, p, on every stage; about a third of its bubble."""
    return _zero_bubble("zb-h1", micro_batches, [(stages - stage, stage) for stage in range(stages)])


def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """Nearly no bubble where all times are alike, for activations of 2 p - 1 micro-batches."""
    waits = [(2 * (stages - stage) - 1, 2 * stage) for stage in range(stages)]
    return _zero_bubble("zb-h2", micro_batches, waits)


def _zero_bubble(name: str, micro_batches: int, waits: Sequence[tuple[int, int]]) -> Schedule:
    """Of each stage, as many forwards first, then in turn an input gradient, the weight gradient a lag before
    it, and a forward; `waits` are both numbers.
    """
    count = range(micro_batches)
    forwards, gradients, weights = ([Action(kind, index) for index in count] for kind in _KINDS)
    stages = []
    for warm_up, lag in waits:
        actions = forwards[:warm_up]
        for index in count:
            actions.append(gradients[index])
            if index >= lag:
                actions.append(weights[index - lag])
            if index + warm_up < micro_batches:
                actions.append(forwards[index + warm_up])
        stages.append((*actions, *weights[max(0, micro_batches - lag) :]))
    return Schedule(tuple(stages), name)
