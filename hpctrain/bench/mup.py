"""`hpctrain bench mup`: comparison of widths of a model, in muP and in the standard parametrization.

The coordinate check of Tensor Programs V (arXiv 2203.03466, appendix D.1) measures standard deviations of the
outputs of each kind of layer, by width and step. The sweep finds the best learning rate of each width. Each
training runs on one rank, and the trainings are distributed over the ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from math import gcd, inf, isfinite, log2
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor, nn

from hpctrain.bench.measurement import publish, with_vocabulary
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.corpus import open_corpus, resolve_vocabulary
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.model import parametrization_problems
from hpctrain.deck.sections.objective import POLICY_KINDS, SCORE_KINDS
from hpctrain.engine.build import build_engine
from hpctrain.errors import HpctrainError, require
from hpctrain.model.block import TransformerBlock
from hpctrain.model.part import ModelPart, blocks_of, logits_of
from hpctrain.report.widths import draw_widths
from hpctrain.text import table
from hpctrain.train.trainer import Trainer

PARAMETRIZATIONS = ("standard", "mup")
KINDS = ("embedding", "attention", "feed_forward", "block", "logits")
"""Kinds of outputs, of which that of a block is the residual stream after it."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class WidthBenchOptions:
    """Options of `hpctrain bench mup`.

    Attributes:
        widths: Widths in the coordinate check, as values of model.hidden.
        steps: Steps of the coordinate check.
        seeds: Number of initial models, over which the check averages.
        rates: Learning rates of the sweep; empty for no sweep.
        rate_widths: Widths in the sweep.
        wider_heads: True if wider models have wider heads, False if they have more heads.
        random_tokens: Use random tokens instead of the token file.
    """

    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    steps: int = 10
    seeds: int = 1
    rates: tuple[float, ...] = ()
    rate_widths: tuple[int, ...] = (64, 128, 256)
    wider_heads: bool = False
    random_tokens: bool = False


@dataclass(frozen=True)
class WidthTraining:
    """Training on one rank.

    Attributes:
        parametrization: One of PARAMETRIZATIONS.
        width: Width of the model.
        seed: Number that is added to the seed of the deck.
        rate: Learning rate; None for that of the deck.
    """

    parametrization: str
    width: int
    seed: int = 0
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.parametrization} {self.width} {self.seed if self.rate is None else self.rate}"


@dataclass
class WidthResults:
    """Results by parametrization.

    Attributes:
        spread: Standard deviations before the first step and after each step, by kind of output and width.
        loss: Mean loss of the last tenth of the steps, by width and rate; nan if it did not stay finite.
    """

    spread: dict[str, dict[str, dict[int, list[float]]]] = field(default_factory=dict)
    loss: dict[str, dict[int, dict[float, float]]] = field(default_factory=dict)


def bench_mup(
    world: World,
    path: Path,
    overrides: Sequence[str],
    options: WidthBenchOptions,
    output: Path | None,
    picture: Path | None,
) -> None:
    """Train a deck with several widths, and print tables. Collective.

    The base width is that of the deck, unless it has `model.base_width`.

    Args:
        world: All ranks.
        path: File of the deck.
        overrides: Deck keys to change, as KEY=VALUE.
        options: What to measure.
        output: File for the results; None for no file.
        picture: File for a plot; None for no file.

    Raises:
        HpctrainError: A width does not fit the heads, muP has no rule for the model, or the deck is
            unsuitable: it starts from other weights, its objective has no logits or samples its own texts, or
            rates are compared on random tokens.
    """
    with world.agreement():
        if picture is not None:
            require("matplotlib", "drawing pictures")
        deck = with_base(read_deck(path, overrides, read_source=read_source_keys))
        if deck.model.source is not None:
            problem = "conflicts with bench mup, which compares models with new weights (leave it out)"
            raise HpctrainError(deck.problem("model.from", problem))
        if deck.objective.kind in (*SCORE_KINDS, *POLICY_KINDS):
            problem = 'is unsupported in bench mup, which compares logits (use "next-token")'
            raise HpctrainError(deck.problem("objective.kind", problem))
        for width in (*options.widths, *(options.rate_widths if options.rates else ())):
            changed = change_width(deck, width, "mup", options.wider_heads)
            problems = parametrization_problems(changed)
            if sentences := [changed.problem(each.key, each.sentence) for each in problems]:
                raise HpctrainError(sentences)
        if options.random_tokens and options.rates:
            raise HpctrainError("--rates conflicts with --random-tokens, from which nothing can be learned")
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    if options.random_tokens:
        deck = with_vocabulary(deck)
        batches = Batches(SyntheticSource(deck.batch.sequence, deck.model.vocabulary or 0), deck.run.seed)
    else:
        corpus = open_corpus(deck, world)
        deck, batches = resolve_vocabulary(deck, corpus), corpus.train
    results = WidthResults()
    check_coordinates(world, deck, batches, options, results)
    if options.rates:
        sweep_rates(world, deck, batches, options, results)
    rates = ["", *table(rate_rows(results))] if options.rates else []
    publish(world, [*table(spread_rows(results)), *rates], asdict(results), output)
    with world.agreement():
        if world.rank == 0 and picture is not None:
            draw_widths(picture, results.spread, results.loss, best_rate)


def with_base(deck: Deck) -> Deck:
    """Return the deck in the standard parametrization, with its base width and base head size set."""
    model = deck.model
    base = {
        "base_width": model.base_width or model.hidden,
        "base_head_size": model.base_head_size or model.head_size,
    }
    return on_one_rank(deck).with_keys(model={"parametrization": "standard", **base})


def change_width(deck: Deck, width: int, parametrization: str, wider_heads: bool) -> Deck:
    """Return the deck with another width, and with its other sizes in proportion.

    Args:
        deck: The deck.
        width: Value of model.hidden.
        parametrization: One of PARAMETRIZATIONS.
        wider_heads: True to change the size of heads, False to change their number.

    Raises:
        HpctrainError: The number or the size of heads would not be a whole number.
    """
    model = deck.model
    heads = {"heads": model.heads, "key_value_heads": model.key_value_heads}
    changed: dict[str, object]
    if wider_heads:
        unit = model.hidden // gcd(model.hidden, model.head_size // (2 if model.head_size % 2 == 0 else 1))
        changed = {"head_size": model.head_size * width // model.hidden}
    else:
        unit = model.hidden // gcd(model.hidden, *heads.values())
        changed = {name: count * width // model.hidden for name, count in heads.items()}
    if width < 1 or width % unit:
        which = "the head size" if wider_heads else "the number of heads"
        raise HpctrainError(f"--widths: {width}: {which} must be a whole number (use a multiple of {unit})")
    sizes = {"mlp": model.mlp} | ({} if model.experts is None else {"experts.mlp": model.experts.mlp})
    mlp_sizes = {name: max(1, round(size * width / model.hidden)) for name, size in sizes.items()}
    return deck.with_keys(
        model={**changed, **mlp_sizes, "hidden": width, "parametrization": parametrization, "preset": None}
    )


def check_coordinates(
    world: World, deck: Deck, batches: Batches, options: WidthBenchOptions, results: WidthResults
) -> None:
    """Measure the standard deviations of outputs, and add them to the results. Collective.

    All steps have the peak learning rate of the deck.
    """
    constant_rate = {"warmup": 0, "decay": "constant", "cooldown": 0, "reference_batch": 0}
    deck = deck.with_keys(learning_rate=constant_rate, batch={"ramp_from": 0})

    def measure(job: WidthTraining) -> list[dict[str, float]]:
        changed = change_width(deck, job.width, job.parametrization, options.wider_heads)
        trainer = _make_trainer(world, changed.with_keys(run={"seed": deck.run.seed + job.seed}), batches)
        tokens = next(iter(batches.step(0, deck.batch.micro_size, 0, 1, deck.batch.micro_size))).tokens
        spreads = [measure_spreads(trainer.engine.model, tokens.to(world.device))]
        for _ in range(options.steps):
            trainer.train_step()
            spreads.append(measure_spreads(trainer.engine.model, tokens.to(world.device)))
        trainer.engine.close()
        return spreads

    seeds = range(options.seeds)
    jobs = [WidthTraining(*each) for each in product(PARAMETRIZATIONS, options.widths, seeds)]
    job_results = distribute(world, jobs, measure)
    for name in PARAMETRIZATIONS:
        results.spread[name] = {
            kind: {
                width: [
                    fmean(job_results[WidthTraining(name, width, seed)][step][kind] for seed in seeds)
                    for step in range(options.steps + 1)
                ]
                for width in options.widths
            }
            for kind in KINDS
        }


def sweep_rates(
    world: World, deck: Deck, batches: Batches, options: WidthBenchOptions, results: WidthResults
) -> None:
    """Train each width with each learning rate, and add the losses to the results. Collective."""

    def train(job: WidthTraining) -> float:
        changed = change_width(deck, job.width, job.parametrization, options.wider_heads)
        changed = changed.with_keys(learning_rate={"peak": job.rate})
        trainer, losses = _make_trainer(world, changed, batches), []
        for _ in range(deck.run.steps):
            losses.append(trainer.train_step().loss)
            if not isfinite(losses[-1]):
                break
        trainer.engine.close()
        loss = fmean(losses[-max(1, deck.run.steps // 10) :])
        return loss if isfinite(loss) else float("nan")

    cases = product(PARAMETRIZATIONS, options.rate_widths, options.rates)
    jobs = [WidthTraining(name, width, rate=rate) for name, width, rate in cases]
    job_results = distribute(world, jobs, train)
    for name, width in product(PARAMETRIZATIONS, options.rate_widths):
        losses = {rate: job_results[WidthTraining(name, width, rate=rate)] for rate in sorted(options.rates)}
        results.loss.setdefault(name, {})[width] = losses


def distribute(
    world: World, jobs: Sequence[WidthTraining], run: Callable[[WidthTraining], Result]
) -> dict[WidthTraining, Result]:
    """Run trainings distributed over the ranks, the widest ones first, and return all results. Collective."""
    ordered = sorted(jobs, key=lambda job: -job.width)
    local_results: dict[WidthTraining, Result] = {}
    with world.agreement():
        for number, job in enumerate(ordered):
            if number % world.size == world.rank:
                local_results[job] = run(job)
                gc.collect()
                if world.rank == 0:
                    print(f"{number + 1} of {len(jobs)}: {job}", flush=True)
    gathered = world.everyone.all_gather_object(local_results)
    return {job: result for results in gathered for job, result in results.items()}


def _make_trainer(world: World, deck: Deck, batches: Batches) -> Trainer:
    """Return a trainer that uses this rank only."""
    one_rank = world.single_rank_world()
    return Trainer(deck, build_engine(deck, one_rank, Mesh(one_rank, {})), batches)


@torch.no_grad()
def measure_spreads(model: ModelPart, tokens: Tensor) -> dict[str, float]:
    """Return the standard deviation of each of KINDS for tokens [batch, seq]."""
    deviations: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with _recorded_deviations(model, deviations):
        logits = logits_of(model, tokens)
    deviations["logits"].append(float(logits.float().std()))
    return {kind: fmean(values) for kind, values in deviations.items()}


@contextmanager
def _recorded_deviations(model: ModelPart, deviations: Mapping[str, list[float]]) -> Iterator[None]:
    """Append the standard deviations of the outputs of layers to `deviations` within the context."""
    layers: list[tuple[str, nn.Module]] = [("embedding", model.layers[0])]
    for block in blocks_of(model):
        assert isinstance(block, TransformerBlock)
        layers += [("attention", block.attention), ("feed_forward", block.feed_forward), ("block", block)]

    def record(kind: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda _, __, output: deviations[kind].append(float(output.float().std()))

    handles = [layer.register_forward_hook(record(kind)) for kind, layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def best_rate(losses: Mapping[float, float]) -> float | None:
    """Return the rate with the lowest loss, interpolated between the measured rates.

    It is the minimum of the parabola through the lowest loss and its two neighbors over the logarithm of the
    rate. If there is a neighbor on one side only, it is the measured rate.

    Args:
        losses: Losses by rate.

    Returns:
        The rate; None if no loss is finite.
    """
    rates = [rate for rate in sorted(losses) if isfinite(losses[rate])]
    if not rates:
        return None
    lowest = min(range(len(rates)), key=lambda index: losses[rates[index]])
    if lowest in (0, len(rates) - 1):
        return rates[lowest]
    (x, y, z), (a, b, c) = (
        [f(rate) for rate in rates[lowest - 1 : lowest + 2]] for f in (log2, losses.__getitem__)
    )
    left_slope, right_slope = (b - a) / (y - x), (c - b) / (z - y)
    curvature = (right_slope - left_slope) / (z - x)
    return float(2 ** ((x + y) / 2 - left_slope / (2 * curvature))) if curvature > 0 else rates[lowest]


def ratio(values: Sequence[float]) -> float:
    """Return the largest value divided by the smallest one."""
    return max(values) / min(values) if min(values) > 0 else inf


def spread_rows(results: WidthResults) -> list[list[str]]:
    """Return the rows of a table of standard deviations after the last step, with ratios over the widths."""
    widths = list(next(iter(results.spread["mup"].values())))
    rows = [["spread of", "param.", *(f"width {each}" for each in widths), "largest / least", "at the start"]]
    for name, kinds in results.spread.items():
        for kind, by_width in kinds.items():
            first, last = ([steps[index] for steps in by_width.values()] for index in (0, -1))
            rows.append(
                [kind, name, *(f"{each:.4g}" for each in last), f"{ratio(last):.3f}", f"{ratio(first):.3f}"]
            )
    return rows


def rate_rows(results: WidthResults) -> list[list[str]]:
    """Return the rows of a table of losses by rate, with the best rate of each width and their ratio."""
    rates = list(next(iter(results.loss["mup"].values())))
    rows = [["loss at width", "param.", *(f"rate {rate:.3g}" for rate in rates), "best rate", "ratio"]]
    for name, by_width in results.loss.items():
        best = {width: best_rate(losses) for width, losses in by_width.items()}
        known = [rate for rate in best.values() if rate is not None]
        best_ratio = f"{ratio(known):.2f}" if len(known) == len(best) else ""
        for width, losses in by_width.items():
            rate = best[width]
            cells = [f"{loss:.4f}" if isfinite(loss) else "not finite" for loss in losses.values()]
            rows.append([str(width), name, *cells, "" if rate is None else f"{rate:.3g}", best_ratio])
            best_ratio = ""
    return rows
