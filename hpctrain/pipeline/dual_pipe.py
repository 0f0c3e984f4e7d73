"""DualPipe-V: half of DualPipe, in which each stage holds two parts of the model in the shape of a V.

DualPipe is from DeepSeek-V3 (arXiv 2412.19437); Sea AI Lab found that half of it suffices. In the middle of
the step, forward and backward passes of different micro-batches alternate, so that the computation of one can
overlap with the communication of the other. The backward pass is split into I and W only where that lets
another stage continue earlier.
"""

from __future__ import annotations

from hpctrain.pipeline.action import Schedule, number_actions


def dual_pipe_v(stages: int, micro_batches: int) -> Schedule:
    """Return the DualPipe-V schedule. A stage holds the activations of at most 2 p + 1 passes.

    A pass is one micro-batch in one chunk. F, I and W are the times of passes, and B = I + W. Without overlap
    and with I = F the bubble is (p - 1)(F + B - 2 W). If each F and the B after it run as one action of time
    F&B, whose two results are ready only at its end, it is (p - 1)(F&B + B - 3 W) (DeepSeek's formula).

    The schedule is meant for at least 2 p micro-batches. With fewer, it is the order for 2 p micro-batches
    without the actions of the missing ones.

    Args:
        stages: Number of stages, p.
        micro_batches: Number of micro-batches.
    """
    full = max(micro_batches, 2 * stages)
    orders = (number_actions(_passes(stage, stages, full), micro_batches) for stage in range(stages))
    return Schedule(tuple(orders), "dualpipe-v", "v")


def _passes(stage: int, stages: int, micro_batches: int) -> list[str]:
    """Return the passes of a stage, as for `number_actions`."""
    after = stages - stage - 1  # number of later stages
    passes = ["F0"] * 2 * after + ["F0", "F1"] * (stage + 1) + ["I1", "W", "F1"] * after
    passes += ["F0", "B1", "F1", "B0"] * (micro_batches - 2 * stages + stage + 1)
    passes += ["B1", "F1", "B0"] * after
    # The first half of these backward passes are B; after that, weight gradients are delayed.
    for number in range(2 * (stage + 1)):
        passes.append(f"{'I' if number > stage else 'B'}{1 - number % 2}")
    return passes + ["W", "I0"] * after + ["W"] * (stage + 1)
