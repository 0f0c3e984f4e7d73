"""DualPipe-V: half of DualPipe, in which each stage holds two parts of the model in the shape of a V.

DualPipe is from DeepSeek-V3 (arXiv 2412.19437); Sea AI Lab found that half of it suffices. In the middle of
the step, forward and backward passes of different micro-batches alternate, so that the computation of one can
overlap with the communication of the other. The backward pass is split into I and W only where that lets
another stage continue earlier.
"""

from __future__ import annotations

from collections import deque

from hpctrain.pipeline.action import Action, Schedule


def dual_pipe_v(stages: int, micro_batches: int) -> Schedule:
    """Return the DualPipe-V schedule. Each stage holds at most 2 p + 1 activations of a chunk.

    With F, I and W the times of a chunk, I = F, and B = I + W, the bubble is (p - 1)(F + B - 2 W). It is (p -
    1)(F&B + B - 3 W) if an overlapped pair of a forward and a backward takes F&B. The schedule is meant for
    at least 2 p micro-batches. With fewer, it is the order for 2 p without the missing ones.

    Args:
        stages: Number of stages, p.
        micro_batches: Number of micro-batches.
    """
    full = max(micro_batches, 2 * stages)
    orders = tuple(
        tuple(action for action in _stage(stage, stages, full) if action.micro_batch < micro_batches)
        for stage in range(stages)
    )
    return Schedule(orders, "dualpipe-v", "v")


def _stage(stage: int, stages: int, micro_batches: int) -> list[Action]:
    done = {("F", 0): 0, ("F", 1): 0, ("B", 0): 0, ("B", 1): 0}
    weights: deque[Action] = deque()
    actions: list[Action] = []

    def forward(chunk: int) -> None:
        actions.append(Action("F", done["F", chunk], chunk))
        done["F", chunk] += 1

    def backward(chunk: int, split: bool = False) -> None:
        micro_batch = done["B", chunk]
        actions.append(Action("I" if split else "B", micro_batch, chunk))
        if split:
            weights.append(Action("W", micro_batch, chunk))
        done["B", chunk] += 1

    after = stages - stage - 1  # number of later stages
    for _ in range(2 * after):
        forward(0)
    for _ in range(stage + 1):
        forward(0)
        forward(1)
    for _ in range(after):
        backward(1, split=True)
        actions.append(weights.popleft())
        forward(1)
    for _ in range(micro_batches - 2 * stages + stage + 1):
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    for _ in range(after):
        backward(1)
        forward(1)
        backward(0)
    # The first half of these are whole; from then on, weight gradients are delayed.
    for number in range(2 * (stage + 1)):
        backward(1 - number % 2, split=number > stage)
    for _ in range(after):
        actions.append(weights.popleft())
        backward(0, split=True)
    actions.extend(weights)
    return actions
