"""Log-probabilities or scores of each token of sequences by a model on any layout."""

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
"""Number of micro-batches of a data rank at a time. All ranks hold the results of all of them."""


TokenFunction = Callable[[Any, Tensor, Tensor], Tensor]
"""Function of a head, hidden states and targets [s, b] that returns a value of each token, fp32 [s, b]."""


class _ScoreRecorder:
    """Loss function that records a value of each token of a micro-batch, and returns losses of 0."""

    def __init__(self, targets: Tensor, metrics: int, function: TokenFunction) -> None:
        self.targets, self.metrics, self.function = targets, metrics, function
        self.values: Tensor | None = None

    def __call__(self, head: Any, hidden: Tensor) -> Losses:
        self.values = self.function(head, hidden, self.targets)
        nothing = self.values.new_zeros(())
        return Losses(nothing, (nothing,) * self.metrics)


def log_probabilities_of(
    step: Step, batches: Batches, sampling: TokenSampling | None = None
) -> Iterator[Tensor]:
    """Yield the log-probabilities of the targets of all sequences in order, some at a time. Collective.

    Args:
        step: Step of the model.
        batches: The sequences.
        sampling: Temperature and filters that change the probabilities, if any.

    Yields:
        Tensors [n, s], the same on all ranks, with 0 where there is no target.
    """
    return _values_of_all(step, batches, partial(log_probabilities, sampling=sampling))


def values_of(step: Step, batches: Batches) -> Iterator[Tensor]:
    """Yield the scores of all tokens by a model with a scalar head, some sequences at a time. Collective.

    The scores of a critic are values. Those of a reward model at the end of answers are rewards.

    Yields:
        Tensors [n, s], the same on all ranks.
    """

    def scores(head: ScalarHead, hidden: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
        return head.scores(hidden)

    return _values_of_all(step, batches, scores)


def _values_of_all(step: Step, batches: Batches, function: TokenFunction) -> Iterator[Tensor]:
    """Yield the values of all sequences, `MICRO_BATCHES` micro-batches of each data rank at a time."""
    count, size = batches.source.count, MICRO_BATCHES * step.micro_size * step.engine.mesh.size("data")
    for first in range(0, count, size):
        number = min(size, count - first)
        yield _values_of_first(
            step, Batches(SampleWindow(batches.source, first, number), 0), number, function
        )


def _values_of_first(step: Step, batches: Batches, sequences: int, function: TokenFunction) -> Tensor:
    """Return the values of the first `sequences` sequences [n, s] on all ranks. Collective."""
    engine, mesh = step.engine, step.engine.mesh
    rank, ranks = mesh.coordinate("data"), mesh.size("data")
    micro_batches = step.read(batches.evaluation(sequences, rank, ranks, step.micro_size)).micro_batches
    one, metrics = torch.ones((), device=engine.world.device), len(engine.objective.metrics)
    prepared, recorders = [], []
    for micro in micro_batches:
        inputs = step.prepare(micro, one, None).inputs
        recorders.append(_ScoreRecorder(inputs.fields["targets"].t(), metrics, function))
        prepared.append(PreparedBatch(inputs, recorders[-1]))
    ledger = engine.world.ledger
    ledger.phase = "evaluation"
    with engine.stage.pass_context(("evaluate", len(prepared))):
        step.executor.run(forward_only(engine.schedule, len(prepared)), prepared, training=False)
    # The ranks with a part of the sequence compute its values. One of them contributes, the others add zeros.
    values_of_all = torch.zeros(sequences, engine.architecture.sequence)
    for number, each in enumerate(recorders):
        if each.values is not None and mesh.coordinate("tensor") == 0:
            first = (number * ranks + rank) * step.micro_size
            rows = each.values.t()[: max(0, sequences - first)].cpu()
            values_of_all[first : first + len(rows), engine.positions.cpu()] = rows
    shared: Tensor = engine.world.everyone.all_reduce(values_of_all.to(engine.world.device)).cpu()
    ledger.phase = "other"
    return shared
