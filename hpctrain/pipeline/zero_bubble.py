"""Zero-bubble schedules with a fixed order: ZB-H1 and ZB-H2 (Qi et al., arXiv 2401.10241).

The backward pass is split. The stage before waits only for the gradient of the input (I). The gradients of
the weights (W) are delayed, and fill the gaps that 1F1B has at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.pipeline.action import Action, Kind, Schedule

_KINDS: tuple[Kind, Kind, Kind] = ("F", "I", "W")


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """Return ZB-H1: activations of at most p micro-batches on every stage, a third of 1F1B's bubble."""
    return _zero_bubble("zb-h1", micro_batches, [(stages - stage, stage) for stage in range(stages)])


def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """Return ZB-H2: almost no bubble if all passes take equally long, with up to 2 p - 1 micro-batches."""
    waits = [(2 * (stages - stage) - 1, 2 * stage) for stage in range(stages)]
    return _zero_bubble("zb-h2", micro_batches, waits)


def _zero_bubble(name: str, micro_batches: int, waits: Sequence[tuple[int, int]]) -> Schedule:
    """Return a schedule in which I, a delayed W and F alternate after a warm-up.

    Args:
        name: Name of the schedule.
        micro_batches: Number of micro-batches.
        waits: For each stage, the number of F before the first I, and the number of micro-batches by which W
            is behind I.
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
