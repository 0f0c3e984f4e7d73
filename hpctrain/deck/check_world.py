"""Checks of the deck against the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpctrain.deck.check_local_steps import replica_world_problems
from hpctrain.deck.check_mixture import expert_world_problems
from hpctrain.deck.check_noise_scale import noise_scale_world_problems
from hpctrain.deck.check_server import no_worker, server_ranks
from hpctrain.deck.problem import DeckProblem, divisors, multiples, nearest_numbers
from hpctrain.deck.rank_partition import count_dedicated_ranks, world_division_problems
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.text import counted, either

MOST_MICRO_BATCHES = 65_536  # micro-batches of a rank in one step: a schedule lists the actions of each
MOST_PASSES = 1 << 20  # passes of micro-batches through the parts of a model in one schedule


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
    return [_with_choice(deck, problem) for problem in _problems(deck, ranks)]


def _with_choice(deck: Deck, problem: DeckProblem) -> DeckProblem:
    keys = {problem.key, *problem.others} & set(deck.layout.chosen)
    if all(deck.sources.place(key).override is not None for key in keys):
        return problem
    anew = 'layout = "auto" chose that for other ranks, and --set layout=auto chooses for these'
    return replace(problem, sentence=f"{problem.sentence}; {anew}")


def _problems(deck: Deck, ranks: int) -> list[DeckProblem]:
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
        *_micro_batches(deck, data),
        *_zero_groups(deck, max(1, data * layout.context // layout.replicas)),
        *replica_world_problems(deck, data, ranks // layout.pipeline),
        *expert_world_problems(deck, ranks // layout.pipeline),
        *noise_scale_world_problems(deck, data),
    ]


def batch_sizes(micro_size: int, data: int, sizes: dict[str, int]) -> Iterator[DeckProblem]:
    """Yield the problems of batch sizes, by key, that do not divide into micro-batches on the data ranks."""
    unit = micro_size * data
    for key, size in sizes.items():
        if size % unit:
            yield DeckProblem(
                key,
                f"must be a multiple of batch.micro_size x data ranks = {micro_size} x {data} = {unit} "
                f"({multiples(size, unit)} would)",
                ("batch.micro_size", "layout.data"),
            )


def _micro_batches(deck: Deck, data: int) -> Iterator[DeckProblem]:
    batch, parts = deck.batch, deck.layout.pipeline * deck.layout.chunks
    unit, most = batch.micro_size * data, min(MOST_MICRO_BATCHES, MOST_PASSES // parts)
    if batch.global_size > most * unit:
        yield DeckProblem(
            "batch.global_size",
            f"makes {batch.global_size // unit} micro-batches of batch.micro_size x data ranks = "
            f"{batch.micro_size} x {data} = {unit}; must make at most {most} ({most * unit} would do)",
            ("batch.micro_size", "layout.data", "layout.pipeline", "layout.chunks"),
        )


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
