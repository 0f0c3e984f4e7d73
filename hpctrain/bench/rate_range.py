"""`hpctrain bench rate`: which learning rates a deck learns with, by one short training whose rate rises.

The range test of Smith (arXiv 1506.01186), as others draw it: the rate rises from step to step by the same
factor, the loss is smoothed, and the training ends where it diverges. The rate is suggested at which the
smoothed loss falls most over the logarithm of the rate. Steps are those of the run's own trainer, on any
layout; nothing is kept.
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

from hpctrain.bench.measurement import write_json
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
from hpctrain.report.terminal import stdout_console
from hpctrain.text import table
from hpctrain.train.automatic_layout import choose_layout
from hpctrain.train.server.server_trainer import new_trainer
from hpctrain.train.start import start_from_source
from hpctrain.train.trainer import Trainer

DIVERGED = 4.0
"""Times the least smoothed loss at which the training ends."""
RISEN = 1.25
"""Times the first smoothed loss at which it ends, too: a language model's has no room to rise fourfold."""
_ROWS = 24


@dataclass(frozen=True)
class RateBenchOptions:
    """Rates from `first` to `last` in so many `steps`; `window` losses make a smoothed one, by default a
    tenth of the steps. `figure` is what counts as loss: that of training, or one of an evaluation after each
    step.
    """

    first: float = 1e-6
    last: float = 1.0
    steps: int = 100
    window: int | None = None
    figure: str = TRAINING_LOSS

    @property
    def averaged(self) -> int:
        """How many losses are averaged."""
        return max(1, self.steps // 10) if self.window is None else self.window

    def check(self) -> None:
        """Raise HpctrainError with every option that is out of range."""
        problems = []
        if not 0 < self.first < self.last <= 1000:
            shown = f"--from {self.first:g} --to {self.last:g}"
            problems.append(f"{shown}: must be above 0, at most 1000, and in ascending order")
        if not 10 <= self.steps <= 100_000:
            problems.append(f"--steps {self.steps}: must be from 10 to 100000")
        if self.window is not None and not 1 <= self.window <= self.steps // 2:
            problems.append(f"--window {self.window}: must be from 1 (no smoothing) to half of --steps")
        if problems:
            raise HpctrainError(problems)


@dataclass(frozen=True)
class RatePoint:
    """A step: its rate, its loss and the smoothed one, nan where the loss was not finite."""

    rate: float
    loss: float
    smoothed: float


@dataclass(frozen=True)
class RateFigures:
    """What came of it: the steps, the rate to begin with, None where the loss fell at none, and why the
    training ended before its last step, "" where it did not.
    """

    points: list[RatePoint]
    suggestion: float | None
    ended: str


@dataclass(frozen=True)
class RisingRate(LearningRate):
    """The rate of step n, from 0, is `peak` times `factor` to the n-th power."""

    factor: float = 1.0

    @override
    def at(self, step: int, batch: int) -> float:
        return self.peak * self.factor**step


def bench_rate(
    world: World,
    path: Path,
    overrides: Sequence[str],
    wish: RateBenchOptions,
    output: Path | None,
    picture: Path | None,
) -> None:
    """Train a deck at rising rates, and print a table and a suggestion. Collective.

    HpctrainError where an option or the deck will not do, or it has servers, which have rates of their own.
    """
    with world.agreement():
        wish.check()
        if picture is not None:
            require("matplotlib", "drawing pictures")
        deck = read_deck(path, overrides, world.size, read_source_keys)
        if deck.communication.server is not None:
            sentence = (
                "is unsupported in a rate test, which requires steps that all ranks make "
                'together (use "none")'
            )
            raise HpctrainError(deck.problem("communication.server.mode", sentence))
        wanted = parse_metric_name(deck, wish.figure)
    deck, _ = choose_layout(world, deck)
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    world.compare_calls(deck.communication.check)
    run_folder = Path(deck.run.dir)
    new = [path for path in (run_folder / "offload", run_folder, *run_folder.parents) if not path.exists()]
    corpus = open_corpus(deck, world)
    deck = choose_functions(resolve_vocabulary(steady(deck), corpus), world)
    trainer = new_trainer(world, deck, corpus.train)
    try:
        judge = _judge(deck, trainer, corpus, wanted, wish.figure) if wanted.evaluation_set else None
        if deck.model.source is not None:
            start_from_source(deck, trainer.engine)
        figures = rise(trainer, wish, tell=world.rank == 0, judge=judge)
    finally:
        trainer.engine.close()
        corpus.close()
    with world.agreement():
        pass  # all have closed their files in place of memory
    for folder in new:
        with suppress(OSError):
            folder.rmdir()
    with world.agreement():
        if world.rank == 0:
            stdout_console().print("\n".join(told(figures, wish, deck)), markup=False)
            if output is not None:
                write_json(output, asdict(figures))
            if picture is not None:
                points = figures.points
                losses = [(each.rate, each.loss, each.smoothed) for each in points]
                draw_rates(picture, deck.run.title, losses, figures.suggestion, wanted.title)


def _judge(
    deck: Deck, trainer: Trainer, corpus: Corpus, wanted: MetricName, name: str
) -> Callable[[], float]:
    """What evaluates the figure. Collective, as are its calls; HpctrainError where there is none."""
    world = trainer.engine.world
    [held_out] = [each for each in open_held_out(deck, world, corpus) if each.name == wanted.evaluation_set]
    if wanted.kind not in held_out.metrics(1.0):
        raise HpctrainError(f"--figure {name}: the number of bytes of text in the set is unknown")
    return lambda: held_out.metrics(trainer.evaluate(held_out.batches, held_out.sequences)["loss"])[
        wanted.kind
    ]


def steady(deck: Deck) -> Deck:
    """The deck without what else changes from step to step, or leaves steps out."""
    return deck.with_keys(
        learning_rate={"warmup": 0, "decay": "constant", "cooldown": 0},
        batch={"ramp_from": 0},
        stability={"spike": "off"},
    )


def rise(
    trainer: Trainer, wish: RateBenchOptions, tell: bool = False, judge: Callable[[], float] | None = None
) -> RateFigures:
    """Train at rising rates until the last one, or until the loss diverges: that of the step, or what `judge`
    finds after it. Collective; with `tell`, a line is printed now and then.
    """
    factor = (wish.last / wish.first) ** (1 / (wish.steps - 1))
    rate = trainer.engine.control.learning_rate
    trainer.engine.control.learning_rate = RisingRate(**{**vars(rate), "peak": wish.first}, factor=factor)
    rates: list[float] = []
    losses: list[float] = []
    ended = ""
    for step in range(1, wish.steps + 1):
        result = trainer.train_step()
        rates.append(result.learning_rate)
        losses.append(result.loss if judge is None or not isfinite(result.loss) else judge())
        if not isfinite(losses[-1]):
            ended = f"the loss was not finite at rate {rates[-1]:.3g}"
            break
        if diverged(losses, wish.averaged):
            ended = f"the loss diverged at rate {rates[-1]:.3g}"
            break
        if tell and step % max(1, wish.steps // 10) == 0:
            print(f"{step} of {wish.steps}: rate {rates[-1]:.3g}, {wish.figure} {losses[-1]:.4f}", flush=True)
    trainer.engine.control.learning_rate = rate
    points = list(map(RatePoint, rates, losses, centred(losses, wish.averaged)))
    return RateFigures(points, steepest(points, wish.averaged // 2), ended)


def centred(losses: Sequence[float], window: int) -> list[float]:
    """The mean of the losses around each, `window` of them, fewer at both ends: a mean of earlier ones alone
    would fall late, and the rate that is suggested be too high. Losses that are not finite count nowhere.
    """
    count = sum(map(isfinite, losses))  # all, or all but the last
    means = []
    for at in range(count):
        reach = min(at, count - 1 - at, window // 2)
        means.append(fmean(losses[at - reach : at + reach + 1]))
    return means + [nan] * (len(losses) - count)


def diverged(losses: Sequence[float], window: int) -> bool:
    """Whether the mean of the last losses is far above the least of such means, or above the first."""
    ends = range(min(window, len(losses)), len(losses) + 1)
    means = [fmean(losses[max(0, end - window) : end]) for end in ends]
    least = min(means)
    return least > 0 and means[-1] > min(RISEN * means[0], DIVERGED * least)


def steepest(points: Sequence[RatePoint], settling: int = 0) -> float | None:
    """The rate at which the smoothed loss falls most over the logarithm of the rate, from step `settling` to
    the least one; None where it does not fall.
    """
    finite = [point for point in points if isfinite(point.smoothed)][settling:]
    least = min(range(len(finite)), key=lambda at: finite[at].smoothed, default=0)
    falling = finite[: least + 1]
    if len(falling) < 3:
        return None
    slopes = np.gradient([point.smoothed for point in falling], np.log([point.rate for point in falling]))
    return falling[int(slopes.argmin())].rate if slopes.min() < 0 else None


def told(figures: RateFigures, wish: RateBenchOptions, deck: Deck) -> list[str]:
    """The table of some of the steps, and what they suggest."""
    points = figures.points
    shown = np.unique(np.linspace(0, len(points) - 1, min(_ROWS, len(points))).astype(int)).tolist()
    least = min(points, key=lambda point: (not isfinite(point.smoothed), point.smoothed))
    figure = parse_metric_name(deck, wish.figure).title
    rows = [["step", "rate", figure, "smoothed", ""]]
    marks = {figures.suggestion: "steepest", least.rate: "lowest"}
    shown = sorted({*shown, *(number for number, point in enumerate(points) if point.rate in marks)})
    for number in shown:
        point = points[number]
        losses = [f"{each:.4f}" if isfinite(each) else "not finite" for each in (point.loss, point.smoothed)]
        rows.append([str(number + 1), f"{point.rate:.3g}", *losses, marks.get(point.rate, "")])
    lines = table(rows, (4,))
    lines += ["", f"{figures.ended} after {len(points)} of {wish.steps} steps" if figures.ended else ""]
    if figures.suggestion is None:
        lines.append(
            "no suggestion: the loss falls at none of these rates (use a lower --from, or more --steps)"
        )
    else:
        peak, batch = figures.suggestion, deck.batch.global_size
        lines.append(
            f"steepest fall of the loss at rate {peak:.3g}: --set "
            f"learning_rate.peak={peak_of(deck, peak):.2g}"
        )
        if deck.learning_rate.reference_batch:
            lines.append(
                "(the peak applies to learning_rate.reference_batch = "
                f"{deck.learning_rate.reference_batch}, not {batch})"
            )
        lines.append(f"a tenth of the rate with the lowest loss is {least.rate / 10:.3g}")
    return [line for number, line in enumerate(lines) if line or lines[number - 1]]


def peak_of(deck: Deck, rate: float) -> float:
    """The peak of the deck with which its batch has that rate."""
    reference = deck.learning_rate.reference_batch
    return rate * reference / deck.batch.global_size if reference else rate
