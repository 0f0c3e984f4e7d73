"""Complete plan of a deck: memory, traffic and time, and changes that would improve them."""

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
from hpctrain.plan.deck_references import reference_problems
from hpctrain.plan.form_alternatives import other_forms
from hpctrain.plan.form_cost import form_seconds
from hpctrain.plan.forms import FormPlan, FormPlanner, OtherForm, PlannedLink, exact_form
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.memory_demand import MemoryDemand
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.pipeline_plan import PipelinePlan, plan_pipeline
from hpctrain.plan.planned_device import assume_planned_device
from hpctrain.plan.savings import MemorySaving, find_savings
from hpctrain.plan.search.candidate import Candidate
from hpctrain.plan.search.deck_search import chosen_layout, on_nodes_of, with_choice
from hpctrain.plan.time.advice import Advice, Planners, advise
from hpctrain.plan.time.deck_rates import deck_rates
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.step_plan import StepPlan, plan_step
from hpctrain.plan.traffic_plan import TrafficPlan, plan_traffic


@dataclass(frozen=True)
class DeckPlan:
    """Plan of a deck on a number of ranks.

    Attributes:
        deck: The deck, with measured choices of kernels.
        ranks: Number of ranks.
        memory: Predicted memory of all ranks.
        demand: Memory that a node needs, with its limit; None if the limit is unknown.
        savings: Changes of the deck that save memory, the largest saving first.
        traffic: Bytes that ranks send with the deck's form of communication, and with exact sums.
        other_forms: Plans of other forms of communication, if they were requested.
        pipeline: Split and bubble of the pipeline; None with one stage.
        machine: Rates of the machine; None if they are unknown. Then `step`, `total_traffic` and `advice` are
            None.
        step: Predicted step time.
        total_traffic: Bytes that ranks send, with those to ranks of the same node.
        advice: Limits of the step time, and the change that would reduce it most.
        title: Description of the model.
    """

    deck: Deck
    ranks: int
    memory: MemoryPlan
    demand: MemoryDemand | None
    savings: tuple[MemorySaving, ...]
    traffic: FormPlan
    other_forms: tuple[OtherForm, ...] = ()
    pipeline: PipelinePlan | None = None
    machine: MachineRates | None = None
    step: StepPlan | None = None
    total_traffic: TrafficPlan | None = None
    advice: Advice | None = None
    title: str = ""

    @property
    def exit_code(self) -> int:
        """Exit code of the plan: 2 if a run would be refused for lack of memory, otherwise 0."""
        return EXIT_DONE if self.demand is None or self.demand.fits else EXIT_USER

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        demand = self.demand
        planned = self.memory.row() | {"communication": self.traffic.row()}
        if self.pipeline is not None:
            planned |= {"pipeline": self.pipeline.row()}
        if self.step is not None:
            planned |= self.step.row() | {"total_bytes": self.memory.largest.memory.total}
        if self.total_traffic is not None:
            planned |= {"bytes_by_axis": self.total_traffic.largest.sent()}
            planned |= {"bytes_between_nodes_by_axis": self.traffic.form_traffic.largest.sent()}
        if self.advice is not None:
            planned |= {"advice": self.advice.row()}
        if self.other_forms:
            planned |= {"forms": [each.row() for each in self.other_forms]}
        if demand is None:
            return planned
        node = {"ranks": demand.ranks, "needed_bytes": demand.needed, "memory_bytes": demand.limit.bytes}
        return planned | {"node": node | {"fits": demand.fits}}


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan.

    Attributes:
        ranks_per_node: Number of ranks per node. By default it is that of the deck, or else all ranks.
        with_savings: True to look for changes of the deck that save memory.
        with_forms: True to plan all other forms of communication, too.
        link: Link over which traffic is planned. By default it is the link that the deck emulates.
        rates: Rates of a machine, with which the step time is predicted. By default they are those that the
            deck names. The machine's nodes have what the deck does not say about them.
    """

    ranks_per_node: int | None = None
    with_savings: bool = True
    with_forms: bool = False
    link: PlannedLink | None = None
    rates: MachineRates | None = None


def plan_deck(
    path: Path,
    ranks: int,
    overrides: Sequence[str] = (),
    options: PlanOptions = PlanOptions(),
) -> DeckPlan:
    """Plan the deck in a file.

    The token file is opened only if the deck takes its vocabulary from it.

    Args:
        path: File of the deck.
        ranks: Number of ranks.
        overrides: Arguments of `--set`.
        options: Options of the plan.

    Raises:
        HpctrainError: A run on this number of ranks would fail with this error.
    """
    ranks_per_node, rates = options.ranks_per_node, options.rates
    check_references = partial(reference_problems, rates=rates is None)

    def read(*changes: str) -> Deck:
        deck = assume_planned_device(
            read_deck(path, [*overrides, *changes], ranks, read_source_keys, check_references)
        )
        if deck.layout.auto:
            if not chosen:
                chosen.append(chosen_layout(deck, ranks, ranks_per_node, rates)[0])
            deck = with_choice(deck, chosen[0].changes, ranks)
        machine = deck_rates(deck) if rates is None else rates
        return deck if machine is None else machine.fill_deck(on_nodes_of(deck, ranks_per_node))

    chosen = list[Candidate]()
    deck = read()
    rates = deck_rates(deck) if rates is None else rates
    per_node = ranks_per_node or deck.communication.ranks_per_node
    vocabulary = vocabulary_of(deck)
    budget = MemoryBudget(ranks, vocabulary, ranks_per_node, () if rates is None else rates.memories)
    title = architecture_of(deck, vocabulary).title  # loads libraries that the next line measures
    budget.process_bytes(deck)
    memory = budget.plan(deck)
    savings: list[MemorySaving] = []
    if options.with_savings:
        savings = find_savings(deck, memory, read, budget.plan)
    ranks_on_node = min(ranks, per_node or deck.machine.known_ranks_per_node or 1)
    link = options.link
    if link is None and deck.communication.link is not None:
        link = PlannedLink(deck.communication.link)

    def cost(form: Deck) -> float | None:
        return form_seconds(form, exact_form(form), ranks, vocabulary, ranks_on_node)

    form_planner = FormPlanner(ranks, vocabulary, ranks_on_node, link, cost)
    traffic, alternatives = form_planner.plan(deck), list[OtherForm]()
    for name, changes in other_forms(deck, ranks) if options.with_forms else ():
        try:
            other = read(*changes)
        except HpctrainError:
            continue  # the deck does not support this form
        alternatives.append(OtherForm(name, changes, form_planner.plan(other, traffic)))
    demand = budget.demand(deck, memory)
    pipeline = plan_pipeline(deck, ranks, vocabulary)
    planned_deck = (
        budget.with_kernels(deck),
        ranks,
        memory,
        demand,
        tuple(savings),
        traffic,
        tuple(alternatives),
    )
    if rates is None:
        return DeckPlan(*planned_deck, pipeline, title=title)
    step, total_traffic = plan_step(deck, ranks, vocabulary, rates), plan_traffic(deck, ranks, vocabulary)

    def predict_step(deck: Deck, rates: MachineRates) -> StepPlan:
        return plan_step(deck, ranks, vocabulary, rates)

    def predict_memory(deck: Deck) -> tuple[int, bool | None]:
        memory = budget.plan(deck)
        demand = budget.demand(deck, memory)
        return memory.largest.memory.total, None if demand is None else demand.fits

    planners = Planners(read, predict_step, predict_memory)
    advice = advise(deck, ranks, step, rates, planners, memory.largest.memory.total)
    return DeckPlan(*planned_deck, pipeline, rates, step, total_traffic, advice, title)
