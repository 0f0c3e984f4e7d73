"""`hpctrain bench plan`: predicted step times of decks on this machine, compared with measured ones.

Decks of one model are measured by turns. The deviation of a deck shows the accuracy of the prediction. The
regret shows by how much the deck with the shortest predicted time is slower than the fastest deck.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

import torch

from hpctrain.bench.measurement import publish
from hpctrain.bench.training_speed import hpctrain_variant
from hpctrain.bench.variant_timing import VariantTimes, time_variants
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.host.processor import processor_name
from hpctrain.plan.calibrate.calibration import CalibrateOptions, measure_machine
from hpctrain.plan.calibrate.calibration_decks import LARGER, SMALL, gpt_deck, measured_decks
from hpctrain.plan.time.machine_rates import MachineRates, read_machine
from hpctrain.plan.time.step_plan import plan_step
from hpctrain.report.terminal import stderr_console
from hpctrain.text import either, table
from hpctrain.units import format_seconds

RANKS = 2

_PIPELINE = ("layout.pipeline=2", "batch.micro_size=1")
_BF16 = "precision.compute=bf16"
DECKS: Mapping[str, tuple[str, ...]] = {
    "17m-fp32-data": (),
    "17m-fp32-accumulation": ("batch.micro_size=1",),
    "17m-fp32-tensor": ("layout.tensor=2",),
    "17m-fp32-context": ("layout.context=2",),
    "17m-fp32-1f1b": _PIPELINE,
    "17m-fp32-interleaved": (*_PIPELINE, "layout.schedule=interleaved", "layout.chunks=2"),
    "17m-fp32-zb-v": (*_PIPELINE, "layout.schedule=zb-v"),
    "17m-bf16-data": (_BF16,),
    "17m-bf16-recompute": (_BF16, "memory.recompute=full"),
    "124m-fp32-data": (),
    "124m-fp32-zero-3": ("layout.zero=3",),
    "124m-bf16-tensor": (_BF16, "layout.tensor=2"),
}
"""Overrides of each deck by its name, which consists of model, format and layout."""


@dataclass(frozen=True)
class PlannedStep:
    """Predicted and measured step time of a deck in seconds.

    Attributes:
        name: Name of the deck.
        planned: Predicted time.
        causes: Predicted time by cause.
        measured: Median of the measured times.
        lowest: Shortest measured time.
        highest: Longest measured time.
        phases: Measured time by phase.
    """

    name: str
    planned: float
    causes: Mapping[str, float]
    measured: float
    lowest: float
    highest: float
    phases: Mapping[str, float]

    @property
    def deviation(self) -> float:
        """Relative deviation of the predicted from the measured time."""
        return self.planned / self.measured - 1

    @property
    def group(self) -> str:
        """Model and format, which decks must have in common to be compared."""
        return "-".join(self.name.split("-")[:2])


def deck_named(name: str) -> Deck:
    """Return a deck of DECKS."""
    small = name.startswith("17m")
    sizes = (SMALL, 4, 256) if small else (LARGER, 1, 512)
    return gpt_deck(*sizes, f"batch.global_size={8 if small else 2}", *DECKS[name])


def bench_plan(
    world: World, machine: str | None, only: Sequence[str], steps: int, rounds: int, output: Path | None
) -> None:
    """Predict and measure the steps of decks, and print a table. Collective.

    Args:
        world: All ranks, which must be RANKS.
        machine: Name or file of the rates of this machine; None to measure them first.
        only: Names of the decks, of DECKS; empty for all.
        steps: Steps of each deck in a round.
        rounds: Number of rounds.
        output: File for the results; None for no file.

    Raises:
        HpctrainError: A name is unknown, or the number of ranks is wrong.
    """
    with world.agreement():
        unknown = [name for name in only if name not in DECKS]
        if unknown:
            raise HpctrainError(f"--only {', '.join(unknown)}: must be {either(DECKS)}")
        if world.size != RANKS:
            raise HpctrainError(
                f"bench plan: requires {RANKS} ranks (mpirun -n {RANKS} hpctrain bench plan ...)"
            )
        stored_rates = None if machine is None else read_machine(machine)
    torch.set_num_threads(1)
    rates = stored_rates or _measure_rates(world)
    names = [name for name in DECKS if name in only or not only]
    rows: list[PlannedStep] = []
    for _, names_of_model in groupby(names, lambda name: name.split("-")[0]):
        rows += _measure_steps(world, list(names_of_model), rates, steps, rounds)
        gc.collect()
    publish(world, result_lines(rows, rates), json_results(rows, rates), output)


def _measure_rates(world: World) -> MachineRates:
    """Measure the rates of this machine as `hpctrain calibrate` does. Collective."""
    options = CalibrateOptions()

    def report(text: str) -> None:
        if world.rank == 0:
            stderr_console().print(text, markup=False)

    decks, max_bytes = measured_decks(()), options.most_bytes()
    return measure_machine(world, "here", decks, options.format_names(), max_bytes, options.seconds, report)


def _measure_steps(
    world: World, names: list[str], rates: MachineRates, steps: int, rounds: int
) -> list[PlannedStep]:
    """Predict and measure the steps of decks, whose engines are built together. Collective."""
    decks = {name: deck_named(name) for name in names}
    variants = [
        replace(hpctrain_variant(name, deck, world, make_mesh(deck, world)), probe=None)
        for name, deck in decks.items()
    ]
    times = time_variants(world, variants, steps, rounds)
    return [_planned_step(row, decks[row.variant.name], rates) for row in times]


def _planned_step(row: VariantTimes, deck: Deck, rates: MachineRates) -> PlannedStep:
    step = plan_step(rates.fill_deck(deck), RANKS, deck.model.vocabulary or 0, rates)
    seconds = row.seconds
    return PlannedStep(
        row.variant.name,
        step.seconds,
        dict(step.seconds_by_cause),
        median(seconds),
        min(seconds),
        max(seconds),
        dict(row.phases),
    )


def regrets(rows: Sequence[PlannedStep]) -> dict[str, float]:
    """Return by which share the deck with the shortest predicted time exceeds the fastest one, by group."""
    groups: dict[str, list[PlannedStep]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return {
        name: min(group, key=lambda row: row.planned).measured / min(row.measured for row in group) - 1
        for name, group in groups.items()
        if len(group) > 1
    }


def json_results(rows: Sequence[PlannedStep], rates: MachineRates) -> dict[str, object]:
    """Return the results for a JSON file."""
    deviations = [abs(row.deviation) for row in rows]
    return {
        "processor": processor_name(),
        "machine": rates.model_dump(exclude_defaults=True),
        "rows": [asdict(row) | {"off": row.deviation} for row in rows],
        "mean_off": fmean(deviations),
        "largest_off": max(deviations),
        "regret": regrets(rows),
    }


def result_lines(rows: Sequence[PlannedStep], rates: MachineRates) -> list[str]:
    """Return the results as a table with headings."""
    lines = [["deck", "predicted", "measured", "lowest", "highest", "deviation"]]
    for row in rows:
        seconds = (row.planned, row.measured, row.lowest, row.highest)
        lines.append([row.name, *map(format_seconds, seconds), f"{100 * row.deviation:+.1f}%"])
    deviations = [abs(row.deviation) for row in rows]
    group_regrets = ", ".join(f"{name} {100 * regret:.1f}%" for name, regret in regrets(rows).items())
    return [
        f"Step time on {RANKS} ranks of {processor_name()}, predicted from the rates of {rates.name}",
        *table(lines),
        f"Mean absolute deviation {100 * fmean(deviations):.1f}%, largest {100 * max(deviations):.1f}%",
        *(
            [f"Extra time of the deck that is predicted to be the fastest: {group_regrets}"]
            if group_regrets
            else []
        ),
    ]
