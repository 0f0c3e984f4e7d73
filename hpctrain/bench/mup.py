"""`hpctrain bench mup`: whether a deck's model behaves alike at any width, in muP and in the standard form.

The coordinate check of Tensor Programs V (arXiv 2203.03466, appendix D.1): how far the values of each kind of
layer spread, by width and step. The sweep: which rate is best, by width. Each training is one rank's alone;
ranks share them out.
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

from hpctrain.bench.measurement import with_vocabulary, write_json
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
from hpctrain.report.terminal import stdout_console
from hpctrain.report.widths import draw_widths
from hpctrain.text import table
from hpctrain.train.trainer import Trainer

PARAMETRIZATIONS = ("standard", "mup")
KINDS = ("embedding", "attention", "feed_forward", "block", "logits")
"""What values are of: a block's is the residual stream behind it; of those in blocks the mean over these."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class WidthBenchOptions:
    """What to try: `widths` and `steps` of the coordinate check, mean over `seeds` initial models; `rates` of
    the sweep over `rate_widths`, none where there are none; whether heads get wider, and not more.
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
    """A training that is one rank's: of the deck's seed and so many more, or of another rate than its own."""

    parametrization: str
    width: int
    seed: int = 0
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.parametrization} {self.width} {self.seed if self.rate is None else self.rate}"


@dataclass
class WidthsFigures:
    """By parametrization: `spread` of each kind by width, of the steps from 0; `loss` by width and rate, of
    the last tenth of the steps of each run, nan where it did not stay finite.
    """

    spread: dict[str, dict[str, dict[int, list[float]]]] = field(default_factory=dict)
    loss: dict[str, dict[int, dict[float, float]]] = field(default_factory=dict)


def bench_mup(
    world: World,
    path: Path,
    overrides: Sequence[str],
    wish: WidthBenchOptions,
    output: Path | None,
    picture: Path | None,
) -> None:
    """Try a deck at several widths, of which its own is the base where it names none. Collective.

    HpctrainError where a width does not fit its heads, no rule for muP is known of the deck, its weights come
    from elsewhere, it has no logits or no texts of its own, or rates are to be compared on random tokens.
    """
    with world.agreement():
        if picture is not None:
            require("matplotlib", "drawing pictures")
        deck = with_base(read_deck(path, overrides, read_source=read_source_keys))
        if deck.model.source is not None:
            asked = "conflicts with bench mup, which compares models with new weights (leave it out)"
            raise HpctrainError(deck.problem("model.from", asked))
        if deck.objective.kind in (*SCORE_KINDS, *POLICY_KINDS):
            asked = 'is unsupported in bench mup, which compares logits (use "next-token")'
            raise HpctrainError(deck.problem("objective.kind", asked))
        for width in (*wish.widths, *(wish.rate_widths if wish.rates else ())):
            changed = of_width(deck, width, "mup", wish.wider_heads)
            problems = parametrization_problems(changed)
            if told := [changed.problem(each.key, each.sentence) for each in problems]:
                raise HpctrainError(told)
        if wish.random_tokens and wish.rates:
            raise HpctrainError("--rates conflicts with --random-tokens, from which nothing can be learned")
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    if wish.random_tokens:
        deck = with_vocabulary(deck)
        batches = Batches(SyntheticSource(deck.batch.sequence, deck.model.vocabulary or 0), deck.run.seed)
    else:
        corpus = open_corpus(deck, world)
        deck, batches = resolve_vocabulary(deck, corpus), corpus.train
    figures = WidthsFigures()
    check_coordinates(world, deck, batches, wish, figures)
    if wish.rates:
        sweep(world, deck, batches, wish, figures)
    with world.agreement():
        if world.rank == 0:
            lines = [*table(spread_rows(figures)), *(["", *table(rate_rows(figures))] if wish.rates else [])]
            stdout_console().print("\n".join(lines), markup=False)
            if output is not None:
                write_json(output, asdict(figures))
            if picture is not None:
                draw_widths(picture, figures.spread, figures.loss, best_rate)


def with_base(deck: Deck) -> Deck:
    """The deck in the standard parametrization, with the keys of its base."""
    model = deck.model
    base = {
        "base_width": model.base_width or model.hidden,
        "base_head_size": model.base_head_size or model.head_size,
    }
    return on_one_rank(deck).with_keys(model={"parametrization": "standard", **base})


def of_width(deck: Deck, width: int, parametrization: str, wider_heads: bool) -> Deck:
    """The deck's model at another width, each of whose other widths is as many times its own.

    HpctrainError where no whole number of heads is left.
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
    others = {name: max(1, round(size * width / model.hidden)) for name, size in sizes.items()}
    return deck.with_keys(
        model={**changed, **others, "hidden": width, "parametrization": parametrization, "preset": None}
    )


def check_coordinates(
    world: World, deck: Deck, batches: Batches, wish: WidthBenchOptions, figures: WidthsFigures
) -> None:
    """Fill in the spreads, of steps at the rate of the deck's peak from the first one on. Collective."""
    steady = {"warmup": 0, "decay": "constant", "cooldown": 0, "reference_batch": 0}
    deck = deck.with_keys(learning_rate=steady, batch={"ramp_from": 0})

    def measure(job: WidthTraining) -> list[dict[str, float]]:
        changed = of_width(deck, job.width, job.parametrization, wish.wider_heads)
        trainer = _trainer(world, changed.with_keys(run={"seed": deck.run.seed + job.seed}), batches)
        tokens = next(iter(batches.step(0, deck.batch.micro_size, 0, 1, deck.batch.micro_size))).tokens
        spreads = [spreads_of(trainer.engine.model, tokens.to(world.device))]
        for _ in range(wish.steps):
            trainer.train_step()
            spreads.append(spreads_of(trainer.engine.model, tokens.to(world.device)))
        trainer.engine.close()
        return spreads

    jobs = [WidthTraining(*each) for each in product(PARAMETRIZATIONS, wish.widths, range(wish.seeds))]
    found = shared_out(world, jobs, measure)
    for name in PARAMETRIZATIONS:
        figures.spread[name] = {
            kind: {
                width: [
                    fmean(found[WidthTraining(name, width, seed)][step][kind] for seed in range(wish.seeds))
                    for step in range(wish.steps + 1)
                ]
                for width in wish.widths
            }
            for kind in KINDS
        }


def sweep(
    world: World, deck: Deck, batches: Batches, wish: WidthBenchOptions, figures: WidthsFigures
) -> None:
    """Fill in the losses of the deck's runs at other rates. Collective."""

    def train(job: WidthTraining) -> float:
        changed = of_width(deck, job.width, job.parametrization, wish.wider_heads)
        changed = changed.with_keys(learning_rate={"peak": job.rate})
        trainer, losses = _trainer(world, changed, batches), []
        for _ in range(deck.run.steps):
            losses.append(trainer.train_step().loss)
            if not isfinite(losses[-1]):
                break
        trainer.engine.close()
        loss = fmean(losses[-max(1, deck.run.steps // 10) :])
        return loss if isfinite(loss) else float("nan")

    each = product(PARAMETRIZATIONS, wish.rate_widths, wish.rates)
    found = shared_out(world, [WidthTraining(name, width, rate=rate) for name, width, rate in each], train)
    for name, width in product(PARAMETRIZATIONS, wish.rate_widths):
        losses = {rate: found[WidthTraining(name, width, rate=rate)] for rate in sorted(wish.rates)}
        figures.loss.setdefault(name, {})[width] = losses


def shared_out(
    world: World, jobs: Sequence[WidthTraining], do: Callable[[WidthTraining], Result]
) -> dict[WidthTraining, Result]:
    """The results of all jobs, of which each rank does some, the wider ones first. Collective."""
    ordered = sorted(jobs, key=lambda job: -job.width)
    own: dict[WidthTraining, Result] = {}
    with world.agreement():
        for number, job in enumerate(ordered):
            if number % world.size == world.rank:
                own[job] = do(job)
                gc.collect()
                if world.rank == 0:
                    print(f"{number + 1} of {len(jobs)}: {job}", flush=True)
    return {job: result for part in world.everyone.all_gather_object(own) for job, result in part.items()}


def _trainer(world: World, deck: Deck, batches: Batches) -> Trainer:
    """A trainer of this rank alone."""
    alone = world.single_rank_world()
    return Trainer(deck, build_engine(deck, alone, Mesh(alone, {})), batches)


@torch.no_grad()
def spreads_of(model: ModelPart, tokens: Tensor) -> dict[str, float]:
    """Standard deviations of the values of each of the KINDS, of tokens [b, s]."""
    seen: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with _watched(model, seen):
        logits = logits_of(model, tokens)
    seen["logits"].append(float(logits.float().std()))
    return {kind: fmean(values) for kind, values in seen.items()}


@contextmanager
def _watched(model: ModelPart, seen: Mapping[str, list[float]]) -> Iterator[None]:
    """Note what its layers give meanwhile."""
    watched: list[tuple[str, nn.Module]] = [("embedding", model.layers[0])]
    for block in blocks_of(model):
        assert isinstance(block, TransformerBlock)
        watched += [("attention", block.attention), ("feed_forward", block.feed_forward), ("block", block)]

    def noting(kind: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda _, __, output: seen[kind].append(float(output.float().std()))

    handles = [module.register_forward_hook(noting(kind)) for kind, module in watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def best_rate(losses: Mapping[float, float]) -> float | None:
    """Where the parabola through the least loss and its neighbours, over the logarithm of the rate, is least.

    The rate itself where it has a neighbour on one side alone; None where no loss is finite.
    """
    rates = [rate for rate in sorted(losses) if isfinite(losses[rate])]
    if not rates:
        return None
    place = min(range(len(rates)), key=lambda index: losses[rates[index]])
    if place in (0, len(rates) - 1):
        return rates[place]
    (x, y, z), (a, b, c) = (
        [f(rate) for rate in rates[place - 1 : place + 2]] for f in (log2, losses.__getitem__)
    )
    below, above = (b - a) / (y - x), (c - b) / (z - y)
    curvature = (above - below) / (z - x)
    return float(2 ** ((x + y) / 2 - below / (2 * curvature))) if curvature > 0 else rates[place]


def ratio(values: Sequence[float]) -> float:
    """The largest over the least."""
    return max(values) / min(values) if min(values) > 0 else inf


def spread_rows(figures: WidthsFigures) -> list[list[str]]:
    """The table of spreads after the last step, and the largest over the least of them, at the start, too."""
    widths = list(next(iter(figures.spread["mup"].values())))
    told = [["spread of", "param.", *(f"width {each}" for each in widths), "largest / least", "at the start"]]
    for name, kinds in figures.spread.items():
        for kind, by_width in kinds.items():
            first, last = ([steps[at] for steps in by_width.values()] for at in (0, -1))
            told.append(
                [kind, name, *(f"{each:.4g}" for each in last), f"{ratio(last):.3f}", f"{ratio(first):.3f}"]
            )
    return told


def rate_rows(figures: WidthsFigures) -> list[list[str]]:
    """The table of losses by rate, the best rate of each width, and how far these are apart."""
    rates = list(next(iter(figures.loss["mup"].values())))
    told = [["loss at width", "param.", *(f"rate {rate:.3g}" for rate in rates), "best rate", "ratio"]]
    for name, by_width in figures.loss.items():
        best = {width: best_rate(losses) for width, losses in by_width.items()}
        known = [rate for rate in best.values() if rate is not None]
        apart = f"{ratio(known):.2f}" if len(known) == len(best) else ""
        for width, losses in by_width.items():
            rate = best[width]
            cells = [f"{loss:.4f}" if isfinite(loss) else "not finite" for loss in losses.values()]
            told.append([str(width), name, *cells, "" if rate is None else f"{rate:.3g}", apart])
            apart = ""
    return told
