"""Checks of replicas and of the steps that they make by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from hpctrain.deck.communication import Communication
from hpctrain.deck.problem import Problem, divisors, nearest_numbers
from hpctrain.deck.schema import Deck
from hpctrain.words import counted, either

_BETWEEN = ("local_steps", "fragments", "delay", "blend", "outer_format")
_OF_DILOCO = ("outer_learning_rate", "outer_momentum")


def in_replicas(deck: Deck) -> bool:
    """Whether there is an outer model: replicas part, or the only one makes outer steps that change it."""
    return deck.layout.replicas > 1 or deck.communication.outer == "diloco"


def local_step_problems(deck: Deck) -> Iterator[Problem]:
    """Everything that keeps replicas from making steps by themselves as the deck says, on any ranks."""
    keys, layout = deck.communication, deck.layout
    if not in_replicas(deck):
        sentence = "has no effect with layout.replicas = 1: there is no other replica (leave it out)"
        for name in _BETWEEN:
            if _given(deck, name):
                others = ("layout.replicas", "communication.outer")
                yield Problem(f"communication.{name}", sentence, others, idle=True)
    if keys.outer != "diloco":
        for name in _OF_DILOCO:
            if _given(deck, name):
                sentence = f'has no effect on communication.outer = "{keys.outer}" (leave it out)'
                yield Problem(f"communication.{name}", sentence, ("communication.outer",), idle=True)
    if layout.replicas > 1 and layout.zero_group is not None:
        sentence = f"cannot be with layout.replicas = {layout.replicas}: layout.zero cuts within each replica"
        yield Problem("layout.zero_group", f"{sentence} (leave it out)", ("layout.replicas",))
    if layout.replicas > 1 and keys.compress_between != "ranks":
        sentence = f"cannot be with layout.replicas = {layout.replicas}: sums are compressed within each"
        yield Problem(
            "communication.compress_between", f'{sentence} ("ranks" would do)', ("layout.replicas",)
        )
    if keys.fragments > min(deck.model.layers, keys.local_steps):
        limits = f"model.layers = {deck.model.layers}", f"communication.local_steps = {keys.local_steps}"
        limit, why = (
            (limits[0], "each has a block or more")
            if deck.model.layers < keys.local_steps
            else (limits[1], "each has a step of its own")
        )
        others = ("model.layers", "communication.local_steps")
        yield Problem("communication.fragments", f"must be at most {limit}: {why}", others)
    if keys.delay >= keys.local_steps and keys.delay:
        limit = f"communication.local_steps = {keys.local_steps}"
        sentence = f"must be below {limit}: what is under way arrives before the next is sent"
        yield Problem("communication.delay", sentence, ("communication.local_steps",))


def replica_world_problems(deck: Deck, data: int, of_stage: int) -> Iterator[Problem]:
    """What keeps `data` data ranks, of the `of_stage` ranks of a pipeline stage, from being cut so."""
    replicas, fitting = deck.layout.replicas, fitting_replicas(deck, data, of_stage)
    if fitting and replicas not in fitting:
        would = either(nearest_numbers(replicas, fitting))
        whole = "context and expert groups" if deck.model.experts else "context groups"
        sentence = f"must divide the {counted(data, 'data rank')} into replicas with whole {whole}"
        axes = ("layout.data", "layout.context", "layout.tensor", "layout.expert", "layout.expert_tensor")
        yield Problem("layout.replicas", f"{sentence} ({would} would)", axes)
    elif replicas > 1 and deck.communication.compress != "none" and data * deck.layout.context == replicas:
        form = (
            f'sums gradients within a replica, and each of the {replicas} has one data rank ("none" would do)'
        )
        yield Problem("communication.compress", form, ("layout.replicas", "layout.data", "layout.context"))


def fitting_replicas(deck: Deck, data: int, of_stage: int) -> list[int]:
    """The numbers of replicas, rising, into which `data` data ranks, of the `of_stage` ranks of a pipeline
    stage, can be cut; none where its experts do not fit these.
    """
    layout = deck.layout
    experts = layout.expert * layout.expert_tensor if deck.model.experts else 1
    return [] if of_stage % experts else divisors(gcd(data, of_stage // experts))


def _given(deck: Deck, name: str) -> bool:
    """Whether a key of [communication] has another value than the usual one."""
    return bool(getattr(deck.communication, name) != Communication.model_fields[name].default)
