"""Checks of model.parametrization (muP)."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from hpctrain.deck.optimizer import MuonTable
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck
from hpctrain.text import either

SCALED = ("adafactor", "adam-mini", "adamw", "lion", "muon", "schedule-free", "sgd")
"""Optimizers whose learning rates have a known dependence on the width."""


def parametrization_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of muP: a model that cannot be scaled in width, and keys without effect."""
    model, optimizer = deck.model, deck.optimizer.name
    by = ("model.parametrization",)
    if model.parametrization == "standard":
        for name in ("base_width", "base_head_size"):
            if getattr(model, name) is not None:
                sentence = 'has no effect without model.parametrization = "mup" (leave it out)'
                yield DeckProblem(f"model.{name}", sentence, by, no_effect=True)
        return
    if model.base_width is None:
        sentence = (
            "is relative to the width at which learning_rate.peak was found, and needs it as "
            f"model.base_width (at {model.hidden}, model.hidden, it changes nothing yet)"
        )
        yield DeckProblem("model.parametrization", sentence, ("model.base_width",))
    elif model.base_head_size is None:
        narrower = max(1, round(model.head_size * model.base_width / model.hidden))
        sentence = (
            "needs the size of a head there as model.base_head_size "
            f"({model.head_size} if wider models have more heads, {narrower} if theirs are wider)"
        )
        yield DeckProblem("model.base_width", sentence, ("model.base_head_size",))
    elif model.base_width == model.hidden and model.base_head_size != model.head_size:
        sentence = f"must be {model.head_size}, model.head_size, at model.base_width = model.hidden"
        yield DeckProblem("model.base_head_size", sentence, ("model.base_width", "model.head_size"))
    if optimizer not in SCALED:
        known = either([f'"{name}"' for name in SCALED])
        sentence = (
            f'has no known rule for rates by width, for model.parametrization = "mup" ({known} would do)'
        )
        yield DeckProblem("optimizer.name", sentence, by)
    if isinstance(rule := deck.optimizer.rule, MuonTable):
        for name in ("embedding.tokens.weight", "embedding.positions.weight", "head.weight", "score.weight"):
            if any(fnmatchcase(name, pattern) for pattern in rule.matrices):
                sentence = f'names {name}, of whose rate with model.parametrization = "mup" no rule is known'
                yield DeckProblem("optimizer.muon.matrices", sentence, by)
                break
    if optimizer == "sgd" and model.query_key_norm == "head":
        sentence = (
            'has no known rule for rates of optimizer.name = "sgd" with model.parametrization = "mup" '
            '("all" or "none" would do)'
        )
        yield DeckProblem("model.query_key_norm", sentence, (*by, "optimizer.name"))
