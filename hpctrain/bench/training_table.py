"""The figures of `hpctrain bench train`, and their tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from hpctrain.bench.peers.training_peers import RIVALS
from hpctrain.bench.pipeline_prediction import Prediction, sentence, stage_lines
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.model.construction import architecture_of
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from hpctrain.text import counted, fitted
from hpctrain.units import format_bytes, format_count

PHASES = ("forward", "backward", "synchronize", "step", "other")
COLUMNS = 100

ALONE, RIVAL_ALONE = "no-sync", "ddp-alone"

_ROUNDING = {"fp32": (1e-5, 1e-4), "bf16": (1e-3, 1e-2), "fp16": (1e-3, 1e-2), "fp8": (1e-2, 5e-2)}
"""By precision.compute, by how much losses of the first and of further steps may differ, of the loss."""


@dataclass(frozen=True)
class Setting:
    """What was measured, and on what. `load` is the machine's load of the last minute, before and after."""

    title: str
    model: str
    precision: str
    ranks: int
    batch: int
    sequence: int
    gemm_flops: float
    processor: str
    load: tuple[float, float]

    @staticmethod
    def of(deck: Deck, world: World, gemm_flops: float, processor: str, load: float) -> Setting:
        """Of a deck on all ranks; `load` is that before."""
        made = architecture_of(deck, deck.model.vocabulary or 0)
        name = made.family if isinstance(made, ModelShape) else made.title
        return Setting(
            title=deck.run.title,
            model=f"{name}, {format_count(count(made).parameters)} parameters",
            precision=deck.precision.format_name,
            ranks=world.size,
            batch=deck.batch.global_size,
            sequence=deck.batch.sequence,
            gemm_flops=gemm_flops,
            processor=processor,
            load=(load, os.getloadavg()[0]),
        )


@dataclass(frozen=True)
class TrainingFigures:
    """What one variant reached: tokens/s of all ranks together, by round; in each tokens/s of the first
    variant over its own; seconds of each step by the slowest rank; milliseconds a step by phase; the mean
    loss of each step from the very first one on.

    `losses_agree` is whether these are the first variant's but for rounding, None where they cannot be.
    `pipeline` is the simulator's prediction, of a variant with stages. `peak_bytes` is the most memory that a
    rank had in use, of a variant alone in its processes; `node_bytes` that all ranks of a node had together,
    what they share counted once, without code of libraries.
    """

    name: str
    tokens_per_s: list[float]
    ratios: list[float]
    step_seconds: list[float]
    mfu: float
    phase_ms: dict[str, float]
    losses: list[float]
    losses_agree: bool | None = None
    pipeline: Prediction | None = None
    peak_bytes: int | None = None
    node_bytes: int | None = None


def agrees(own: Sequence[float], others: Sequence[float], deck: Deck) -> bool:
    """Whether losses of the same steps are the same but for rounding, which training goes on from."""
    first, further = _ROUNDING[deck.precision.compute]
    limits = [first] + [further] * (len(own) - 1)
    return all(
        abs(one - other) <= limit * abs(one) for one, other, limit in zip(own, others, limits, strict=True)
    )


def most_of_a_node(world: World, resident: int, own: int) -> tuple[int, int]:
    """Of bytes of each rank: the most of a rank, and the most `own` ones of the ranks of a node together.
    Collective.
    """
    ranks = world.everyone.all_gather_object([world.node, resident, own])
    nodes: dict[int, int] = {}
    for node, _, bytes_ in ranks:
        nodes[node] = nodes.get(node, 0) + bytes_
    return max(row[1] for row in ranks), max(nodes.values())


def figure_lines(setting: Setting, figures: Sequence[TrainingFigures]) -> list[str]:
    """All that is printed, in lines of COLUMNS where names let them be."""
    first = figures[0].name
    lines = [
        f"{setting.title}: {setting.model}, {setting.precision}, {counted(setting.ranks, 'rank')}, "
        f"batch {setting.batch} x {setting.sequence} tokens",
        f"{setting.processor}, load average {setting.load[0]:.1f} to {setting.load[1]:.1f}; matrix "
        "products run at "
        f"{setting.gemm_flops / 1e9:.1f} GFLOP/s per rank",
        "",
        *_speeds(figures),
        f"ratio: tokens/s of {first} / tokens/s of the variant in the same round (median, lowest, highest).",
        "p95/p50: 95th percentile of the step times / median of the step times.",
        *_parted(figures),
        "",
        *_trained(figures),
        *_different(figures),
    ]
    phases = [["phases, ms per step", *PHASES]]
    timed = (row for row in figures if row.phase_ms)
    phases += ([row.name, *(f"{row.phase_ms.get(phase, 0.0):.1f}" for phase in PHASES)] for row in timed)
    lines += ["", *fitted(phases, (0,), COLUMNS)] if len(phases) > 1 else []
    for row in figures:
        if row.pipeline is not None:
            lines += ["", *stage_lines(row.pipeline), sentence(row.pipeline)]
        if row.peak_bytes is not None and len(figures) == 1:
            lines.append(f"{row.name}: peak memory of a rank {format_bytes(row.peak_bytes)}")
    return lines


def _speeds(figures: Sequence[TrainingFigures]) -> list[str]:
    rows = [["variant", "tokens/s", "lowest", "highest", "p95/p50", "mfu", "ratio", "lowest", "highest"]]
    for row in figures:
        speeds = [format_count(of(row.tokens_per_s)) for of in (median, min, max)]
        ratios = [f"{of(row.ratios):.1%}" for of in (median, min, max)]
        tail = quantile(row.step_seconds, 0.95) / quantile(row.step_seconds, 0.5)
        rows.append([row.name, *speeds, f"{tail:.2f}", f"{row.mfu:.1%}", *ratios])
    return fitted(rows, (0,), COLUMNS)


def _trained(figures: Sequence[TrainingFigures]) -> list[str]:
    said = {True: "yes", False: "NO", None: "-"}
    rows = [["variant", "first loss", "last loss", "same losses", "peak of a rank", "peak of the node"]]
    for row in figures:
        losses = [f"{row.losses[at]:.5f}" for at in (0, -1)]
        memory = [format_bytes(size) if size else "-" for size in (row.peak_bytes, row.node_bytes)]
        rows.append([row.name, *losses, said[row.losses_agree], *memory])
    return fitted(rows, (0,), COLUMNS)


def _different(figures: Sequence[TrainingFigures]) -> Iterator[str]:
    """What is to be said of variants that train another model, or otherwise."""
    first = figures[0]
    for row in figures:
        if row.losses_agree is False:
            step, one, other = max(
                zip(range(1, len(row.losses) + 1), first.losses, row.losses, strict=True),
                key=lambda each: abs(each[1] - each[2]),
            )
            yield (
                f"{row.name}: losses differ from {first.name}: "
                f"step {step} has {other:.5f}, expected {one:.5f}"
            )


def _parted(figures: Sequence[TrainingFigures]) -> Iterator[str]:
    """What is won over peers on data ranks, by arithmetic and by communication."""
    rates = {row.name: row.tokens_per_s for row in figures}
    if ALONE not in rates or RIVAL_ALONE not in rates:
        return
    arithmetic = [own / other for own, other in zip(rates[ALONE], rates[RIVAL_ALONE], strict=True)]
    for row in figures:
        if row.name in RIVALS and RIVALS[row.name].axis == "data" and row.name != RIVAL_ALONE:
            rest = [ratio / part for ratio, part in zip(row.ratios, arithmetic, strict=True)]
            yield (
                f"ratio to {row.name} {median(row.ratios):.1%} = computation {median(arithmetic):.1%} "
                f"({ALONE} / {RIVAL_ALONE}) x communication {median(rest):.1%}"
            )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
