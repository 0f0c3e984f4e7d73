"""Changes that faults of several seams make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hpctrain.data.batches import Batches
from hpctrain.optim.adamw import AdamW
from hpctrain.parallel.fp8.delayed_matmul import MaximaHistory
from hpctrain.train.step import Step
from tests.train.layout_faults.scene import in_last_update

ADAMW_MOMENT = AdamW, "exp_avg", 0.5, in_last_update
"""Arguments of `scaled_state` that halve AdamW's first moment in the last update of rank 1."""


def count_one_token_more(original: Any, step: Step, micro_batches: Any) -> Any:
    """Count one token more than the step predicts."""
    read = original(step, micro_batches)
    return read._replace(predicted=read.predicted + 1)


def count_local_tokens(original: Any, step: Step, micro_batches: Any) -> Any:
    """Count twice the tokens of this rank instead of the tokens of both ranks."""
    read = original(step, micro_batches)
    return read._replace(predicted=2 * sum(map(step.engine.objective.count, read.micro_batches)))


def read_samples_of_rank_0(original: Any, batches: Batches, first: int, size: int, _: int, *rest: int) -> Any:
    """Read the samples of data rank 0 on every rank."""
    return original(batches, first, size, 0, *rest)


def average_each_micro_batch(original: Any, step: Step, micro: Any, given: Tensor, *rest: Any) -> Any:
    """Weigh each token by the tokens of its micro-batch instead of the tokens of the step."""
    count = step.engine.objective.count(micro)
    return original(step, micro, torch.full_like(given, 1 / (6 * max(1, count))), *rest)


def count_no_elements(*_: Any) -> Iterator[Tensor]:
    """Leave out the elements of this rank in the norm of the gradients."""
    return iter(())


def use_local_positions(original: Any, layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Number positions from the first one of this rank."""
    return original(layer, x, positions - positions.min())


def mask_by_next_site(original: Any, source: Any, site: int, *rest: Any) -> Tensor:
    """Draw the dropout mask of the next place in the model."""
    return original(source, site + 1, *rest)


def reverse_counts(original: Any, layer: Any, statistics: Any) -> None:
    """Tell a router the statistics of its experts in reverse order."""
    original(layer, {name: each.flip(0) for name, each in statistics.items()})


def change_rate(original: Any, optimizer: Any, rate: float, divisor: float) -> None:
    """Update with another learning rate."""
    original(optimizer, rate * 1.001, divisor)


def double_maximum(original: Any, history: MaximaHistory, maximum: Tensor) -> None:
    """Remember twice the maximum of the step."""
    original(history, 2 * maximum)
