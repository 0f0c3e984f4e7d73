"""Batch-size ramp-up (arXiv 2005.14165): the batch of a step as a function of the step."""

from __future__ import annotations

from hpctrain.deck.sections.batch import Batch


def batch_at(batch: Batch, step: int) -> int:
    """Return the number of sequences of step `step` (from 0).

    It grows linearly from `ramp_from` to `global_size` over `ramp_steps`, in multiples of `ramp_from`. Every
    layout of the run can divide these into micro-batches, so the batch does not depend on the layout.
    """
    if not batch.ramp_from or step >= batch.ramp_steps:
        return batch.global_size
    grown = batch.ramp_from + (batch.global_size - batch.ramp_from) * step // batch.ramp_steps
    return grown // batch.ramp_from * batch.ramp_from


def samples_of(batch: Batch, steps: int) -> int:
    """Return the number of sequences of the first `steps` steps together."""
    ramp = min(steps, batch.ramp_steps) if batch.ramp_from else 0
    return sum(batch_at(batch, step) for step in range(ramp)) + (steps - ramp) * batch.global_size
