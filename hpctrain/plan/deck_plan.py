"""From a deck's file to its plan, whether it fits, and the plans of what could be changed in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.data.deck_tokens import vocabulary_of
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import EXIT_DONE, EXIT_USER, HpctrainError
from hpctrain.model.construction import architecture_of
from hpctrain.plan.deck_references import named_problems
from hpctrain.plan.form_alternatives import other_forms
from hpctrain.plan.form_cost import form_seconds
from hpctrain.plan.forms import FormPlan, LinkWish, OtherForm, exact_form, plan_form
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.memory_demand import MemoryDemand
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.pipeline_plan import PipelinePlan, plan_pipeline
from hpctrain.plan.planned_device import assume_planned_device
from hpctrain.plan.savings import MemorySaving, find_savings
from hpctrain.plan.search.candidate import Candidate
from hpctrain.plan.search.deck_search import chosen_layout, on_nodes_of, with_choice
from hpctrain.plan.time.advice import Advice, advise
from hpctrain.plan.time.deck_rates import deck_rates
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.step_plan import StepPlan, plan_step
from hpctrain.plan.traffic_plan import TrafficPlan, plan_traffic


@dataclass(frozen=True)
class DeckPlan:
    """The plan of a deck on some ranks, what a node needs against what it has (None where that is not known),
    what would save most, the most first, what ranks send each other, of several stages their pipeline; on a
    machine whose rates are known a step, what is sent to any other rank, and what limits it and would help.
    `title` is what the model is called.
    """

    deck: Deck
    ranks: int
    memory: MemoryPlan
    demand: MemoryDemand | None
    savings: tuple[MemorySaving, ...]
    moved: FormPlan
    others: tuple[OtherForm, ...] = ()
    pipeline: PipelinePlan | None = None
    machine: MachineRates | None = None
    step: StepPlan | None = None
    sent: TrafficPlan | None = None
    advice: Advice | None = None
    title: str = ""

    @property
    def exit_code(self) -> int:
        """Exit code of the plan: 2 if a run would be refused for lack of memory, otherwise 0."""
        return EXIT_DONE if self.demand is None or self.demand.fits else EXIT_USER

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        demand = self.demand
        planned = self.memory.row() | {"communication": self.moved.row()}
        if self.pipeline is not None:
            planned |= {"pipeline": self.pipeline.row()}
        if self.step is not None:
            planned |= self.step.row() | {"total_bytes": self.memory.largest.memory.total}
        if self.sent is not None:
            planned |= {"bytes_by_axis": self.sent.most.sent()}
            planned |= {"bytes_between_nodes_by_axis": self.moved.own.most.sent()}
        if self.advice is not None:
            planned |= {"advice": self.advice.row()}
        if self.others:
            planned |= {"forms": [each.row() for each in self.others]}
        if demand is None:
            return planned
        node = {"ranks": demand.ranks, "needed_bytes": demand.needed, "memory_bytes": demand.limit.bytes}
        return planned | {"node": node | {"fits": demand.fits}}


def plan_deck(
    path: Path,
    ranks: int,
    overrides: Sequence[str] = (),
    ranks_per_node: int | None = None,
    advised: bool = True,
    wish: LinkWish | None = None,
    forms: bool = False,
    rates: MachineRates | None = None,
) -> DeckPlan:
    """Plan the deck in a file, and with `advised` what changes of it would save.

    With `forms` every other form of communication is planned too. What is sent is planned over the link of
    the `wish`, or the one that the deck emulates, too. The token file is opened only where the deck leaves
    its vocabulary to it. A node has `ranks_per_node` ranks, else those that the deck emulates, else those of
    its [machine], else all. On a machine whose `rates` are known, or named by the deck, a step's seconds are
    planned too, and its nodes have what the deck does not say of them.

    Raises HpctrainError as a run on so many ranks would.
    """
    named = partial(named_problems, rates=rates is None)

    def read(*changes: str) -> Deck:
        deck = assume_planned_device(read_deck(path, [*overrides, *changes], ranks, read_source_keys, named))
        if deck.layout.auto:
            if not chosen:
                chosen.append(chosen_layout(deck, ranks, ranks_per_node, rates)[0])
            deck = with_choice(deck, chosen[0].changes, ranks)
        machine = deck_rates(deck) if rates is None else rates
        return deck if machine is None else machine.of_deck(on_nodes_of(deck, ranks_per_node))

    chosen = list[Candidate]()
    deck = read()
    rates = deck_rates(deck) if rates is None else rates
    per_node = ranks_per_node or deck.communication.ranks_per_node
    vocabulary = vocabulary_of(deck)
    budget = MemoryBudget(ranks, vocabulary, ranks_per_node, () if rates is None else rates.memories)
    title = architecture_of(deck, vocabulary).title  # and what building a module loads is a library
    budget.process_bytes(deck)
    memory = budget.plan(deck)
    savings: list[MemorySaving] = []
    if advised:
        savings = find_savings(deck, memory, read, budget.plan)
    machine = deck.machine
    apart = min(ranks, per_node or machine.ranks_per_node or machine.gpus_per_node or 1)
    if wish is None and deck.communication.link is not None:
        wish = LinkWish(deck.communication.link)

    def cost(form: Deck) -> float | None:
        return form_seconds(form, exact_form(form), ranks, vocabulary, apart)

    moved, others = plan_form(deck, ranks, vocabulary, apart, wish, cost), list[OtherForm]()
    for name, changes in other_forms(deck, ranks) if forms else ():
        try:
            other = read(*changes)
        except HpctrainError:
            continue  # what this deck cannot have is no advice
        others.append(OtherForm(name, changes, plan_form(other, ranks, vocabulary, apart, wish, cost, moved)))
    demand = budget.demand(deck, memory)
    pipeline = plan_pipeline(deck, ranks, vocabulary)
    planned_deck = budget.with_kernels(deck), ranks, memory, demand, tuple(savings), moved, tuple(others)
    if rates is None:
        return DeckPlan(*planned_deck, pipeline, title=title)
    step, sent = plan_step(deck, ranks, vocabulary, rates), plan_traffic(deck, ranks, vocabulary)

    def timed(deck: Deck, rates: MachineRates) -> StepPlan:
        return plan_step(deck, ranks, vocabulary, rates)

    def held(deck: Deck) -> tuple[int, bool | None]:
        memory = budget.plan(deck)
        demand = budget.demand(deck, memory)
        return memory.largest.memory.total, None if demand is None else demand.fits

    advice = advise(deck, ranks, step, rates, read, timed, held, memory.largest.memory.total)
    return DeckPlan(*planned_deck, pipeline, rates, step, sent, advice, title)
