"""Checks of keys against each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpctrain.deck.problem import DeckProblem, divisors, multiples, nearest_numbers
from hpctrain.deck.schema import Deck, fields, sections
from hpctrain.deck.sections.adapters import adapter_problems
from hpctrain.deck.sections.batch import batch_problems, batch_sizes, micro_batch_problems
from hpctrain.deck.sections.communication import compression_problems
from hpctrain.deck.sections.data import dataset_problems
from hpctrain.deck.sections.evaluation import evaluation_problems
from hpctrain.deck.sections.experts import expert_world_problems, mixture_problems
from hpctrain.deck.sections.layout import layout_problems, zero_problems
from hpctrain.deck.sections.learning_rate import learning_rate_problems
from hpctrain.deck.sections.local_steps import local_step_problems, replica_world_problems
from hpctrain.deck.sections.machine import compile_problems, product_problems
from hpctrain.deck.sections.memory import memory_problems, recompute_problems
from hpctrain.deck.sections.mixture import data_problems
from hpctrain.deck.sections.model import model_problems, parametrization_problems
from hpctrain.deck.sections.module import module_problems, without_module
from hpctrain.deck.sections.objective import objective_problems
from hpctrain.deck.sections.optimizer import optimizer_problems
from hpctrain.deck.sections.policy import policy_problems, world_division_problems
from hpctrain.deck.sections.precision import precision_problems
from hpctrain.deck.sections.rank_partition import count_dedicated_ranks
from hpctrain.deck.sections.run import (
    length_problems,
    noise_scale_problems,
    noise_scale_world_problems,
    run_problems,
    title_problems,
)
from hpctrain.deck.sections.server import no_worker, server_problems, server_ranks
from hpctrain.deck.sections.stability import stability_problems
from hpctrain.errors import HpctrainError
from hpctrain.text import control_problem, counted, either


def check_deck(deck: Deck, ranks: int | None = None) -> list[DeckProblem]:
    """Return the problems of a deck that do not depend on the number of ranks.

    If `ranks` is given, problems of batch sizes that depend on it are left to `world_problems`.
    """
    return [
        *_texts(deck),
        *title_problems(deck),
        *(_transformer(deck) if deck.model.module is None else module_problems(deck)),
        *zero_problems(deck),
        *compression_problems(deck),
        *product_problems(deck),
        *compile_problems(deck),
        *precision_problems(deck),
        *server_problems(deck),
        *dataset_problems(deck),
        *data_problems(deck),
        *objective_problems(deck),
        *policy_problems(deck),
        *batch_problems(deck, ranks),
        *learning_rate_problems(deck),
        *optimizer_problems(deck),
        *length_problems(deck),
        *run_problems(deck),
        *evaluation_problems(deck),
        *memory_problems(deck),
        *local_step_problems(deck),
        *noise_scale_problems(deck),
        *stability_problems(deck),
    ]


def _transformer(deck: Deck) -> list[DeckProblem]:
    """Return the problems of the sizes and the layout of a transformer."""
    return [
        *without_module(deck),
        *model_problems(deck),
        *parametrization_problems(deck),
        *adapter_problems(deck),
        *mixture_problems(deck),
        *layout_problems(deck),
        *recompute_problems(deck),
    ]


def _texts(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of texts with control characters, which may reach a log, a terminal or a script."""
    for section in sections():
        for name in fields(section):
            key = f"{section}.{name}"
            value = deck.value(key)
            texts = value if isinstance(value, tuple) else (value,)
            problem = control_problem("".join(text for text in texts if isinstance(text, str)))
            if problem and (key != "run.dir" or value != f"runs/{deck.run.title}"):
                yield DeckProblem(key, problem)


def check_world(deck: Deck, ranks: int) -> None:
    """Raise `HpctrainError` with all problems of the deck on this number of ranks."""
    problems = world_problems(deck, ranks)
    if problems:
        raise HpctrainError([deck.problem(problem.key, problem.sentence) for problem in problems])


def data_ranks(deck: Deck, ranks: int) -> int:
    """Return the size of the data axis, the ranks that other axes leave. Raise as `check_world` does."""
    check_world(deck, ranks)
    return (ranks - server_ranks(deck) - count_dedicated_ranks(deck)) // _model_ranks(deck)


def world_problems(deck: Deck, ranks: int) -> list[DeckProblem]:
    """Return the problems of a deck on a number of ranks.

    The message about a layout that was chosen for another number of ranks says how to choose a new one.
    """
    return [_with_choice(deck, problem) for problem in _world_problems(deck, ranks)]


def _with_choice(deck: Deck, problem: DeckProblem) -> DeckProblem:
    keys = {problem.key, *problem.others} & set(deck.layout.chosen)
    if all(deck.sources.place(key).override is not None for key in keys):
        return problem
    anew = 'layout = "auto" chose that for other ranks, and --set layout=auto chooses for these'
    return replace(problem, sentence=f"{problem.sentence}; {anew}")


def _world_problems(deck: Deck, ranks: int) -> list[DeckProblem]:
    layout, batch = deck.layout, deck.batch
    if server_ranks(deck) and ranks <= server_ranks(deck) + count_dedicated_ranks(deck):
        return [no_worker(deck, ranks)]
    if missing := list(world_division_problems(deck, ranks)):
        return missing
    ranks -= server_ranks(deck) + count_dedicated_ranks(deck)
    model_ranks = _model_ranks(deck)
    names = ["pipeline", "tensor", "context"] if layout.pipeline > 1 else ["tensor", "context"]
    keys = tuple(f"layout.{name}" for name in names)
    product = f"{' x '.join(keys)} = {' x '.join(str(getattr(layout, name)) for name in names)}"
    if ranks % model_ranks:
        key = next((key for key, name in zip(keys, names, strict=True) if getattr(layout, name) > 1), keys[0])
        would = f"{multiples(ranks, model_ranks)} ranks would fit"
        of = "ranks of the policy" if count_dedicated_ranks(deck) else "ranks"
        return [DeckProblem(key, f"{product} must divide the number of {of}, {ranks} ({would})", keys)]
    data = ranks // model_ranks
    if layout.data is not None and layout.data != data:
        made = f"{counted(ranks, 'rank')} with {product} make {counted(data, 'data rank')}"
        would = f"leave the key out, or start {counted(layout.data * model_ranks, 'rank')}"
        return [DeckProblem("layout.data", f"{made} ({would})", keys)]
    sizes = {"batch.global_size": batch.global_size, "batch.ramp_from": batch.ramp_from}
    return [
        *batch_sizes(batch.micro_size, data, sizes),
        *micro_batch_problems(deck, data),
        *_zero_groups(deck, max(1, data * layout.context // layout.replicas)),
        *replica_world_problems(deck, data, ranks // layout.pipeline),
        *expert_world_problems(deck, ranks // layout.pipeline),
        *noise_scale_world_problems(deck, data),
    ]


def _zero_groups(deck: Deck, ranks: int) -> Iterator[DeckProblem]:
    layout = deck.layout
    among = counted(ranks, "data x context rank") + " of a replica" * (layout.replicas > 1)
    size = max(1, layout.zero_group) if isinstance(layout.zero_group, int) else ranks
    if ranks % size:
        would = f"{either(nearest_numbers(size, divisors(ranks)))} would"
        sentence = f"must divide the {among} ({would})"
        yield DeckProblem("layout.zero_group", sentence, ("layout.data", "layout.context"))
    elif layout.zero == 3 and size == 1:
        key, others = ("layout.zero_group", ("layout.zero",)) if layout.zero_group else ("layout.zero", ())
        yield DeckProblem(
            key,
            "cuts parameters over a single rank, but needs two or more; layout.zero of 0, 1 or 2 would do "
            f"(there {'is' if ranks == 1 else 'are'} {among})",
            others,
        )


def _model_ranks(deck: Deck) -> int:
    return deck.layout.pipeline * deck.layout.tensor * deck.layout.context
