"""Batch-size ramp-up (arXiv 2005.14165): the batch of a step as a function of the step."""

from __future__ import annotations

from hpctrain.deck.schema import Batch


def batch_at(batch: Batch, step: int, data_ranks: int) -> int:
    """Sequences of step `step` (from 0): linear from `ramp_from` to `global_size` over `ramp_steps`,
    rounded down to whole micro-batches on every data rank.
    """
    if not batch.ramp_from or step >= batch.ramp_steps:
        return batch.global_size
    grown = batch.ramp_from + (batch.global_size - batch.ramp_from) * step // batch.ramp_steps
    whole = batch.micro_size * data_ranks
    return max(batch.ramp_from, grown // whole * whole)
