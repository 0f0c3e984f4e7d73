"""DualPipe-V: DualPipe, cut in half, so that each stage holds two parts of the model in the shape of a V.

DualPipe is of DeepSeek-V3 (arXiv 2412.19437); Sea AI Lab saw that half of it is enough. Forward and backward
of different micro-batches stand side by side, for their work and their communication to overlap; backward
is split only where that lets others go on sooner.
"""

from __future__ import annotations

from collections import deque

from hpctrain.pipeline.action import Action, Schedule


def dual_pipe_v(stages: int, micro_batches: int) -> Schedule:
    """Holds 2 p + 1 activations of a chunk, or p + 1/2 of a stage.

    With F, I = F, W the times of a chunk and B = I + W, the bubble is (p - 1)(F + B - 2 W), or DeepSeek's
    (p - 1)(F&B + B - 3 W) where a forward and a backward side by side end together, after F&B. It is made for
    2 p micro-batches or more; with fewer, it is the order of 2 p without those that there are not.
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

    after = stages - stage - 1  # stages that come after this one
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
    # Half of these are whole; from then on, weight gradients are put off.
    for number in range(2 * (stage + 1)):
        backward(1 - number % 2, split=number > stage)
    for _ in range(after):
        actions.append(weights.popleft())
        backward(0, split=True)
    actions.extend(weights)
    return actions
