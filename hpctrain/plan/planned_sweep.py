"""Plans of a deck for all combinations of values of some keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.data.deck_tokens import vocabulary_of
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.mixture import token_file_patterns
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.plan.deck_references import reference_problems
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.memory_demand import MemoryDemand
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.planned_device import assume_planned_device
from hpctrain.plan.sweep_arguments import RANKS, Changes, SweptKey, points
from hpctrain.plan.time.deck_rates import deck_rates
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.step_plan import StepPlan, plan_step
from hpctrain.text import counted

_IGNORED_KEYS: Mapping[str, Any] = {"learning_rate": True, "run": {"title", "dir", "seed", "log_every"}}
"""Sections and keys of a deck that change neither memory nor time."""


@dataclass(frozen=True)
class PlannedPoint:
    """Point of a sweep with its plan, or the reason why it is not supported.

    Attributes:
        changes: Swept keys and their values.
        ranks: Number of ranks.
        memory: Memory plan; None if the point is not supported.
        demand: Memory that a node needs; None if the limit is unknown.
        step: Predicted step; None without the rates of a machine.
        problem: Error of the deck; empty if there is none.
    """

    changes: Changes
    ranks: int
    memory: MemoryPlan | None = None
    demand: MemoryDemand | None = None
    step: StepPlan | None = None
    problem: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of the rank with most memory."""
        assert self.memory is not None
        return self.memory.largest.memory.total

    @property
    def fits(self) -> bool | None:
        """True if the ranks of a node fit into its memory; None if the limit is unknown."""
        return None if self.demand is None else self.demand.fits

    @property
    def limit(self) -> float | None:
        """Bytes that each rank of a node could use; None if the limit is unknown."""
        return None if self.demand is None else self.demand.limit.bytes / self.demand.ranks

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        row: dict[str, object] = {"changes": dict(self.changes), "ranks": self.ranks}
        if self.memory is None:
            return row | {"problem": self.problem}
        if self.step is not None:
            row |= self.step.row()
        return row | {"total_bytes": self.total_bytes, "fits": self.fits}


@dataclass(frozen=True)
class PlannedSweep:
    """Plans of all points of a sweep.

    Attributes:
        title: Title of the run.
        sweeps: Swept keys.
        points: All points, in the order of the values.
        machine: Name of the machine; None without step times.
        weak: True if the batch grows with the number of ranks.
    """

    title: str
    sweeps: tuple[SweptKey, ...]
    points: tuple[PlannedPoint, ...]
    machine: str | None
    weak: bool

    @property
    def planned(self) -> list[PlannedPoint]:
        """Points that the deck supports."""
        return [point for point in self.points if point.memory is not None]

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        swept = {each.key: list(each.values) for each in self.sweeps}
        return {"sweep": swept, "weak": self.weak, "points": [point.row() for point in self.points]}


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep.

    Attributes:
        ranks_per_node: Number of ranks per node; None for that of the deck.
        rates: Rates of a machine, with which step times are predicted; None for those that the deck names.
        weak: True if batch.global_size grows with the ranks. The deck's value is that for `ranks`, or for the
            smallest swept number of ranks.
    """

    ranks_per_node: int | None = None
    rates: MachineRates | None = None
    weak: bool = False


def sweep_deck(
    path: Path,
    ranks: int | None,
    overrides: Sequence[str],
    sweeps: Sequence[SweptKey],
    options: SweepOptions = SweepOptions(),
    progress: Callable[[int], object] = int,
) -> PlannedSweep:
    """Plan every point of a sweep.

    Args:
        path: File of the deck.
        ranks: Number of ranks; None if they are swept.
        overrides: Arguments of `--set`.
        sweeps: Swept keys.
        options: Options of the sweep.
        progress: Function that is called with the number of completed points.

    Raises:
        HpctrainError: No point is supported.
    """
    swept_ranks = next((each for each in sweeps if each.key == RANKS), None)
    if swept_ranks is None and ranks is None:
        raise HpctrainError("the number of ranks is missing: add --ranks N or --sweep ranks=N,N,...")
    if options.weak and swept_ranks is None:
        raise HpctrainError("--weak requires --sweep ranks=N,N,...")
    base = ranks or (min(map(int, swept_ranks.values)) if swept_ranks is not None else 1)
    planner = _Planner(path, tuple(overrides), options, base if options.weak else None)
    planned_points = list[PlannedPoint]()
    for number, changes in enumerate(points(sweeps), 1):
        planned_points.append(planner.point(changes, int(dict(changes).get(RANKS, base))))
        progress(number)
    if all(point.memory is None for point in planned_points):
        raise HpctrainError(_common_problems(planner.problems))
    return PlannedSweep(planner.title, tuple(sweeps), tuple(planned_points), planner.machine, options.weak)


def _common_problems(problems: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the problems that all points have; if there are none, a sentence with the first problem."""
    common = [each for each in problems[0] if all(each in point_problems for point_problems in problems)]
    return common or [f"none of {counted(len(problems), 'point')} is supported; the first: {problems[0][0]}"]


class _Planner:
    """Plans points. Equal decks are planned once.

    Args:
        path: File of the deck.
        overrides: Arguments of `--set`.
        options: Options of the sweep.
        base: Number of ranks for which batch.global_size of the deck is meant, with weak scaling; None
            without.
    """

    def __init__(
        self, path: Path, overrides: tuple[str, ...], options: SweepOptions, base: int | None
    ) -> None:
        self.path, self.overrides, self.options, self.base = path, overrides, options, base
        self.process_bytes = library_bytes()
        self.title = ""
        self.machine: str | None = None
        self.problems: list[tuple[str, ...]] = []
        self.vocabularies: dict[tuple[str, ...], int] = {}
        self.plans: dict[tuple[int, str], tuple[MemoryPlan, MemoryDemand | None, StepPlan | None]] = {}

    def point(self, changes: Changes, ranks: int) -> PlannedPoint:
        """Return the plan of a point.

        Raises:
            InputOutputError: A file cannot be read.
        """
        try:
            deck = self.deck(changes, ranks)
            self.title = deck.run.title
            key = ranks, deck.model_dump_json(exclude=_IGNORED_KEYS)
            if key not in self.plans:
                self.plans[key] = self.plan(deck, ranks)
            return PlannedPoint(changes, ranks, *self.plans[key])
        except InputOutputError:
            raise
        except HpctrainError as error:
            self.problems.append(error.problems)
            return PlannedPoint(changes, ranks, problem=error.problems[0])

    def deck(self, changes: Changes, ranks: int) -> Deck:
        """Return the deck of a point."""
        sets = [*self.overrides, *(f"{key}={value}" for key, value in changes if key != RANKS)]
        if self.base is not None:
            size = read_deck(self.path, sets, None, read_source_keys).batch.global_size
            if size * ranks % self.base:
                sentence = f"times {ranks} / {self.base} ranks must be a whole number"
                raise HpctrainError(f"batch.global_size = {size}: {sentence}")
            sets.append(f"batch.global_size={size * ranks // self.base}")
        check_references = partial(reference_problems, rates=self.options.rates is None)
        deck = assume_planned_device(read_deck(self.path, sets, ranks, read_source_keys, check_references))
        rates = self.rates_of(deck)
        self.machine = None if rates is None else rates.name
        return deck if rates is None else rates.fill_deck(deck)

    def plan(self, deck: Deck, ranks: int) -> tuple[MemoryPlan, MemoryDemand | None, StepPlan | None]:
        """Return the memory plan, the demand of a node, and with the rates of a machine the step."""
        tokens = token_file_patterns(deck)
        vocabulary = deck.model.vocabulary or self.vocabularies.get(tokens)
        if vocabulary is None:
            vocabulary = self.vocabularies[tokens] = vocabulary_of(deck)
        rates = self.rates_of(deck)
        kinds = () if rates is None else rates.memories
        budget = MemoryBudget(ranks, vocabulary, self.options.ranks_per_node, kinds, self.process_bytes)
        memory = budget.plan(deck)
        step = None if rates is None else plan_step(deck, ranks, vocabulary, rates)
        return memory, budget.demand(deck, memory), step

    def rates_of(self, deck: Deck) -> MachineRates | None:
        """Return the rates of the options, or else those that the deck names."""
        return deck_rates(deck) if self.options.rates is None else self.options.rates


def short_reason(problem: str) -> str:
    """Return the reason of an error message, without the place of the error and without the remedy."""
    place, colon, rest = problem.partition(": ")
    reason = rest if colon and re.match(r"--set |.*(\.toml|:[0-9]+)$", place) else problem
    return re.split(r" \(|; ", reason)[0]
