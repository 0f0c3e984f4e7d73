"""The start of a run from the weights of another model, as [model] from asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.entries import master_entries, training_entries
from hpctrain.checkpoint.exchange.by_name import load_by_name
from hpctrain.checkpoint.exchange.convert import MODEL_ONLY
from hpctrain.checkpoint.exchange.names import ROUTER_BIAS
from hpctrain.checkpoint.exchange.source import load_source
from hpctrain.deck.check_local_steps import in_replicas
from hpctrain.deck.objective import OF_SCORES
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.engine.build import Engine
from hpctrain.engine.rules import RULES
from hpctrain.errors import HpctrainError
from hpctrain.model.foreign.buffers import KIND as BUFFER
from hpctrain.model.foreign.part import ModulePart
from hpctrain.model.parametrization import Parametrization
from hpctrain.sharding.compression.warmed import momentum_given_after
from hpctrain.sharding.synchronize import check_replicas


def start_from_source(deck: Deck, engine: Engine) -> str:
    """Fill the weights of a new engine from what `model.from` names; in words, what was taken. Collective.

    The optimizer stays as it is, at its beginning; new rows of a larger vocabulary keep their initial values.
    Errors, the same on all ranks, as in `checkpoint.exchange.source.load_source`.
    """
    assert deck.model.source is not None
    path = Path(deck.model.source)
    if deck.model.module is not None:
        return _start_module(path, engine)
    optimizer, shape = engine.optimizer, engine.shape
    biases = training_entries(tensor for tensor in engine.own_state() if tensor.kind == ROUTER_BIAS)
    entries = [*master_entries(engine.own_state()), *biases]
    source = load_source(path, engine.world, entries, shape.head, deck.model.adapters)
    optimizer.publish()
    engine.outer.begin(optimizer)
    if deck.stability.check_parameters:
        # Ranks of several nodes may have read other files of the same name.
        check_replicas(engine.buckets, engine.world.everyone)
    sentence = f"starts from the weights of {path}"
    if shape.vocabulary > source.vocabulary:
        sentence += f", {shape.vocabulary - source.vocabulary} tokens added to its {source.vocabulary}"
    if shape.experts and not source.experts:
        sentence += f", {shape.experts} experts each a copy of its feed-forward part, routers new"
    if shape.head != source.head:
        sentence += ", in place of whose head there is a new one of scores"
    if shape.adapters is not None:
        sentence += ", with its adapters" if source.adapters is not None else ", adapters new"
    if shape.family == "gpt2" and shape.sequence < source.sequence:
        sentence += f", the first {shape.sequence} of its {source.sequence} positions"
    return sentence


def _start_module(path: Path, engine: Engine) -> str:
    """The same of a module that users bring, whose parameters and buffers have the same names there."""
    buffers = training_entries(tensor for tensor in engine.own_state() if tensor.kind == BUFFER)
    parts = [part for part in engine.models if isinstance(part, ModulePart)]
    names = {own.shard.name: known for part in parts for own, known in part.names.items()}
    left = load_by_name(path, engine.world, [*master_entries(engine.own_state()), *buffers], names)
    engine.optimizer.publish()
    engine.outer.begin(engine.optimizer)
    return f"starts from the values of {path}" + (f"; {left}" if left else "")


def require_training_state(path: Path, state: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise HpctrainError if a checkpoint is of a model alone, or a resumed run is to start from another."""
    if state.get(MODEL_ONLY):
        raise HpctrainError(
            f"{path}: holds a model alone, no training state to go on from; start a run from it with "
            f'[model] from = "{path}" in a deck'
        )
    for override in overrides:
        name, _, value = override.partition("=")
        if name.strip() == "model.from" and value.strip():
            raise HpctrainError(
                f"--set {override}: a run that is resumed goes on from its own weights; `hpctrain run` "
                "starts from others"
            )


def require_same_blocks(deck: Deck, before: Deck, path: Path) -> None:
    """Raise HpctrainError if a run is to go on as a mixture of experts from a dense model, or otherwise."""
    if bool(deck.model.experts) != bool(before.model.experts):
        was, becomes = ("dense", "a mixture of experts") if deck.model.experts else ("a mixture", "dense")
        start = (
            f'; a run of its own starts from it with [model] from = "{path}"' if deck.model.experts else ""
        )
        sentence = f"{path} is {was} and does not go on as {becomes}{start}"
        raise HpctrainError(deck.problem("model.experts", sentence))


def require_same_head(deck: Deck, before: Deck, path: Path) -> None:
    """Raise HpctrainError if a run is to go on as a reward model from a language model, or otherwise."""
    if (deck.objective.kind in OF_SCORES) != (before.objective.kind in OF_SCORES):
        is_scored = before.objective.kind in OF_SCORES
        was, becomes = ("a reward model", "one of tokens") if is_scored else ("no reward model", "one")
        start = "" if is_scored else f'; a run of its own starts from it with [model] from = "{path}"'
        raise HpctrainError(
            deck.problem("objective.kind", f"{path} is {was} and does not go on as {becomes}{start}")
        )


def require_same_parametrization(deck: Deck, before: Deck, path: Path) -> None:
    """Raise HpctrainError if a run's weights would go on in a model that multiplies them otherwise (muP)."""
    for name in ("parametrization", "base_width", "base_head_size"):
        had = getattr(before.model, name)
        if getattr(deck.model, name) != had and Parametrization.of(deck) != Parametrization.of(before):
            told = "without it" if had is None else f"with {toml_value(had)}"
            sentence = f"{path} was trained {told}, and its weights mean something else otherwise"
            raise HpctrainError(deck.problem(f"model.{name}", sentence))


def require_same_adapters(deck: Deck, before: Deck, path: Path) -> None:
    """Raise HpctrainError if a run would go on with other adapters, or without those that it trained."""
    if deck.model.adapters != before.model.adapters:
        had = "none" if before.model.adapters is None else toml_value(before.model.adapters)
        sentence = (
            f'{path} was trained with {had} (a run of its own starts from it with [model] from = "{path}")'
        )
        raise HpctrainError(deck.problem("model.adapters", sentence))


def left_bias(deck: Deck, before: Deck, path: Path) -> str:
    """In words, that routers chose by biases which a run that goes on does without; empty where none did."""
    if before.model.balance != "bias" or deck.model.balance == "bias" or not deck.model.experts:
        return ""
    keep = 'model.balance = "bias" would keep them'
    return f"{path}: leaves its router/bias: experts are chosen without what it had learned ({keep})"


def begins_anew(deck: Deck, before: Deck, path: Path) -> str:
    """What `path`, with the deck `before`, holds in place of what a run could go on from, so that its
    optimizer begins with new state: that of another one, of other matrices, or less. Empty where it goes on.

    HpctrainError without optimizer.restart, or where what is kept beside its state counts on it.
    """
    own, theirs = (RULES[each.optimizer.name](each) for each in (deck, before))
    other = deck.optimizer.name != before.optimizer.name
    named = deck.optimizer.name == "muon" and set(deck.optimizer.matrices) != set(before.optimizer.matrices)
    if not other and not named and set(own.names) <= set(theirs.names):
        return ""
    held = f"the state of {toml_value(before.optimizer.name)}" if other else "no momentum"
    if named and not other:
        held = f"muon's state of {toml_value(before.optimizer.matrices)}"
    if not deck.optimizer.restart:
        mean = "beta1" if deck.optimizer.name == "adafactor" else "momentum"
        key = "name" if other else "matrices" if named else mean
        would = "optimizer.restart = true begins with new state"
        raise HpctrainError(deck.problem(f"optimizer.{key}", f"{path} holds {held} to go on from ({would})"))
    if deck.communication.warmup and (momentum_given_after(deck) or in_replicas(deck)):
        sentence = (
            "counts updates of the whole run, but those of an optimizer that begins anew "
            f'(optimizer.restart) begin at 0; a run of its own starts from it with [model] from = "{path}"'
        )
        raise HpctrainError(deck.problem("communication.warmup", sentence))
    return held


def require_no_second_warm_up(deck: Deck, before: Deck, updates: int) -> None:
    """Raise HpctrainError if replicas that have parted, each with moments of its own, are to be summed in
    every step as if they had not.
    """
    keys, over = deck.communication, before.communication.warmup
    if min(deck.layout.replicas, before.layout.replicas) > 1 and over < updates < keys.warmup:
        sentence = (
            f"replicas have parted after {over}, and after {updates} have moments of their own, with which "
            f"no step sums them as one ({over} would do)"
        )
        raise HpctrainError(deck.problem("communication.warmup", sentence))
