"""The executor: does the actions of one stage over its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.comm.ledger import Ledger
from hpctrain.model.transformer import Inputs, Transformer
from hpctrain.parallel.vocabulary import LossTerms
from hpctrain.pipeline.action import Schedule


@dataclass(frozen=True)
class PreparedBatch:
    """One micro-batch: what goes in, and what the loss is taken of."""

    inputs: Inputs
    terms: LossTerms


class Executor:
    """Runs schedules of one stage; `ledger.phase` says which phase communication belongs to."""

    def __init__(self, model: Transformer, ledger: Ledger) -> None:
        self.model, self.ledger = model, ledger

    def run(self, schedule: Schedule, micro_batches: Sequence[PreparedBatch]) -> Tensor:
        """Forward and backward of all micro-batches; the sum of their losses, fp64 0-dim.

        Gradients are added to the parameters' buffers. Nothing waits for the device.
        """
        (actions,) = schedule.stages
        losses: dict[int, Tensor] = {}
        total: Tensor | None = None
        for action in actions:
            if action.kind == "F":
                self.ledger.phase = "forward"
                work = micro_batches[action.micro_batch]
                losses[action.micro_batch] = self.model.loss(work.inputs, work.terms)
            else:
                self.ledger.phase = "backward"
                loss = losses.pop(action.micro_batch)
                loss.backward()
                total = loss.detach().double() if total is None else total + loss.detach()
        self.ledger.phase = "synchronize"
        assert total is not None
        return total

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[PreparedBatch]) -> Tensor:
        """Forward only; the sum of the losses, fp64 0-dim."""
        self.ledger.phase = "forward"
        losses = [self.model.loss(work.inputs, work.terms).double() for work in micro_batches]
        self.ledger.phase = "step"
        return torch.stack(losses).sum()
