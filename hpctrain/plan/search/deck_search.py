"""Search for the best layouts of the deck in a file, and the deck with the best one."""

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
"""Factors by which the number of ranks is increased if no layout fits."""

MOST_TRADED = 12
"""Largest number of layouts that need less memory than the fastest one."""

_LESS_MEMORY = 0.9
"""Factor of the node memory of a layout below which the next one of `trade_offs` must be."""
_GC_THRESHOLD = 100_000
"""Number of new objects after which Python searches them for reference cycles during a search."""


@dataclass(frozen=True)
class DeckSearch:
    """Best layouts of a deck.

    Attributes:
        path: File of the deck.
        deck: The deck as it was read.
        ranks: Number of ranks.
        machine: Rates of the machine.
        result: Result of the search.
    """

    path: Path
    deck: Deck
    ranks: int
    machine: MachineRates
    result: SearchResult

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        rejected, missed = self.result.rejected, self.result.missed
        return {
            "ranks": self.ranks,
            "machine": self.machine.name,
            "best": [each.row() for each in self.result.best],
            "fell": dict(rejected.counts)
            | {"impossible": dict(rejected.impossible), "slower": self.result.slower},
            "reasons": dict(rejected.reasons),
            "missed": None if missed is None else missed.candidate.row(),
        }

    @property
    def text(self) -> str:
        """Text of the resolved deck with the best layout. It reduces gradients in the planned format."""
        best = self.result.best[0]
        summed = {"precision.gradients": best.deck.precision.gradients}
        chosen = with_values(self.deck, best.changes | summed | {"layout.auto": False})
        return deck_text(chosen, self.ranks)


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search.

    Attributes:
        ranks_per_node: Number of ranks per node; None for that of the deck or the machine.
        rates: Rates of a machine; None for those that the deck names.
        every_schedule: True to search all schedules.
    """

    ranks_per_node: int | None = None
    rates: MachineRates | None = None
    every_schedule: bool = False


def search_deck(
    path: Path,
    ranks: int,
    overrides: Sequence[str],
    options: SearchOptions,
    progress: Progress | None = None,
) -> DeckSearch:
    """Return the best layouts of the deck in a file.

    Args:
        path: File of the deck.
        ranks: Number of ranks.
        overrides: Arguments of `--set`.
        options: Options of the search.
        progress: Function that is called with the number of visited nodes of the tree.

    Raises:
        HpctrainError: No layout fits, or the deck is wrong.
    """
    deck = assume_planned_device(
        read_deck(path, overrides, None, read_source_keys, reference_problems, for_search=True)
    )
    machine = options.rates or deck_rates(deck)
    if machine is None:
        raise HpctrainError(f"{path}: {NO_RATES}")
    if options.every_schedule and SearchSpace(deck, ranks).is_set("layout.schedule"):
        sentence = "is set by the deck (unset it with --set layout.schedule=)"
        raise HpctrainError([f"--all-schedules: layout.schedule = {deck.layout.schedule} {sentence}"])
    result = _search(deck, ranks, options, machine, BEST, progress)
    return DeckSearch(path, deck, ranks, machine, result)


NO_RATES = (
    "a search requires the rates of a machine: add --machine NAME|FILE, or set machine.rates in the "
    "deck; `hpctrain calibrate` measures them"
)


def chosen_layout(
    deck: Deck, ranks: int, ranks_per_node: int | None = None, rates: MachineRates | None = None
) -> tuple[Candidate, MachineRates]:
    """Return the fastest layout of a deck with layout.auto, and the machine by whose rates it was found.

    Args:
        deck: The deck.
        ranks: Number of ranks.
        ranks_per_node: Number of ranks per node; None for that of the deck or the machine.
        rates: Rates of a machine; None for those that the deck names.

    Raises:
        HpctrainError: No layout fits, or the rates are missing.
    """
    machine = rates or deck_rates(deck)
    if machine is None:
        sentence = (
            "requires machine.rates (a file of `hpctrain calibrate`, or the name of a built-in machine)"
        )
        raise HpctrainError(deck.problem("layout.auto", sentence))
    return _search(deck, ranks, SearchOptions(ranks_per_node), machine, 1).best[0], machine


def with_choice(deck: Deck, changes: Values, ranks: int) -> Deck:
    """Return the deck with a layout that was chosen for it. Keys that the deck sets are not changed.

    Raises:
        HpctrainError: The layout does not fit the deck's own keys.
    """
    free = SearchSpace(deck, ranks).free
    kept = {key: value for key, value in changes.items() if key in free}
    chosen = with_values(deck, kept | {"layout.auto": False})
    problems = [*check_deck(chosen, ranks), *world_problems(chosen, ranks)]
    if problems:
        raise HpctrainError([chosen.problem(each.key, each.sentence) for each in problems])
    return with_values(chosen, {"layout.chosen": tuple(kept)})


def laid_out(deck: Deck, ranks: int, ranks_per_node: int | None = None) -> Deck:
    """Return the deck, with its layout chosen if the deck has layout.auto."""
    if not deck.layout.auto:
        return deck
    candidate, _ = chosen_layout(deck, ranks, ranks_per_node)
    return with_choice(deck, candidate.changes, ranks)


def trade_offs(searched: DeckSearch, options: SearchOptions) -> list[Candidate]:
    """Return the fastest layouts that need less and less memory.

    Each needs less than 90% of the node memory of the one before.
    """
    result, deck, best = list[Candidate](), searched.deck, searched.result.best[0]
    while len(result) < MOST_TRADED:
        less = int(_LESS_MEMORY * best.node_bytes)
        deck = deck.with_keys(machine={"memory": less, "gpu_memory": less})
        try:
            found_less = _search(deck, searched.ranks, options, searched.machine, 1, explain=False)
        except HpctrainError:
            break
        best = found_less.best[0]
        result.append(best)
    return result


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Let Python search for reference cycles rarely, since a search makes many objects with few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_rare_garbage_collection()
def _search(
    deck: Deck,
    ranks: int,
    options: SearchOptions,
    machine: MachineRates,
    best: int,
    progress: Progress | None = None,
    explain: bool = True,
) -> SearchResult:
    """Search for the best layouts of a deck.

    Raises:
        HpctrainError: No layout fits. With `explain`, the error has the reason and a remedy.
    """
    if deck.communication.server is not None or deck.layout.replicas > 1:
        has_servers = deck.communication.server is not None
        key = "communication.server.mode" if has_servers else "layout.local_steps.replicas"
        raise HpctrainError(
            deck.problem(key, "is unsupported in a search: all ranks must train one model together")
        )
    deck = with_values(deck, {"layout.auto": False})
    deck = machine.fill_deck(on_nodes_of(deck, options.ranks_per_node))
    vocabulary = vocabulary_of(deck)
    budget = MemoryBudget(ranks, vocabulary, options.ranks_per_node, machine.memories)
    budget.process_bytes(deck)  # measured before the search allocates memory
    # Schedules with the least memory take long to generate, so they are tried only if no other layout fits.
    for schedules in (EVERY,) if options.every_schedule else (TRIED, EVERY):
        result = search(deck, ranks, machine, budget, best, progress, schedules)
        if result.best:
            return result
    if not explain:
        raise HpctrainError("no layout fits")
    raise HpctrainError(f"{deck.sources.name}: {_why_none(deck, ranks, machine, budget, result)}")


def _why_none(
    deck: Deck, ranks: int, machine: MachineRates, budget: MemoryBudget, result: SearchResult
) -> str:
    """Return why no layout fits, and on which number of ranks one would."""
    least = least_memory_layout(deck, ranks, machine, budget)
    if least is None:
        rank_counts = [other for other in _neighbours(ranks) if _has_layout(deck, other, machine, budget)]
        would = f" ({either(rank_counts)} ranks would fit)" if rank_counts else ""
        choices, reasons = SearchSpace(deck, ranks), result.rejected.reasons
        keys = sorted(reasons, key=lambda key: not (choices.is_set(key) and key in SEARCH_KEYS))
        first = reasons[keys[0]] if keys else "the keys of the deck require another number of ranks"
        return f"no layout fits {counted(ranks, 'rank')}{would}: {first}"
    more = next((ranks * times for times in MORE if _fits(deck, ranks * times, machine, budget)), None)
    lacking = least.demand.needed - least.demand.limit.bytes
    return nothing_fits(
        changed(deck, least.candidate.changes), str(least.demand), lacking, [] if more is None else [more]
    )


def on_nodes_of(deck: Deck, ranks_per_node: int | None) -> Deck:
    """Return the deck with a number of ranks per node; unchanged for None."""
    return deck if ranks_per_node is None else deck.with_keys(machine={"ranks_per_node": ranks_per_node})


def _on(budget: MemoryBudget, ranks: int) -> MemoryBudget:
    return replace(budget, ranks=ranks)


def _fits(deck: Deck, ranks: int, machine: MachineRates, budget: MemoryBudget) -> bool:
    with suppress(HpctrainError):  # for example, the rates of links between nodes are missing
        return some_layout_fits(deck, ranks, machine, _on(budget, ranks))
    return False


def _has_layout(deck: Deck, ranks: int, machine: MachineRates, budget: MemoryBudget) -> bool:
    with suppress(HpctrainError):
        return bool(search(deck, ranks, machine, _on(budget, ranks), 1).best)
    return False


def _neighbours(ranks: int) -> list[int]:
    """Return the powers of two next to a number of ranks."""
    above = 1 << ranks.bit_length()
    return [above // 2, above] if above // 2 != ranks else [above]
