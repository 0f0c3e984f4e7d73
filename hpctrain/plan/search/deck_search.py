"""From a deck's file to its best layouts, and the deck that has the best one."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.data.deck_tokens import vocabulary_of
from hpctrain.deck.check import check_deck, world_problems
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.search_keys import SEARCH_KEYS
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError
from hpctrain.plan.deck_references import reference_problems
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.planned_device import assume_planned_device
from hpctrain.plan.search.candidate import Candidate
from hpctrain.plan.search.layout_sentences import changed, nothing_fits
from hpctrain.plan.search.search import (
    BEST,
    Progress,
    SearchResult,
    least_memory_layout,
    search,
    some_layout_fits,
)
from hpctrain.plan.search.search_space import EVERY, TRIED, SearchSpace, Values, with_values
from hpctrain.plan.time.deck_rates import deck_rates
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.text import counted, either

MORE = (2, 4)
"""How many times as many ranks are tried where nothing fits."""

MOST_TRADED = 12
"""Layouts of less memory that are looked for."""

_LESS = 0.9
_COLLECTED = 100_000  # objects, after which those that are new are looked through


@dataclass(frozen=True)
class DeckSearch:
    """The best layouts of the deck in a file on so many ranks of a machine."""

    path: Path
    deck: Deck
    ranks: int
    machine: MachineRates
    found: SearchResult

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        fell, missed = self.found.fell, self.found.missed
        return {
            "ranks": self.ranks,
            "machine": self.machine.name,
            "best": [each.row() for each in self.found.best],
            "fell": dict(fell.counts) | {"impossible": dict(fell.impossible), "slower": self.found.slower},
            "reasons": dict(fell.reasons),
            "missed": None if missed is None else missed.candidate.row(),
        }

    @property
    def text(self) -> str:
        """The resolved deck with the best layout, as a file that runs on so many ranks; gradients are summed
        as they were planned to be.
        """
        best = self.found.best[0]
        summed = {"precision.gradients": best.deck.precision.gradients}
        chosen = with_values(self.deck, best.changes | summed | {"layout.auto": False})
        return deck_text(chosen, self.ranks)


@dataclass(frozen=True)
class SearchOptions:
    """How a deck is searched: on nodes of so many ranks, by a machine's rates (None: as it says itself), and
    whether over every schedule.
    """

    ranks_per_node: int | None = None
    rates: MachineRates | None = None
    every_schedule: bool = False


def search_deck(
    path: Path,
    ranks: int,
    overrides: Sequence[str],
    wished: SearchOptions,
    progress: Progress | None = None,
) -> DeckSearch:
    """The best layouts of the deck in a file. HpctrainError where it has none on so many ranks."""
    deck = assume_planned_device(
        read_deck(path, overrides, None, read_source_keys, reference_problems, for_search=True)
    )
    machine = wished.rates or deck_rates(deck)
    if machine is None:
        raise HpctrainError(f"{path}: {NO_RATES}")
    if wished.every_schedule and SearchSpace(deck, ranks).given("layout.schedule"):
        sentence = "is set by the deck (unset it with --set layout.schedule=)"
        raise HpctrainError([f"--all-schedules: layout.schedule = {deck.layout.schedule} {sentence}"])
    found = _search(deck, ranks, wished, machine, BEST, progress)
    return DeckSearch(path, deck, ranks, machine, found)


NO_RATES = (
    "a search requires the rates of a machine: add --machine NAME|FILE, or set machine.rates in the "
    "deck; `hpctrain calibrate` measures them"
)


def chosen_layout(
    deck: Deck, ranks: int, ranks_per_node: int | None = None, rates: MachineRates | None = None
) -> tuple[Candidate, MachineRates]:
    """The quickest layout that fits, of a deck that leaves it open (layout.auto), by these rates or its own.
    HpctrainError as above.
    """
    machine = rates or deck_rates(deck)
    if machine is None:
        sentence = (
            "requires machine.rates (a file of `hpctrain calibrate`, or the name of a built-in machine)"
        )
        raise HpctrainError(deck.problem("layout.auto", sentence))
    return _search(deck, ranks, SearchOptions(ranks_per_node), machine, 1).best[0], machine


def with_choice(deck: Deck, changes: Values, ranks: int) -> Deck:
    """The deck with a layout that was chosen for it; keys that it gives stay. HpctrainError where the two do
    not go together.
    """
    free = SearchSpace(deck, ranks).free
    kept = {key: value for key, value in changes.items() if key in free}
    chosen = with_values(deck, kept | {"layout.auto": False})
    problems = [*check_deck(chosen, ranks), *world_problems(chosen, ranks)]
    if problems:
        raise HpctrainError([chosen.problem(each.key, each.sentence) for each in problems])
    return with_values(chosen, {"layout.chosen": tuple(kept)})


def laid_out(deck: Deck, ranks: int, ranks_per_node: int | None = None) -> Deck:
    """The deck with its layout chosen, where it leaves that open."""
    if not deck.layout.auto:
        return deck
    candidate, _ = chosen_layout(deck, ranks, ranks_per_node)
    return with_choice(deck, candidate.changes, ranks)


def trade_offs(searched: DeckSearch, wished: SearchOptions) -> list[Candidate]:
    """Of always less memory the quickest layout: each node holds less than nine tenths of the one before."""
    found, deck, best = list[Candidate](), searched.deck, searched.found.best[0]
    while len(found) < MOST_TRADED:
        less = int(_LESS * best.node_bytes)
        deck = deck.with_keys(machine={"memory": less, "gpu_memory": less})
        try:
            found_less = _search(deck, searched.ranks, wished, searched.machine, 1, explain=False)
        except HpctrainError:
            break
        best = found_less.best[0]
        found.append(best)
    return found


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Have Python look for circles of objects seldom: a search makes many objects, and few of these."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECTED, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_seldom_collected()
def _search(
    deck: Deck,
    ranks: int,
    wished: SearchOptions,
    machine: MachineRates,
    best: int,
    progress: Progress | None = None,
    explain: bool = True,
) -> SearchResult:
    """HpctrainError where there is no layout, and, to `explain`, why."""
    if deck.communication.server is not None or deck.layout.replicas > 1:
        is_served = deck.communication.server is not None
        key = "communication.server.mode" if is_served else "layout.local_steps.replicas"
        raise HpctrainError(
            deck.problem(key, "is unsupported in a search: all ranks must train one model together")
        )
    deck = with_values(deck, {"layout.auto": False})
    deck = machine.of_deck(on_nodes_of(deck, wished.ranks_per_node))
    vocabulary = vocabulary_of(deck)
    budget = MemoryBudget(ranks, vocabulary, wished.ranks_per_node, machine.memories)
    budget.process_bytes(deck)  # measured while nothing large is there
    # Those schedules that hold least are tried too where no other has demand.
    for schedules in (EVERY,) if wished.every_schedule else (TRIED, EVERY):
        found = search(deck, ranks, machine, budget, best, progress, schedules)
        if found.best:
            return found
    if not explain:
        raise HpctrainError("no layout fits")
    raise HpctrainError(f"{deck.sources.name}: {_why_none(deck, ranks, machine, budget, found)}")


def _why_none(
    deck: Deck, ranks: int, machine: MachineRates, budget: MemoryBudget, found: SearchResult
) -> str:
    least = least_memory_layout(deck, ranks, machine, budget)
    if least is None:
        near = [other for other in _neighbours(ranks) if _can_be(deck, other, machine, budget)]
        would = f" ({either(near)} ranks would fit)" if near else ""
        choices, reasons = SearchSpace(deck, ranks), found.fell.reasons
        told = sorted(reasons, key=lambda key: not (choices.given(key) and key in SEARCH_KEYS))
        first = reasons[told[0]] if told else "the keys of the deck require another number of ranks"
        return f"no layout fits {counted(ranks, 'rank')}{would}: {first}"
    more = next((ranks * times for times in MORE if _fits(deck, ranks * times, machine, budget)), None)
    lacking = least.demand.needed - least.demand.limit.bytes
    return nothing_fits(
        changed(deck, least.candidate.changes), str(least.demand), lacking, [] if more is None else [more]
    )


def on_nodes_of(deck: Deck, ranks_per_node: int | None) -> Deck:
    """The deck on nodes of so many ranks, where that is said."""
    return deck if ranks_per_node is None else deck.with_keys(machine={"ranks_per_node": ranks_per_node})


def _on(budget: MemoryBudget, ranks: int) -> MemoryBudget:
    return replace(budget, ranks=ranks)


def _fits(deck: Deck, ranks: int, machine: MachineRates, budget: MemoryBudget) -> bool:
    with suppress(HpctrainError):  # as where links between nodes were not measured
        return some_layout_fits(deck, ranks, machine, _on(budget, ranks))
    return False


def _can_be(deck: Deck, ranks: int, machine: MachineRates, budget: MemoryBudget) -> bool:
    with suppress(HpctrainError):
        return bool(search(deck, ranks, machine, _on(budget, ranks), 1).best)
    return False


def _neighbours(ranks: int) -> list[int]:
    """The powers of two beside a number of ranks."""
    above = 1 << ranks.bit_length()
    return [above // 2, above] if above // 2 != ranks else [above]
