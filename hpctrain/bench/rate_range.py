"""`hpctrain bench rate`: learning-rate range test, a short training with a rising learning rate.

It is the range test of Smith (arXiv 1506.01186). The rate rises by the same factor in each step, the loss is
smoothed, and the training ends when it diverges. The suggested rate is that at which the smoothed loss falls
fastest over the logarithm of the rate. The trainer of runs takes the steps, with any layout, and no
checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite, nan
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from typing_extensions import override

from hpctrain.bench.measurement import publish
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.comm.world import World
from hpctrain.data.corpus import Corpus, open_corpus, resolve_vocabulary
from hpctrain.data.held_out import open_held_out
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.evaluation import TRAINING_LOSS, MetricName, parse_metric_name
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.errors import HpctrainError, require
from hpctrain.optim.schedule import LearningRate
from hpctrain.report.rate import draw_rates
from hpctrain.text import table
from hpctrain.train.automatic_layout import choose_layout
from hpctrain.train.server.server_trainer import new_trainer
from hpctrain.train.start import start_from_source
from hpctrain.train.trainer import Trainer

MAX_OVER_LOWEST = 4.0
"""Smoothed loss relative to the lowest one at which the training ends."""
MAX_OVER_FIRST = 1.25
"""Smoothed loss relative to the first one at which the training ends. The loss of a language model starts too
close to its largest values to rise fourfold."""
_ROWS = 24
"""Approximate number of rows in the table."""


@dataclass(frozen=True)
class RateBenchOptions:
    """Options of `hpctrain bench rate`.

    Attributes:
        first: Learning rate of the first step.
        last: Learning rate of the last step.
        steps: Largest number of steps.
        window: Number of losses in a moving average; None for a tenth of the steps.
        metric: Name of the metric that is used as loss: the training loss, or a metric of an evaluation after
            each step.
    """

    first: float = 1e-6
    last: float = 1.0
    steps: int = 100
    window: int | None = None
    metric: str = TRAINING_LOSS

    @property
    def window_size(self) -> int:
        """Number of losses in a moving average."""
        return max(1, self.steps // 10) if self.window is None else self.window

    def check(self) -> None:
        """Raise HpctrainError with every option that is out of range."""
        problems = []
        if not 0 < self.first < self.last <= 1000:
            rates = f"--from {self.first:g} --to {self.last:g}"
            problems.append(f"{rates}: must be above 0, at most 1000, and in ascending order")
        if not 10 <= self.steps <= 100_000:
            problems.append(f"--steps {self.steps}: must be from 10 to 100000")
        if self.window is not None and not 1 <= self.window <= self.steps // 2:
            problems.append(f"--window {self.window}: must be from 1 (no smoothing) to half of --steps")
        if problems:
            raise HpctrainError(problems)


@dataclass(frozen=True)
class RatePoint:
    """Result of a step.

    Attributes:
        rate: Learning rate.
        loss: Loss.
        smoothed: Moving average of the losses; nan if the loss is not finite.
    """

    rate: float
    loss: float
    smoothed: float


@dataclass(frozen=True)
class RateRangeResult:
    """Results of a range test.

    Attributes:
        points: Results of the steps.
        suggestion: Rate at which the loss falls fastest; None if it never falls.
        ended: Reason why the training ended before its last step; empty if it did not.
    """

    points: list[RatePoint]
    suggestion: float | None
    ended: str


@dataclass(frozen=True)
class RisingRate(LearningRate):
    """Learning rate that starts at `peak` and is multiplied by `factor` after each step.

    Attributes:
        factor: Ratio of the rates of two successive steps.
    """

    factor: float = 1.0

    @override
    def at(self, step: int, batch: int) -> float:
        return self.peak * self.factor**step


def bench_rate(
    world: World,
    path: Path,
    overrides: Sequence[str],
    options: RateBenchOptions,
    output: Path | None,
    picture: Path | None,
) -> None:
    """Train a deck with rising learning rates, and print a table and a suggestion. Collective.

    Args:
        world: All ranks.
        path: File of the deck.
        overrides: Deck keys to change, as KEY=VALUE.
        options: Options of the test.
        output: File for the results; None for no file.
        picture: File for a plot; None for no file.

    Raises:
        HpctrainError: An option or the deck is unsuitable, such as one with parameter servers.
    """
    with world.agreement():
        options.check()
        if picture is not None:
            require("matplotlib", "drawing pictures")
        deck = read_deck(path, overrides, world.size, read_source_keys)
        if deck.communication.server is not None:
            problem = (
                "is unsupported in a rate test, which requires steps that all ranks make "
                'together (use "none")'
            )
            raise HpctrainError(deck.problem("communication.server.mode", problem))
        metric = parse_metric_name(deck, options.metric)
    deck, _ = choose_layout(world, deck)
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    world.compare_calls(deck.communication.check)
    run_folder = Path(deck.run.dir)
    new_folders = [
        path for path in (run_folder / "offload", run_folder, *run_folder.parents) if not path.exists()
    ]
    corpus = open_corpus(deck, world)
    deck = choose_functions(resolve_vocabulary(without_schedules(deck), corpus), world)
    trainer = new_trainer(world, deck, corpus.train)
    try:
        evaluate = _evaluation(trainer, corpus, metric, options.metric) if metric.evaluation_set else None
        if deck.model.source is not None:
            start_from_source(deck, trainer.engine)
        results = train_with_rising_rate(trainer, options, world.rank == 0, evaluate)
    finally:
        trainer.engine.close()
        corpus.close()
    with world.agreement():
        pass  # All ranks have closed their offload files.
    for folder in new_folders:
        with suppress(OSError):
            folder.rmdir()
    publish(world, result_lines(results, options, deck), asdict(results), output)
    with world.agreement():
        if world.rank == 0 and picture is not None:
            losses = [(each.rate, each.loss, each.smoothed) for each in results.points]
            draw_rates(picture, deck.run.title, losses, results.suggestion, metric.title)


def _evaluation(trainer: Trainer, corpus: Corpus, metric: MetricName, name: str) -> Callable[[], float]:
    """Return a function that evaluates a metric of a held-out set. Collective, as is the function.

    Args:
        trainer: Trainer of the deck.
        corpus: Corpus of the deck.
        metric: The metric.
        name: Name of the metric as the user gave it.

    Raises:
        HpctrainError: The held-out set does not have the metric.
    """
    held_out_sets = open_held_out(trainer.deck, trainer.engine.world, corpus)
    [held_out] = [each for each in held_out_sets if each.name == metric.evaluation_set]
    if metric.kind not in held_out.metrics(1.0):
        raise HpctrainError(f"--figure {name}: the number of bytes of text in the set is unknown")
    return lambda: held_out.metrics(trainer.evaluate(held_out.batches, held_out.sequences)["loss"])[
        metric.kind
    ]


def without_schedules(deck: Deck) -> Deck:
    """Return the deck without schedules of rate and batch size, and without rules that skip steps."""
    return deck.with_keys(
        learning_rate={"warmup": 0, "decay": "constant", "cooldown": 0},
        batch={"ramp_from": 0},
        stability={"spike": "off"},
    )


def train_with_rising_rate(
    trainer: Trainer,
    options: RateBenchOptions,
    print_progress: bool = False,
    evaluate: Callable[[], float] | None = None,
) -> RateRangeResult:
    """Train with rising learning rates until the last rate, or until the loss diverges. Collective.

    Args:
        trainer: Trainer. It has its original learning rate in the end.
        options: Options of the test.
        print_progress: True if this rank prints a line after each tenth of the steps.
        evaluate: Function that returns the loss after each step; None for the training loss.
    """
    factor = (options.last / options.first) ** (1 / (options.steps - 1))
    rate = trainer.engine.control.learning_rate
    trainer.engine.control.learning_rate = RisingRate(**{**vars(rate), "peak": options.first}, factor=factor)
    rates: list[float] = []
    losses: list[float] = []
    ended = ""
    for step in range(1, options.steps + 1):
        result = trainer.train_step()
        rates.append(result.learning_rate)
        losses.append(result.loss if evaluate is None or not isfinite(result.loss) else evaluate())
        if not isfinite(losses[-1]):
            ended = f"the loss was not finite at rate {rates[-1]:.3g}"
            break
        if has_diverged(losses, options.window_size):
            ended = f"the loss diverged at rate {rates[-1]:.3g}"
            break
        if print_progress and step % max(1, options.steps // 10) == 0:
            progress = f"{step} of {options.steps}"
            print(f"{progress}: rate {rates[-1]:.3g}, {options.metric} {losses[-1]:.4f}", flush=True)
    trainer.engine.control.learning_rate = rate
    points = list(map(RatePoint, rates, losses, moving_average(losses, options.window_size)))
    return RateRangeResult(points, steepest_rate(points, options.window_size // 2), ended)


def moving_average(losses: Sequence[float], window: int) -> list[float]:
    """Return the centered moving average of losses.

    A mean of earlier losses only would fall late, so that the suggested rate would be too high.

    Args:
        losses: Losses, of which only the last ones may not be finite. The average there is nan.
        window: Number of losses in a mean. There are fewer at both ends.
    """
    count = sum(map(isfinite, losses))
    means = []
    for index in range(count):
        radius = min(index, count - 1 - index, window // 2)
        means.append(fmean(losses[index - radius : index + radius + 1]))
    return means + [nan] * (len(losses) - count)


def has_diverged(losses: Sequence[float], window: int) -> bool:
    """Return True if the mean of the last losses is far above the first or the lowest such mean.

    Args:
        losses: Losses so far.
        window: Number of losses in a mean.
    """
    ends = range(min(window, len(losses)), len(losses) + 1)
    means = [fmean(losses[max(0, end - window) : end]) for end in ends]
    lowest = min(means)
    return lowest > 0 and means[-1] > min(MAX_OVER_FIRST * means[0], MAX_OVER_LOWEST * lowest)


def steepest_rate(points: Sequence[RatePoint], first_step: int = 0) -> float | None:
    """Return the rate at which the smoothed loss falls fastest over the logarithm of the rate.

    Args:
        points: Results of the steps.
        first_step: Step from which to search, up to the step with the lowest smoothed loss.

    Returns:
        The rate; None if the loss never falls.
    """
    finite = [point for point in points if isfinite(point.smoothed)][first_step:]
    lowest = min(range(len(finite)), key=lambda index: finite[index].smoothed, default=0)
    falling = finite[: lowest + 1]
    if len(falling) < 3:
        return None
    slopes = np.gradient([point.smoothed for point in falling], np.log([point.rate for point in falling]))
    return falling[int(slopes.argmin())].rate if slopes.min() < 0 else None


def result_lines(results: RateRangeResult, options: RateBenchOptions, deck: Deck) -> list[str]:
    """Return a table with some of the steps, and sentences on the suggested rate."""
    points = results.points
    indices = np.unique(np.linspace(0, len(points) - 1, min(_ROWS, len(points))).astype(int)).tolist()
    lowest = min(points, key=lambda point: (not isfinite(point.smoothed), point.smoothed))
    metric = parse_metric_name(deck, options.metric).title
    rows = [["step", "rate", metric, "smoothed", ""]]
    marks = {results.suggestion: "steepest", lowest.rate: "lowest"}
    indices = sorted({*indices, *(index for index, point in enumerate(points) if point.rate in marks)})
    for index in indices:
        point = points[index]
        losses = [f"{each:.4f}" if isfinite(each) else "not finite" for each in (point.loss, point.smoothed)]
        rows.append([str(index + 1), f"{point.rate:.3g}", *losses, marks.get(point.rate, "")])
    lines = table(rows, (4,))
    lines += ["", f"{results.ended} after {len(points)} of {options.steps} steps" if results.ended else ""]
    if results.suggestion is None:
        lines.append(
            "no suggestion: the loss falls at none of these rates (use a lower --from, or more --steps)"
        )
    else:
        rate, batch = results.suggestion, deck.batch.global_size
        lines.append(
            f"steepest fall of the loss at rate {rate:.3g}: --set "
            f"learning_rate.peak={peak_for_rate(deck, rate):.2g}"
        )
        if deck.learning_rate.reference_batch:
            lines.append(
                "(the peak applies to learning_rate.reference_batch = "
                f"{deck.learning_rate.reference_batch}, not {batch})"
            )
        lines.append(f"a tenth of the rate with the lowest loss is {lowest.rate / 10:.3g}")
    return [line for number, line in enumerate(lines) if line or lines[number - 1]]


def peak_for_rate(deck: Deck, rate: float) -> float:
    """Return the `learning_rate.peak` with which the global batch of the deck is trained at a rate."""
    reference = deck.learning_rate.reference_batch
    return rate * reference / deck.batch.global_size if reference else rate
