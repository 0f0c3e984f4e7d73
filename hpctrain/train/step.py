"""The optimizer step: from the counters of a run to updated parameters and the metrics of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpctrain.data.batches import Batches, MicroBatch
from hpctrain.engine.built_engine import Engine
from hpctrain.fault_checks.spikes import Spike
from hpctrain.model.inputs import RoutingChoices
from hpctrain.optim.clip import clip_coefficient, local_square_norm
from hpctrain.parallel.random import DropoutSource
from hpctrain.pipeline.execute import Executor, PreparedBatch, forward_only


@dataclass
class TrainState:
    """Counters of a run. With parameters and optimizer state, they are all that a resumed run needs.

    Attributes:
        step: Number of steps.
        samples: Number of samples over all ranks.
        tokens: Number of tokens over all ranks.
        skipped: Number of steps without an update.
        skipped_in_a_row: Number of these since the last update, except steps for which the loss scale may
            only have been too high.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class StepResult:
    """Result of one step, the same on all ranks.

    Attributes:
        metrics: Metrics of the objective and of the layers, by name.
        grad_norm: Gradient norm before clipping; the mean over replicas that have diverged.
        learning_rate: Learning rate of the update.
        batch: Number of sequences over all ranks.
        tokens: Number of predicted tokens over all ranks.
        skipped: True if the step made no update.
        statistics: Values that layers have recorded, by name (see StepStatistics).
        staleness: In a run with servers, number of pushes with a staleness of 0, 1, and so on.
        spike: Spike because of which the update was skipped, if any.
    """

    metrics: dict[str, float]
    grad_norm: float
    learning_rate: float
    batch: int
    tokens: int
    skipped: bool
    statistics: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    staleness: tuple[int, ...] = ()
    spike: Spike | None = None

    @property
    def loss(self) -> float:
        """Mean loss per token, in nats."""
        return self.metrics["loss"]


class ReadBatches(NamedTuple):
    """Micro-batches that a rank has read, and numbers of tokens that all data ranks have read together.

    Attributes:
        micro_batches: Micro-batches of this rank.
        predicted: Number of tokens to be predicted.
        real: Number of tokens that are not padding. Auxiliary losses are means over these.
    """

    micro_batches: list[MicroBatch]
    predicted: int
    real: int


class EvaluationResult(NamedTuple):
    """Metrics of an evaluation, the same on all ranks.

    Attributes:
        metrics: Metrics by name.
        tokens: Number of predicted tokens.
        denominator: Number of items that the metrics are means over: tokens, or what the objective counts.
    """

    metrics: dict[str, float]
    tokens: int
    denominator: float


ChoicesOf = Callable[[range, int], RoutingChoices | None]
"""Function that returns the routing choices of a micro-batch.

Its arguments are the numbers of the samples, and the number of rows. Rows after the samples are padding.
"""


class StepGuard(ABC):
    """Checks of steps and of the state of a run for silent faults."""

    @abstractmethod
    def check_step(self, totals: Sequence[float]) -> None:
        """Check what this step has done so far, before its update. Collective.

        Args:
            totals: Metrics that all ranks have agreed on.

        Raises:
            SilentFaultError: Any rank has found a fault; raised on all ranks.
        """

    @abstractmethod
    def check_state(self) -> None:
        """Check the state before it is kept or written. Collective.

        Raises:
            SilentFaultError: Any rank has found a fault; raised on all ranks.
        """

    @abstractmethod
    def discard_fingerprints(self) -> None:
        """Discard all fingerprints, because something other than a step has changed the state."""


class Step:
    """One optimizer step on the engine's mesh.

    Attributes:
        engine: The engine.
        batches: Samples of the steps.
        micro_size: Number of rows of a micro-batch.
        clip: Gradient norm above which gradients are clipped; 0 for no clipping.
        seed: Seed of the dropout masks.
        choices: Returns the routing choices to record or to follow, if any.
        guard: Checks each step for silent faults, if any.
        shift: Number of data ranks by which the share of samples that this rank reads is shifted.
        before_pass: Called with the micro-batches that this rank is about to train on, if set.
        local_tokens: Number of tokens that this rank predicts in the step, or in its first micro-batch if
            that one alone is used for the noise scale.
    """

    def __init__(self, engine: Engine, batches: Batches, micro_size: int, clip: float, seed: int) -> None:
        self.engine, self.batches = engine, batches
        self.micro_size, self.clip, self.seed = micro_size, clip, seed
        self.choices: ChoicesOf | None = None
        self.guard: StepGuard | None = None
        self.shift = 0
        self.before_pass: Callable[[Sequence[MicroBatch]], None] | None = None
        self.local_tokens = 0
        self.auxiliary_loss_names = engine.auxiliary_loss_names
        self.uses_random_numbers = engine.architecture.uses_random_numbers
        self.replica, self.replicas = engine.stage.replica
        self.data, self.data_rank = engine.mesh.group("data"), engine.mesh.coordinate("data")
        self.replica_sync = engine.stage.replica_sync if engine.stage.diverges else None
        self.counts_tokens = engine.stage.replications.counts_tokens
        self.executor = Executor(
            engine.stage.models,
            engine.mesh.group("pipeline"),
            engine.stage.layer_context.weight_gradients,
            engine.world.ledger,
            engine.objective.metrics,
            self.auxiliary_loss_names,
            engine.stage.statistics,
        )

    def __call__(
        self, state: TrainState, batch: int, before_update: Callable[[], None] = lambda: None
    ) -> StepResult:
        """Train on `batch` samples from number `state.samples` on, and advance `state`. Collective.

        Args:
            state: Counters of the run.
            batch: Number of samples over all data ranks.
            before_update: Called on all ranks before parameters and moments change.
        """
        engine, stage, control = self.engine, self.engine.stage, self.engine.control
        sums, read = self.accumulate(state, batch)
        tokens = read.predicted
        statistics = {} if stage.statistics is None else stage.statistics.reduce(engine.world.everyone)
        squares = sums.new_zeros(self.replicas)
        squares[self.replica] = local_square_norm(stage.buckets)
        metrics, totals = self.agree(torch.cat((sums, squares)), read)
        if self.guard is not None:
            self.guard.check_step(totals)
        # Rounding to fp32 hides that other layouts add the squares in another order.
        roots = [
            float(np.sqrt(np.float32(total))) if total >= 0 else total for total in totals[-self.replicas :]
        ]
        terms_per_token = engine.objective.normalize(metrics)
        norms = [root / control.loss_scale.value / terms_per_token for root in roots]
        engine.world.ledger.phase = "step"
        finite = all(map(isfinite, (*metrics.values(), *norms)))
        loss, norm = metrics["loss"], fmean(norms)
        spike = None
        if control.spikes.enabled:
            spike = control.spikes.find_spike(state.step + 1, loss, norm, state.samples, batch)
        updated = finite and spike is None and learns(tokens, loss)
        rate = control.learning_rate.at(state.step, batch)
        if updated:
            if control.spikes.enabled:
                control.spikes.add_step(loss, norm)
            if control.noise_scale.steps:
                metrics |= self.noise_scale(totals[-1], tokens, batch)
            before_update()
            clipped = clip_coefficient(norms[self.replica], self.clip)
            stage.optimizer.step(rate, control.loss_scale.value * terms_per_token / clipped)
            if self.replica_sync is not None and (
                replica_squares := self.replica_sync.after_update(stage.optimizer)
            ):
                squares = engine.world.everyone.all_reduce(torch.stack(list(replica_squares.values())))
                metrics |= zip(replica_squares, squares.sqrt().tolist(), strict=True)
            for each in stage.module_state.statistics_users:
                each.after_update(statistics)
        former_scale, scale_can_fall = control.loss_scale.value, control.loss_scale.can_fall
        control.loss_scale.update(finite)
        stage.synchronizer.end_step(updated, control.loss_scale.value / former_scale)
        engine.world.ledger.phase = "other"
        state.step += 1
        state.samples += batch
        state.tokens += tokens
        state.skipped += not updated
        if updated:
            state.skipped_in_a_row = 0
        elif finite or not (isfinite(loss) and scale_can_fall):
            state.skipped_in_a_row += 1
        return StepResult(metrics, norm, rate, batch, tokens, not updated, statistics, spike=spike)

    @property
    def has_samples(self) -> bool:
        """True if the samples of the next step are available."""
        return True

    @property
    def share(self) -> tuple[int, int]:
        """Share of a step's samples that this rank reads, and the number of shares.

        The replicas take samples in turns, so a replica has the same samples on any number of ranks.
        """
        ranks = self.data.size
        number = self.data_rank % (ranks // self.replicas) * self.replicas + self.replica
        return (number + self.shift) % ranks, ranks

    def read_share(self, state: TrainState, batch: int) -> ReadBatches:
        """Read this rank's share of a step, as `read` does."""
        return self.read(self.batches.step(state.samples, batch, *self.share, self.micro_size))

    def accumulate(self, state: TrainState, batch: int) -> tuple[Tensor, ReadBatches]:
        """Sum the gradients of `batch` samples from number `state.samples` on. Collective.

        Returns:
            This rank's sums of metrics and auxiliary losses in fp64, and what it has read.
        """
        engine = self.engine
        read = self.read_share(state, batch)
        micro_batches = read.micro_batches
        if self.before_pass is not None:
            self.before_pass(micro_batches)
        counted = micro_batches if engine.stage.synchronizer.noise_norm is None else micro_batches[:1]
        self.local_tokens = sum(map(engine.objective.count, counted))
        scale, auxiliary_loss_scale = (
            torch.full((), engine.control.loss_scale.value / count, device=engine.world.device)
            for count in (max(1, read.predicted), max(1, read.real))
        )
        prepared = [
            self.prepare(
                micro,
                scale,
                self.dropout_source(state, index) if self.uses_random_numbers else None,
                auxiliary_loss_scale,
                None if self.choices is None else self.routing_choices(self.choices, state, index, micro),
            )
            for index, micro in enumerate(micro_batches)
        ]
        engine.stage.synchronizer.start(len(prepared), state.step - state.skipped)
        with engine.stage.pass_context(("train", len(prepared))):
            sums = self.executor.run(engine.placement.schedule_of(len(prepared)), prepared)
        engine.stage.synchronizer.finish()
        return sums, read

    def noise_scale(self, squares: float, tokens: int, batch: int) -> dict[str, float]:
        """Return the metrics of the gradient noise scale; {} if it is not measured. Collective.

        The estimate compares the square norm of the whole gradient with that of a part of the batch. The
        gradients of a data rank are sums over its tokens, divided by the tokens of all ranks. The mean of the
        square norms of the ranks' mean gradients, weighted by tokens, is on average that of a batch with the
        mean number of tokens of the ranks that have any. With one data rank, its first micro-batch is the
        part.

        Args:
            squares: Square norm of the reduced gradients.
            tokens: Number of predicted tokens over all ranks.
            batch: Number of sequences over all ranks.
        """
        engine = self.engine
        average, estimators = engine.control.noise_scale, engine.stage.synchronizer.norm_estimators
        if not estimators:
            return {}
        ratio = tokens / self.local_tokens if self.local_tokens else 0.0
        local = torch.stack([each.squares for each in estimators]).sum() * ratio
        if engine.stage.synchronizer.noise_norm is not None:
            small, parts = float(local) * ratio, ratio
        else:
            sums = torch.stack((local, torch.full_like(local, self.local_tokens > 0)))
            small, ranks = engine.world.everyone.all_reduce(sums).tolist()
            parts = ranks * engine.mesh.size("data") / engine.world.size
        if parts > 1 and isfinite(small):
            square = engine.control.loss_scale.value**2
            average.update(small / square, squares / square, batch, parts)
        return average.metrics(tokens / batch)

    def evaluate(self, batches: Batches, sequences: int) -> dict[str, float]:
        """Return the metrics of the first `sequences` sequences, the same on all ranks. Collective.

        Replicas that have diverged evaluate the model that they have in common.
        """
        return self.evaluate_with_counts(batches, sequences).metrics

    def evaluate_with_counts(self, batches: Batches, sequences: int) -> EvaluationResult:
        """Evaluate as `evaluate` does, and return the counts over which the metrics are means. Collective.

        If there is no token to predict, the metrics of the objective are NaN and the counts are 0.
        """
        mesh, ledger = self.engine.mesh, self.engine.world.ledger
        ledger.phase = "evaluation"
        share = mesh.coordinate("data"), mesh.size("data"), self.micro_size
        read = self.read(batches.evaluation(sequences, *share))
        tokens = read.predicted
        one = torch.ones((), device=self.engine.world.device)
        prepared = [self.prepare(micro, one, None) for micro in read.micro_batches]
        forward = forward_only(self.engine.schedule, len(prepared))
        with (
            self.engine.stage.replica_sync.common_weights(self.engine.stage.optimizer),
            self.engine.stage.optimizer.evaluation_weights(),
            self.engine.stage.pass_context(("evaluate", len(prepared))),
        ):
            sums = self.executor.run(forward, prepared, training=False)
        metrics, _ = self.agree(sums, read)
        terms_per_token = self.engine.objective.normalize(metrics)
        ledger.phase = "other"
        if not learns(tokens, metrics["loss"]):
            of_objective = set(self.engine.objective.metrics)
            return EvaluationResult(
                {name: nan if name in of_objective else value for name, value in metrics.items()}, 0, 0.0
            )
        return EvaluationResult(metrics, tokens, max(1, tokens) * terms_per_token)

    def read(self, micro_batches: Iterator[MicroBatch]) -> ReadBatches:
        """Read all micro-batches, and count tokens over the data ranks. Collective.

        Raises:
            HpctrainError: A rank cannot read its samples, or they are damaged; raised on all ranks.
        """
        with self.engine.world.agreement():
            read = list(micro_batches)
        counts = [sum(map(self.engine.objective.count, read)), sum(micro.real_tokens for micro in read)]
        if self.data.size > 1:
            counts = self.data.all_reduce(torch.tensor(counts)).tolist()
        return ReadBatches(read, *counts)

    def prepare(
        self,
        micro: MicroBatch,
        scale: Tensor,
        dropout: DropoutSource | None,
        auxiliary_loss_scale: Tensor | None = None,
        choices: RoutingChoices | None = None,
    ) -> PreparedBatch:
        """Return this rank's piece of a micro-batch on the device."""
        engine = self.engine
        return PreparedBatch.of(
            micro, engine.objective, scale, engine.positions, dropout, auxiliary_loss_scale, choices
        )

    def dropout_source(self, state: TrainState, micro_batch: int) -> DropoutSource | None:
        """Return the source of dropout masks of this rank's micro-batch. They depend on its samples."""
        if not self.uses_random_numbers:
            return None
        first = self.first_sample(state, micro_batch)
        samples = torch.arange(first, first + self.micro_size, device=self.engine.world.device)
        return DropoutSource(self.seed, state.step, samples, self.engine.positions, first)

    def routing_choices(
        self, choices: ChoicesOf, state: TrainState, micro_batch: int, micro: MicroBatch
    ) -> RoutingChoices | None:
        """Return the recorded or requested routing choices of this rank's micro-batch."""
        first, rows = self.first_sample(state, micro_batch), micro.rows
        return choices(range(first, first + micro.present), rows)

    def first_sample(self, state: TrainState, micro_batch: int) -> int:
        """Return the number of the first sample of this rank's micro-batch."""
        number, shares = self.share
        index = micro_batch * shares + number
        return state.samples + index * self.micro_size

    def agree(self, sums: Tensor, read: ReadBatches) -> tuple[dict[str, float], list[float]]:
        """Reduce the executor's sums, and any values after them, over all ranks by one small all-reduce.

        Ranks that compute on the same tokens have the same sums, so only one of them contributes.

        Returns:
            The metrics and all reduced sums. Metrics of the objective are means over the predicted tokens in
            `read`, auxiliary losses are means over its real tokens.
        """
        engine, names = self.engine, self.engine.objective.metrics
        if not self.counts_tokens:
            sums = sums.clone()
            sums[: len(names)] = 0
        totals: list[float] = engine.world.everyone.all_reduce(sums).tolist()
        counts = [max(1, read.predicted)] * len(names) + [max(1, read.real)] * len(self.auxiliary_loss_names)
        metrics = zip((*names, *self.auxiliary_loss_names), totals, counts, strict=False)
        return {name: total / count for name, total, count in metrics}, totals


def learns(tokens: int, loss: float) -> bool:
    """Return True if a step contains something to learn, or an evaluation something to predict.

    A user's own loss may not be a mean over tokens, so a loss other than 0 counts, too.

    Args:
        tokens: Number of tokens to predict, over all ranks.
        loss: The loss.
    """
    return tokens > 0 or loss != 0
