"""The table [communication.server], parameter servers, and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.sections.optimizer import UPDATES_MATRICES
from hpctrain.deck.sections.rank_partition import count_dedicated_ranks
from hpctrain.deck.sources import toml_value
from hpctrain.text import counted

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


class ServerTable(Section):
    """Servers own parameters and optimizer state; workers send them gradients."""

    mode: Literal["sync", "async", "stale"] = key(
        "When workers continue: all in the same step, each without waiting, or at most staleness steps ahead."
    )
    ranks: int = key("Number of servers, which are the first ranks.", 1, unit="ranks", ge=1)
    staleness: int = key(
        'Number of steps that the fastest worker may be ahead of the slowest (mode = "stale").',
        1,
        unit="steps",
        ge=0,
    )
    correction: Literal["none", "scale", "compensate"] = key(
        "Correction of stale gradients: divide the learning rate by the staleness, or add a "
        "compensation term.",
        "none",
    )
    compensation: float = key(
        'Weight of that term: squared gradient x change of the weights (correction = "compensate").',
        0.04,
        ge=0,
        le=1e6,
    )


_SERVER = "communication.server.mode"


_ALONE: tuple[tuple[str, object, str], ...] = (
    ("communication.compress", "none", "gradients are sent to servers uncompressed"),
    ("layout.local_steps", None, "workers have no weights of their own for local steps"),
    ("layout.tensor", 1, "a worker is one rank, which has the whole model"),
    ("layout.pipeline", 1, "a worker is one rank, which has the whole model"),
    ("layout.context", 1, "a worker is one rank, which has the whole model"),
    ("layout.zero", 0, "each server already has a shard of all state"),
    (
        "model.experts",
        None,
        "load balancing needs statistics of all ranks in a step, but workers do not make steps together",
    ),
    ("memory.optimizer", "device", "all ranks would have to update offloaded state together"),
    ("memory.parameters", "device", "all ranks would have to gather offloaded parameters together"),
    ("checkpoint.mode", "collective", "the servers write while the workers wait"),
    ("checkpoint.memory_every", 0, "no rank has the complete state to copy"),
    ("stability.corruption", "off", "the state of servers is not checked"),
    ("stability.spike", "off", "servers update for each gradient that arrives, so there is no step to judge"),
    ("checkpoint.mirror", False, "ranks that mirror each other must make steps together"),
    ("run.trace", False, "it shows steps that all ranks make together"),
    ("stability.verify_layout", False, "it compares a step that all ranks make together"),
)
"""Keys with the only value that works with servers, and the reason why others do not."""


def server_ranks(deck: Deck) -> int:
    """Return the number of ranks that are parameter servers."""
    return 0 if deck.communication.server is None else deck.communication.server.ranks


def no_worker(deck: Deck, ranks: int) -> DeckProblem:
    """Return the problem of a run with too few ranks for a worker."""
    need = server_ranks(deck) + count_dedicated_ranks(deck) + 1
    sentence = f"leaves no worker of {counted(ranks, 'rank')} (start {need} or more)"
    return DeckProblem("communication.server.ranks", sentence, (_SERVER,))


def server_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of the parameter servers of a deck, among them keys that have no effect."""
    keys = deck.communication.server
    if keys is None:
        return
    usual = {name: field.default for name, field in type(keys).model_fields.items()}
    if keys.mode != "stale" and keys.staleness != usual["staleness"]:
        sentence = f'is for {_SERVER} = "stale", not "{keys.mode}" (leave it out)'
        yield DeckProblem("communication.server.staleness", sentence, (_SERVER,), no_effect=True)
    if keys.mode == "sync" and keys.correction != "none":
        sentence = f'has no effect with {_SERVER} = "sync", where nothing is stale (leave it out)'
        yield DeckProblem("communication.server.correction", sentence, (_SERVER,), no_effect=True)
    if keys.mode == "stale" and not keys.staleness and keys.correction != "none":
        sentence = (
            "has no effect with communication.server.staleness = 0, where nothing is stale (leave it out)"
        )
        both = (_SERVER, "communication.server.staleness")
        yield DeckProblem("communication.server.correction", sentence, both, no_effect=True)
    if keys.correction != "compensate" and keys.compensation != usual["compensation"]:
        sentence = 'is for communication.server.correction = "compensate" (leave it out)'
        others = ("communication.server.correction",)
        yield DeckProblem("communication.server.compensation", sentence, others, no_effect=True)
    for name, value, why in _ALONE:
        if deck.value(name) != value:
            would = "leave it out" if value is None else f"{toml_value(value)} would do"
            sentence = f'does not go with {_SERVER} = "{keys.mode}": {why} ({would})'
            yield DeckProblem(name, sentence, (_SERVER,))
    if deck.machine.rates is not None:
        sentence = f'has no effect with {_SERVER} = "{keys.mode}", whose steps are not planned (leave it out)'
        yield DeckProblem("machine.rates", sentence, (_SERVER,), no_effect=True)
    if deck.optimizer.name in UPDATES_MATRICES:
        sentence = f'does not go with {_SERVER} = "{keys.mode}": servers cut matrices ("adamw" would do)'
        yield DeckProblem("optimizer.name", sentence, (_SERVER,))
    if deck.precision.compute == "fp16":
        sentence = (
            f'does not go with {_SERVER} = "{keys.mode}": its loss scale follows steps that all ranks make '
            'together ("bf16" or "fp32" would do)'
        )
        yield DeckProblem("precision.compute", sentence, (_SERVER,))
