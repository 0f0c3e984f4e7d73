"""Checks of servers: what they cannot go together with, and keys that are given in vain without them."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.deck.communication import Communication
from hpctrain.deck.division import ranks_apart
from hpctrain.deck.optimizer import UPDATES_MATRICES
from hpctrain.deck.problem import Problem
from hpctrain.deck.schema import Deck
from hpctrain.words import counted

_SERVER = "communication.server"

_ALONE: tuple[tuple[str, object, str], ...] = (
    ("communication.compress", "none", "pushes travel as they are"),
    ("communication.local_steps", 1, "workers have no weights of their own to go on with"),
    ("communication.outer", "average", "workers have no weights of their own to go on with"),
    ("layout.replicas", 1, "workers have no weights of their own to go on with"),
    ("layout.tensor", 1, "a worker is one rank, which has the whole model"),
    ("layout.pipeline", 1, "a worker is one rank, which has the whole model"),
    ("layout.context", 1, "a worker is one rank, which has the whole model"),
    ("layout.zero", 0, "the servers have a slice of all state each anyway"),
    (
        "model.experts",
        0,
        "routers learn from what all ranks note of a step, which workers do not make together",
    ),
    ("memory.optimizer", "device", "state in files or host memory is updated by all ranks together"),
    ("memory.parameters", "device", "what lies elsewhere is gathered by all ranks together"),
    ("checkpoint.mode", "collective", "the servers write while the workers wait"),
    ("checkpoint.memory_every", 0, "no rank has all state to keep a copy of"),
    ("stability.corruption", "off", "what the servers hold is not checked"),
    ("stability.spike", "off", "updates are made of pushes, not of steps that can be judged"),
    ("checkpoint.mirror", False, "its ranks do not go in step, as those must that send each other mirrors"),
    ("run.trace", False, "it shows steps that all ranks make together"),
    ("stability.verify_layout", False, "it compares a step that all ranks make together"),
)
"""Keys with the one value that goes with servers, and why another one does not."""


def server_ranks(deck: Deck) -> int:
    """Ranks that serve."""
    return 0 if deck.communication.server == "none" else deck.communication.server_ranks


def no_worker(deck: Deck, ranks: int) -> Problem:
    """Too few ranks."""
    need = deck.communication.server_ranks + ranks_apart(deck) + 1
    sentence = f"leaves no worker of {counted(ranks, 'rank')} (start {need} or more)"
    return Problem("communication.server_ranks", sentence, (_SERVER,))


def server_problems(deck: Deck) -> Iterator[Problem]:
    """Everything that is wrong with the servers that a deck asks for, or asks for in vain."""
    keys = deck.communication
    usual = {name: Communication.model_fields[name].default for name in _OF_SERVERS}
    if keys.server == "none":
        for name in _OF_SERVERS:
            if getattr(keys, name) != usual[name]:
                sentence = f'has no effect with {_SERVER} = "none" (leave it out)'
                yield Problem(f"communication.{name}", sentence, (_SERVER,), idle=True)
        return
    if keys.server != "stale" and keys.staleness != usual["staleness"]:
        sentence = f'is for {_SERVER} = "stale", not "{keys.server}" (leave it out)'
        yield Problem("communication.staleness", sentence, (_SERVER,), idle=True)
    correction = keys.staleness_correction
    if keys.server == "sync" and correction != "none":
        sentence = f'has no effect with {_SERVER} = "sync", where nothing is stale (leave it out)'
        yield Problem("communication.staleness_correction", sentence, (_SERVER,), idle=True)
    if keys.server == "stale" and not keys.staleness and correction != "none":
        sentence = "has no effect with communication.staleness = 0, where nothing is stale (leave it out)"
        both = (_SERVER, "communication.staleness")
        yield Problem("communication.staleness_correction", sentence, both, idle=True)
    if correction != "compensate" and keys.compensation != usual["compensation"]:
        sentence = 'is for communication.staleness_correction = "compensate" (leave it out)'
        others = ("communication.staleness_correction",)
        yield Problem("communication.compensation", sentence, others, idle=True)
    for name, value, why in _ALONE:
        if deck.value(name) != value:
            shown = str(value).lower() if isinstance(value, bool) else value
            shown = f'"{shown}"' if isinstance(value, str) else shown
            sentence = f'does not go with {_SERVER} = "{keys.server}": {why} ({shown} would do)'
            yield Problem(name, sentence, (_SERVER,))
    if deck.machine.rates is not None:
        sentence = (
            f'has no effect with {_SERVER} = "{keys.server}", whose steps are not planned (leave it out)'
        )
        yield Problem("machine.rates", sentence, (_SERVER,), idle=True)
    if deck.optimizer.name in UPDATES_MATRICES:
        sentence = f'does not go with {_SERVER} = "{keys.server}": servers cut matrices ("adamw" would do)'
        yield Problem("optimizer.name", sentence, (_SERVER,))
    if deck.precision.compute == "fp16":
        sentence = (
            f'does not go with {_SERVER} = "{keys.server}": its loss scale follows steps that all ranks make '
            'together ("bf16" or "fp32" would do)'
        )
        yield Problem("precision.compute", sentence, (_SERVER,))


_OF_SERVERS = ("server_ranks", "staleness", "staleness_correction", "compensation")
