"""What a model makes of sequences, token by token, on any layout, by the run's own pass: log-probabilities of
their targets, or scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.data.batches import Batches
from hpctrain.data.sample_window import SampleWindow
from hpctrain.objective.log_probabilities import log_probabilities
from hpctrain.objective.objective import Losses
from hpctrain.objective.token_sampling import TokenSampling
from hpctrain.parallel.scalar_head import ScalarHead
from hpctrain.pipeline.execute import PreparedBatch, forward_only
from hpctrain.train.step import Step

MICRO_BATCHES = 16
"""Of a data rank at a time: all ranks hold what all have found of them."""


Finding = Callable[[Any, Tensor, Tensor], Tensor]
"""Of a head, hidden states and targets [s, b]: what is found of each token, fp32 [s, b]."""


class _ScoreRecorder:
    """What is found of a micro-batch, as an objective's losses are computed, which here are none."""

    def __init__(self, targets: Tensor, metrics: int, find: Finding) -> None:
        self.targets, self.metrics, self.find = targets, metrics, find
        self.found: Tensor | None = None

    def __call__(self, head: Any, hidden: Tensor) -> Losses:
        self.found = self.find(head, hidden, self.targets)
        nothing = self.found.new_zeros(())
        return Losses(nothing, (nothing,) * self.metrics)


def log_probabilities_of(
    step: Step, batches: Batches, sampling: TokenSampling | None = None
) -> Iterator[Tensor]:
    """Log-probabilities [n, s] of the targets of all sequences in their order by the chances of `sampling`,
    some at a time, zero where there is no target, the same on all ranks. Collective.
    """
    return _of_all(step, batches, partial(log_probabilities, sampling=sampling))


def values_of(step: Step, batches: Batches) -> Iterator[Tensor]:
    """The scores [n, s] of all tokens of all sequences in their order by a model with a scalar head, some
    sequences at a time, the same on all ranks: of a critic values, of a reward model at the ends of answers
    their rewards. Collective.
    """

    def scores(head: ScalarHead, hidden: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
        return head.scores(hidden)

    return _of_all(step, batches, scores)


def _of_all(step: Step, batches: Batches, find: Finding) -> Iterator[Tensor]:
    count, size = batches.source.count, MICRO_BATCHES * step.micro_size * step.engine.mesh.size("data")
    for first in range(0, count, size):
        taken = min(size, count - first)
        yield _of_first(step, Batches(SampleWindow(batches.source, first, taken), 0), taken, find)


def _of_first(step: Step, batches: Batches, sequences: int, find: Finding) -> Tensor:
    engine, data = step.engine, step.engine.mesh
    rank, ranks = data.coordinate("data"), data.size("data")
    micro_batches = step.read(batches.evaluation(sequences, rank, ranks, step.micro_size)).micro_batches
    one, metrics = torch.ones((), device=engine.world.device), len(engine.objective.metrics)
    prepared, kept = [], []
    for micro in micro_batches:
        inputs = step.prepare(micro, one, None).inputs
        kept.append(_ScoreRecorder(inputs.fields["targets"].t(), metrics, find))
        prepared.append(PreparedBatch(inputs, kept[-1]))
    ledger = engine.world.ledger
    ledger.phase = "evaluation"
    with engine.stage.pass_context(("evaluate", len(prepared))):
        step.executor.run(forward_only(engine.schedule, len(prepared)), prepared, training=False)
    # A value is found by those who hold its place of the sequence, of whom one tells it: zeros add nothing.
    whole = torch.zeros(sequences, engine.architecture.sequence)
    for number, each in enumerate(kept):
        if each.found is not None and engine.mesh.coordinate("tensor") == 0:
            first = (number * ranks + rank) * step.micro_size
            rows = each.found.t()[: max(0, sequences - first)].cpu()
            whole[first : first + len(rows), engine.positions.cpu()] = rows
    summed: Tensor = engine.world.everyone.all_reduce(whole.to(engine.world.device)).cpu()
    ledger.phase = "other"
    return summed
