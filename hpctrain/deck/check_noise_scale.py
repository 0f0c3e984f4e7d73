"""Checks of the gradient noise scale, which needs gradients of different tokens on different ranks."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.deck.check_local_steps import in_replicas
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value

_KEY = "run.noise_scale_steps"

_NOT_MEANS = frozenset({"sign", "onebit", "topk", "powersgd"})
"""Compressions whose sums differ from the gradient sums of the step by more than rounding."""


def noise_scale_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of the noise scale that do not depend on the number of ranks."""
    if not deck.run.noise_scale_steps:
        return
    layout, keys = deck.layout, deck.communication

    def problem(why: str, *excluding: str) -> DeckProblem:
        given = " and ".join(f"{other} = {toml_value(deck.value(other))}" for other in excluding)
        return DeckProblem(_KEY, f"cannot be with {given}, {why} (0 would do)", excluding)

    if keys.server is not None:
        yield problem("whose workers do not make steps together", "communication.server.mode")
        return
    if in_replicas(deck):
        key = "layout.local_steps." + ("replicas" if layout.replicas > 1 else "outer")
        yield problem("as gradients are not summed over all data ranks then", key)
    if keys.compress in _NOT_MEANS:
        yield problem("which makes other sums than those of all gradients", "communication.compress")
    if deck.memory.accumulate == "sliced":
        yield problem("as no rank has the gradients of all its tokens then", "memory.accumulate")
    if layout.context > 1:
        yield problem("whose ranks have gradients of parts of the same sequences", "layout.context")
    if deck.model.experts:
        for name in ("expert", "expert_tensor", "tensor"):
            if getattr(layout, name) > 1:
                why = "with which experts' gradients are those of several ranks' tokens"
                yield problem(why, f"layout.{name}", "model.experts.count")
                break


def noise_scale_world_problems(deck: Deck, data: int) -> Iterator[DeckProblem]:
    """Yield the problems of the noise scale on `data` data ranks."""
    layout, batch = deck.layout, deck.batch
    if not deck.run.noise_scale_steps or data > 1:
        return
    if layout.tensor > 1 or layout.pipeline > 1:
        sentence = "compares data ranks with all of them together, but there is one (0 would do)"
        yield DeckProblem(_KEY, sentence, ("layout.data", "layout.tensor", "layout.pipeline"))
    elif batch.global_size <= batch.micro_size:
        sentence = (
            "compares a rank's first micro-batch with all of its step, but there is one (0, a smaller "
            "batch.micro_size or more ranks would do)"
        )
        yield DeckProblem(_KEY, sentence, ("layout.data", "batch.global_size", "batch.micro_size"))
