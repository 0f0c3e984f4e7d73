"""Results of `hpctrain bench train`, and their tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from hpctrain.bench.peers.training_peers import TRAINING_PEERS
from hpctrain.bench.pipeline_prediction import PipelinePrediction, stage_lines, step_time_line
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.model.construction import architecture_of
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from hpctrain.text import counted, fitted
from hpctrain.units import format_bytes, format_count

PHASES = ("forward", "backward", "synchronize", "step", "other")
COLUMNS = 100

NO_SYNC, PEER_NO_SYNC = "no-sync", "ddp-alone"
"""Variants without communication, of hpctrain and of torch."""

_ROUNDING = {"fp32": (1e-5, 1e-4), "bf16": (1e-3, 1e-2), "fp16": (1e-3, 1e-2), "fp8": (1e-2, 5e-2)}
"""Relative tolerance of the first loss and of the later ones, by `precision.compute`."""


@dataclass(frozen=True)
class Setting:
    """Model, batch and machine of a measurement.

    Attributes:
        title: Title of the deck.
        model: Family and number of parameters, as text.
        precision: Name of the precision.
        ranks: Number of ranks.
        batch: Samples in the global batch.
        sequence: Tokens per sample.
        gemm_flops: FLOP/s of matrix products on one rank.
        processor: Name of the processor or GPU.
        load: Load average of the last minute, before and after the measurement.
    """

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
        """Return the setting of a deck on all ranks, with the load average before the measurement."""
        architecture = architecture_of(deck, deck.model.vocabulary or 0)
        name = architecture.family if isinstance(architecture, ModelShape) else architecture.title
        return Setting(
            title=deck.run.title,
            model=f"{name}, {format_count(count(architecture).parameters)} parameters",
            precision=deck.precision.format_name,
            ranks=world.size,
            batch=deck.batch.global_size,
            sequence=deck.batch.sequence,
            gemm_flops=gemm_flops,
            processor=processor,
            load=(load, os.getloadavg()[0]),
        )


@dataclass(frozen=True)
class TrainingResult:
    """Results of one variant.

    Attributes:
        name: Name of the variant.
        tokens_per_s: Tokens/s of all ranks together, by round.
        ratios: Tokens/s of the first variant divided by those of this one, by round.
        step_seconds: Seconds of each step on the slowest rank.
        mfu: Model FLOPs utilization.
        phase_ms: Milliseconds per step, by phase.
        losses: Mean loss of each step, from the untimed first step on.
        losses_agree: True if the losses equal those of the first variant except for rounding; None if they
            are not comparable.
        pipeline: Predicted and measured step time of a variant with pipeline stages.
        peak_bytes: Largest memory of a rank; None if other variants ran in the same processes.
        node_bytes: Largest memory of all ranks of a node together. Memory that ranks share counts once, and
            code of libraries does not count.
    """

    name: str
    tokens_per_s: list[float]
    ratios: list[float]
    step_seconds: list[float]
    mfu: float
    phase_ms: dict[str, float]
    losses: list[float]
    losses_agree: bool | None = None
    pipeline: PipelinePrediction | None = None
    peak_bytes: int | None = None
    node_bytes: int | None = None


def same_losses(expected: Sequence[float], losses: Sequence[float], deck: Deck) -> bool:
    """Return True if two variants have the same losses except for rounding.

    Args:
        expected: Losses of the first variant.
        losses: Losses of the other variant, of the same steps.
        deck: Deck whose precision gives the tolerance.
    """
    first, later = _ROUNDING[deck.precision.compute]
    limits = [first] + [later] * (len(expected) - 1)
    return all(abs(a - b) <= limit * abs(a) for a, b, limit in zip(expected, losses, limits, strict=True))


def highest_memory(world: World, resident: int, proportional: int) -> tuple[int, int]:
    """Return the largest memory of a rank, and of the ranks of a node together, in bytes. Collective.

    Args:
        world: All ranks.
        resident: Resident bytes of this rank.
        proportional: Bytes of this rank, in which shared pages count in part; those of a node are added up.
    """
    ranks = world.everyone.all_gather_object([world.node, resident, proportional])
    nodes: dict[int, int] = {}
    for node, _, size in ranks:
        nodes[node] = nodes.get(node, 0) + size
    return max(row[1] for row in ranks), max(nodes.values())


def result_lines(setting: Setting, results: Sequence[TrainingResult]) -> list[str]:
    """Return the lines to print, of at most COLUMNS characters unless names are too long."""
    first = results[0].name
    lines = [
        f"{setting.title}: {setting.model}, {setting.precision}, {counted(setting.ranks, 'rank')}, "
        f"batch {setting.batch} x {setting.sequence} tokens",
        f"{setting.processor}, load average {setting.load[0]:.1f} to {setting.load[1]:.1f}; matrix "
        "products run at "
        f"{setting.gemm_flops / 1e9:.1f} GFLOP/s per rank",
        "",
        *_speeds(results),
        f"ratio: tokens/s of {first} / tokens/s of the variant in the same round (median, lowest, highest).",
        "p95/p50: 95th percentile of the step times / median of the step times.",
        *_ratio_factors(results),
        "",
        *_losses_and_memory(results),
        *_loss_differences(results),
    ]
    phases = [["phases, ms per step", *PHASES]]
    timed = (row for row in results if row.phase_ms)
    phases += ([row.name, *(f"{row.phase_ms.get(phase, 0.0):.1f}" for phase in PHASES)] for row in timed)
    lines += ["", *fitted(phases, (0,), COLUMNS)] if len(phases) > 1 else []
    for row in results:
        if row.pipeline is not None:
            lines += ["", *stage_lines(row.pipeline), step_time_line(row.pipeline)]
        if row.peak_bytes is not None and len(results) == 1:
            lines.append(f"{row.name}: peak memory of a rank {format_bytes(row.peak_bytes)}")
    return lines


def _speeds(results: Sequence[TrainingResult]) -> list[str]:
    rows = [["variant", "tokens/s", "lowest", "highest", "p95/p50", "mfu", "ratio", "lowest", "highest"]]
    for row in results:
        speeds = [format_count(statistic(row.tokens_per_s)) for statistic in (median, min, max)]
        ratios = [f"{statistic(row.ratios):.1%}" for statistic in (median, min, max)]
        tail = quantile(row.step_seconds, 0.95) / quantile(row.step_seconds, 0.5)
        rows.append([row.name, *speeds, f"{tail:.2f}", f"{row.mfu:.1%}", *ratios])
    return fitted(rows, (0,), COLUMNS)


def _losses_and_memory(results: Sequence[TrainingResult]) -> list[str]:
    answers = {True: "yes", False: "NO", None: "-"}
    rows = [["variant", "first loss", "last loss", "same losses", "peak of a rank", "peak of the node"]]
    for row in results:
        losses = [f"{row.losses[at]:.5f}" for at in (0, -1)]
        memory = [format_bytes(size) if size else "-" for size in (row.peak_bytes, row.node_bytes)]
        rows.append([row.name, *losses, answers[row.losses_agree], *memory])
    return fitted(rows, (0,), COLUMNS)


def _loss_differences(results: Sequence[TrainingResult]) -> Iterator[str]:
    """Yield a sentence on the largest difference of each variant whose losses differ from the first one's."""
    first = results[0]
    for row in results:
        if row.losses_agree is False:
            step, one, other = max(
                zip(range(1, len(row.losses) + 1), first.losses, row.losses, strict=True),
                key=lambda each: abs(each[1] - each[2]),
            )
            yield (
                f"{row.name}: losses differ from {first.name}: "
                f"step {step} has {other:.5f}, expected {one:.5f}"
            )


def _ratio_factors(results: Sequence[TrainingResult]) -> Iterator[str]:
    """Yield how the ratio to each data-parallel peer divides into computation and communication."""
    rates = {row.name: row.tokens_per_s for row in results}
    if NO_SYNC not in rates or PEER_NO_SYNC not in rates:
        return
    computation = [a / b for a, b in zip(rates[NO_SYNC], rates[PEER_NO_SYNC], strict=True)]
    peers = {name for name, peer in TRAINING_PEERS.items() if peer.axis == "data"} - {PEER_NO_SYNC}
    for row in results:
        if row.name in peers:
            communication = [ratio / part for ratio, part in zip(row.ratios, computation, strict=True)]
            yield (
                f"ratio to {row.name} {median(row.ratios):.1%} = computation {median(computation):.1%} "
                f"({NO_SYNC} / {PEER_NO_SYNC}) x communication {median(communication):.1%}"
            )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
