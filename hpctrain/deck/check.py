"""Local checks of keys against each other (`check_deck`) and the number of ranks (`world_problems`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import Relations, relation_problems
from hpctrain.deck.schema import Deck, fields, tables
from hpctrain.deck.sections import (
    adapters,
    batch,
    checkpoint,
    communication,
    data,
    evaluation,
    experts,
    latent,
    layout,
    learning_rate,
    local_steps,
    machine,
    memory,
    mixture,
    model,
    module,
    objective,
    optimizer,
    policy,
    precision,
    rope_scaling,
    run,
    server,
    stability,
)
from hpctrain.deck.sections.rank_partition import count_dedicated_ranks
from hpctrain.errors import HpctrainError
from hpctrain.text import control_problem

RELATIONS: Relations = tuple(
    relation
    for module in (
        *(
            run,
            model,
            data,
            objective,
            policy,
            evaluation,
            layout,
            local_steps,
            batch,
            optimizer,
            learning_rate,
        ),
        *(precision, memory, communication, server, checkpoint, stability, machine),
    )
    for relation in module.RELATIONS
)
"""Relations between the keys of all decks."""

TRANSFORMER_RELATIONS: Relations = (
    *model.TRANSFORMER_RELATIONS,
    *rope_scaling.RELATIONS,
    *latent.RELATIONS,
    *experts.RELATIONS,
    *adapters.RELATIONS,
)
"""Further relations in decks without a module of the user."""


def check_deck(deck: Deck, ranks: int | None = None) -> list[DeckProblem]:
    """Return the problems of a deck that do not depend on the number of ranks; empty if it has none. Local.

    This is one half of the checks: `world_problems` and `check_world` do the other half, for a number of
    ranks. They are not called here, even if `ranks` is given.

    Args:
        deck: The deck, whose keys all have values of the right types and ranges.
        ranks: Number of ranks; None if it is not known. It only decides who checks batch sizes. If it is
            None, they are checked here for layout.data data ranks, or for one if the deck does not give that
            key. If it is given, they are left to `world_problems`.
    """
    is_transformer = deck.model.module is None
    return [
        *_texts(deck),
        *relation_problems(deck, RELATIONS + TRANSFORMER_RELATIONS if is_transformer else RELATIONS),
        *(_transformer_problems(deck) if is_transformer else module.module_problems(deck)),
        *run.title_problems(deck),
        *run.length_problems(deck),
        *run.noise_scale_problems(deck),
        *data.dataset_problems(deck),
        *mixture.token_file_problems(deck),
        *objective.objective_problems(deck),
        *policy.policy_problems(deck),
        *evaluation.evaluation_problems(deck),
        *layout.zero_problems(deck),
        *local_steps.local_step_problems(deck),
        *(batch.batch_size_problems(deck, deck.layout.data or 1) if ranks is None else ()),
        *optimizer.optimizer_problems(deck),
        *learning_rate.learning_rate_problems(deck),
        *precision.precision_problems(deck),
        *memory.recompute_problems(deck),
        *communication.communication_problems(deck),
        *server.server_problems(deck),
        *stability.stability_problems(deck),
    ]


def _transformer_problems(deck: Deck) -> list[DeckProblem]:
    """Return the problems of the sizes and the layout of a transformer."""
    return [
        *model.head_problems(deck),
        *model.rotation_problems(deck),
        *model.window_problems(deck),
        *latent.latent_problems(deck),
        *rope_scaling.rope_scaling_problems(deck),
        *model.parametrization_problems(deck),
        *experts.expert_problems(deck),
        *layout.transformer_layout_problems(deck),
    ]


def _texts(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of texts with control characters, which may reach a log, a terminal or a script."""
    for table in tables():
        for name in fields(table):
            key = f"{table}.{name}"
            value = deck.value(key)
            texts = value if isinstance(value, tuple) else (value,)
            problem = control_problem("".join(text for text in texts if isinstance(text, str)))
            if problem and (key != "run.dir" or value != f"runs/{deck.run.title}"):
                yield DeckProblem(key, problem)


def check_world(deck: Deck, ranks: int) -> None:
    """Raise an error if a deck does not fit a number of ranks; otherwise do nothing. Local.

    Args:
        deck: The deck, for which `check_deck` has no problems. Those problems are not looked for again.
        ranks: Number of ranks of the run, parameter servers and dedicated ranks included.

    Raises:
        HpctrainError: `world_problems` has problems; all are reported.
    """
    problems = world_problems(deck, ranks)
    if problems:
        raise HpctrainError([deck.problem(problem.key, problem.sentence) for problem in problems])


def data_ranks(deck: Deck, ranks: int) -> int:
    """Return the size of the data axis: the number of copies of the model that the ranks hold. Local.

    A copy takes pipeline x tensor x context ranks. Copies of all replicas of local steps count together, and
    a copy also counts if ZeRO shards it. Parameter servers and dedicated ranks of other models are not
    counted.

    Args:
        deck: The deck, for which `check_deck` has no problems.
        ranks: Number of ranks of the run, parameter servers and dedicated ranks included.

    Raises:
        HpctrainError: The deck has problems on this number of ranks, as for `check_world`.
    """
    check_world(deck, ranks)
    reserved = server.server_ranks(deck) + count_dedicated_ranks(deck)
    return (ranks - reserved) // layout.model_ranks(deck)


def world_problems(deck: Deck, ranks: int) -> list[DeckProblem]:
    """Return the problems of a deck that depend on the number of ranks; empty if it fits. Local.

    If the axes of the layout do not fit, other keys are not checked. The message about a layout that was
    chosen for another number of ranks says how to choose a new one.

    Args:
        deck: The deck, for which `check_deck` has no problems. Those problems are not looked for again.
        ranks: Number of ranks of the run, parameter servers and dedicated ranks included.
    """
    return [_with_layout_hint(deck, problem) for problem in _world_problems(deck, ranks)]


def _with_layout_hint(deck: Deck, problem: DeckProblem) -> DeckProblem:
    keys = {problem.key, *problem.others} & set(deck.layout.chosen)
    if all(deck.sources.place(key).override is not None for key in keys):
        return problem
    anew = 'layout = "auto" chose that for other ranks, and --set layout=auto chooses for these'
    return replace(problem, sentence=f"{problem.sentence}; {anew}")


def _world_problems(deck: Deck, ranks: int) -> list[DeckProblem]:
    reserved = server.server_ranks(deck) + count_dedicated_ranks(deck)
    if deck.communication.server is not None and ranks <= reserved:
        return [server.missing_worker_problem(deck, ranks)]
    ranks_left = ranks - reserved
    if wrong := [*policy.dedicated_rank_world_problems(deck, ranks)] or layout.axis_problems(
        deck, ranks_left
    ):
        return wrong
    data_size = ranks_left // layout.model_ranks(deck)
    stage_ranks = ranks_left // deck.layout.pipeline
    return [
        *batch.batch_size_problems(deck, data_size),
        *batch.micro_batch_problems(deck, data_size),
        *layout.zero_group_problems(deck, data_size),
        *local_steps.replica_world_problems(deck, data_size, stage_ranks),
        *experts.expert_world_problems(deck, stage_ranks),
        *run.noise_scale_world_problems(deck, data_size),
    ]
