"""Plans of a deck at many points: all combinations of some keys' values, each as if it were planned alone."""

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
from hpctrain.plan.deck_references import named_problems
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.memory_demand import MemoryDemand
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.planned_device import assume_planned_device
from hpctrain.plan.sweep_arguments import RANKS, Changes, Swept, points
from hpctrain.plan.time.deck_rates import deck_rates
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.step_plan import StepPlan, plan_step
from hpctrain.text import counted

_APART: Mapping[str, Any] = {"learning_rate": True, "run": {"title", "dir", "seed", "log_every"}}
"""Of a deck, what changes neither memory nor time."""


@dataclass(frozen=True)
class PlannedPoint:
    """A point of a sweep: its values, how many ranks it has, and its plan, or why the deck cannot have it."""

    changes: Changes
    ranks: int
    memory: MemoryPlan | None = None
    demand: MemoryDemand | None = None
    step: StepPlan | None = None
    problem: str = ""

    @property
    def total_bytes(self) -> int:
        """Of the rank that holds most."""
        assert self.memory is not None
        return self.memory.largest.memory.total

    @property
    def fits(self) -> bool | None:
        """Whether a node has what its ranks need; None where that is not known."""
        return None if self.demand is None else self.demand.fits

    @property
    def limit(self) -> float | None:
        """Bytes that each rank of a node could hold."""
        return None if self.demand is None else self.demand.limit.bytes / self.demand.ranks

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        told: dict[str, object] = {"changes": dict(self.changes), "ranks": self.ranks}
        if self.memory is None:
            return told | {"problem": self.problem}
        if self.step is not None:
            told |= self.step.row()
        return told | {"total_bytes": self.total_bytes, "fits": self.fits}


@dataclass(frozen=True)
class PlannedSweep:
    """All points of a deck, in the order of the values; `weak` where the batch grows with the ranks."""

    title: str
    sweeps: tuple[Swept, ...]
    points: tuple[PlannedPoint, ...]
    machine: str | None
    weak: bool

    @property
    def planned(self) -> list[PlannedPoint]:
        """Those that the deck can have."""
        return [point for point in self.points if point.memory is not None]

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        swept = {each.key: list(each.values) for each in self.sweeps}
        return {"sweep": swept, "weak": self.weak, "points": [point.row() for point in self.points]}


def sweep_deck(
    path: Path,
    ranks: int | None,
    overrides: Sequence[str],
    sweeps: Sequence[Swept],
    ranks_per_node: int | None = None,
    rates: MachineRates | None = None,
    weak: bool = False,
    reached: Callable[[int], object] = int,
) -> PlannedSweep:
    """Plan every point of a deck, on so many ranks where these are not swept; of a machine's rates its steps.

    With `weak`, batch.global_size grows with the ranks: it is the deck's on `ranks`, or on the fewest swept.
    `reached` is told how many points are done. HpctrainError where no point can be had.
    """
    of_ranks = next((each for each in sweeps if each.key == RANKS), None)
    if of_ranks is None and ranks is None:
        raise HpctrainError("the number of ranks is missing: add --ranks N or --sweep ranks=N,N,...")
    if weak and of_ranks is None:
        raise HpctrainError("--weak requires --sweep ranks=N,N,...")
    base = ranks or (min(map(int, of_ranks.values)) if of_ranks is not None else 1)
    planner = _Planner(path, tuple(overrides), ranks_per_node, rates, base if weak else None)
    found = list[PlannedPoint]()
    for number, changes in enumerate(points(sweeps), 1):
        found.append(planner.point(changes, int(dict(changes).get(RANKS, base))))
        reached(number)
    if all(point.memory is None for point in found):
        raise HpctrainError(_why_none(planner.problems))
    return PlannedSweep(planner.title, tuple(sweeps), tuple(found), planner.machine, weak)


def _why_none(problems: Sequence[tuple[str, ...]]) -> list[str]:
    """Of the problems of all points those that each of them has, or else the first one."""
    of_deck = [each for each in problems[0] if all(each in others for others in problems)]
    return of_deck or [f"none of {counted(len(problems), 'point')} is supported; the first: {problems[0][0]}"]


class _Planner:
    """Plans points; what two of them have in common is planned once. With `base` the deck's batch is that of
    so many ranks, and grows with them.
    """

    def __init__(
        self,
        path: Path,
        overrides: tuple[str, ...],
        ranks_per_node: int | None,
        rates: MachineRates | None,
        base: int | None,
    ) -> None:
        self.path, self.overrides, self.ranks_per_node = path, overrides, ranks_per_node
        self.rates, self.base = rates, base
        self.libraries = library_bytes()
        self.title = ""
        self.machine: str | None = None
        self.problems: list[tuple[str, ...]] = []
        self.vocabularies: dict[tuple[str, ...], int] = {}
        self.plans: dict[tuple[int, str], tuple[MemoryPlan, MemoryDemand | None, StepPlan | None]] = {}

    def point(self, changes: Changes, ranks: int) -> PlannedPoint:
        """The plan of a point; InputOutputError where files cannot be read."""
        try:
            deck = self.deck(changes, ranks)
            self.title = deck.run.title
            key = ranks, deck.model_dump_json(exclude=_APART)
            if key not in self.plans:
                self.plans[key] = self.plan(deck, ranks)
            return PlannedPoint(changes, ranks, *self.plans[key])
        except InputOutputError:
            raise
        except HpctrainError as error:
            self.problems.append(error.problems)
            return PlannedPoint(changes, ranks, problem=error.problems[0])

    def deck(self, changes: Changes, ranks: int) -> Deck:
        """The deck of a point."""
        sets = [*self.overrides, *(f"{key}={value}" for key, value in changes if key != RANKS)]
        if self.base is not None:
            size = read_deck(self.path, sets, None, read_source_keys).batch.global_size
            if size * ranks % self.base:
                sentence = f"times {ranks} / {self.base} ranks must be a whole number"
                raise HpctrainError(f"batch.global_size = {size}: {sentence}")
            sets.append(f"batch.global_size={size * ranks // self.base}")
        named = partial(named_problems, rates=self.rates is None)
        deck = assume_planned_device(read_deck(self.path, sets, ranks, read_source_keys, named))
        rates = self.rates_of(deck)
        self.machine = None if rates is None else rates.name
        return deck if rates is None else rates.of_deck(deck)

    def plan(self, deck: Deck, ranks: int) -> tuple[MemoryPlan, MemoryDemand | None, StepPlan | None]:
        """Memory, whether it fits, and on a machine the step."""
        tokens = token_file_patterns(deck)
        vocabulary = deck.model.vocabulary or self.vocabularies.get(tokens)
        if vocabulary is None:
            vocabulary = self.vocabularies[tokens] = vocabulary_of(deck)
        rates = self.rates_of(deck)
        kinds = () if rates is None else rates.memories
        budget = MemoryBudget(ranks, vocabulary, self.ranks_per_node, kinds, self.libraries)
        memory = budget.plan(deck)
        step = None if rates is None else plan_step(deck, ranks, vocabulary, rates)
        return memory, budget.demand(deck, memory), step

    def rates_of(self, deck: Deck) -> MachineRates | None:
        """Those that were asked for, or that the deck names."""
        return deck_rates(deck) if self.rates is None else self.rates


def short_reason(problem: str) -> str:
    """What a problem is, without where it was asked for, such as `--set layout.tensor=3: `, and what else
    would be right.
    """
    place, found, rest = problem.partition(": ")
    reason = rest if found and re.match(r"--set |.*(\.toml|:[0-9]+)$", place) else problem
    return re.split(r" \(|; ", reason)[0]
