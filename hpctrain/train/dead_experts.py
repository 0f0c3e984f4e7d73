"""Warnings about experts that receive no tokens, and so learn nothing."""

from __future__ import annotations

import logging

import torch

from hpctrain.model.mixtures.expert_load import ExpertLoad
from hpctrain.model.shape import ModelShape
from hpctrain.text import counted, ranges
from hpctrain.train.hook import Hook, StepDone

STEPS = 100
"""Number of steps in a row without a token after which an expert is dead. Skipped steps do not count."""


class DeadExperts(Hook):
    """Hook that warns once of each dead expert, in the log of rank 0."""

    def __init__(self, shape: ModelShape, rank: int) -> None:
        self.shape, self.rank = shape, rank
        size = len(shape.mixture_blocks), 0 if shape.experts is None else shape.experts.count
        self.idle = torch.zeros(size, dtype=torch.int64)
        self.reported = torch.zeros_like(self.idle, dtype=torch.bool)

    def after_step(self, done: StepDone) -> None:
        """Count the steps without a token for each expert."""
        load = ExpertLoad.of(done.result.statistics, self.shape) if self.rank == 0 else None
        if load is None or done.result.skipped:
            return
        self.idle = (self.idle + 1).masked_fill_(load.tokens > 0, 0)
        dead = (self.idle >= STEPS) & ~self.reported
        self.reported |= dead
        for block, of_block in zip(load.blocks, dead, strict=True):
            experts = of_block.nonzero().flatten().tolist()
            if experts:
                name = "expert" if len(experts) == 1 else "experts"
                logging.getLogger("hpctrain").warning(
                    "step %d: %s %s of block %d received no token for %s and may stay unused; a larger "
                    "balance_loss or balance_rate in [model.experts] keeps experts in use",
                    done.state.step,
                    name,
                    ranges(experts, ", "),
                    block,
                    counted(STEPS, "step"),
                )
