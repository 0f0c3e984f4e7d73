"""Comparison of a deck's model with the model of a checkpoint.

The file `deck/resume_rules.toml` has the policy of each key. A key with the policy "refused" is an
error if its value differs. For the keys in `_CHECKS` a function decides instead whether two values differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath

from hpctrain.deck.code import is_file_target
from hpctrain.deck.resume_rules import FUNCTION, PARAMETERS, keys_of_policy, resume_rules
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import POLICY_KINDS, REFERENCE_KINDS, SCORE_KINDS
from hpctrain.deck.sources import clipped, toml_value
from hpctrain.errors import HpctrainError
from hpctrain.model.width_scaling import WidthScaling

_PROGRESS_KEYS = ("communication.warmup", "policy.rollout", "policy.epochs")
"""Keys that are refused depending on the number of steps of the checkpoint, not on their values alone."""

_ALLOWED_WITH_FROM = ("model.experts.count", "model.adapters", "objective.kind")
"""Keys that change parameters in a way that a new run with [model] from can convert."""


def require_same_model(deck: Deck, trained_deck: Deck, path: Path) -> None:
    """Check that a deck describes the same model as a checkpoint.

    Args:
        deck: The deck to check.
        trained_deck: The deck that the checkpoint was trained with.
        path: The checkpoint, for messages.

    Raises:
        HpctrainError: The model differs. The error names every key that changes it.
    """
    if problems := list(model_problems(deck, trained_deck, path)):
        raise HpctrainError(problems)


def model_problems(deck: Deck, trained_deck: Deck, path: Path) -> Iterator[str]:
    """Yield a sentence for each key that changes the model.

    The value of a key that the user did not give depends on other keys. Such keys are reported only if no
    given key differs, since their values change back together with the given keys.
    """
    changed = [
        key
        for key in _compared_keys(deck, trained_deck)
        if _CHECKS.get(key, differs)(deck, trained_deck, key)
    ]
    given = [key for key in changed if key not in deck.sources.defaulted]
    for key in given or changed:
        old = trained_deck.value(key)
        was = "without it" if old is None else f"with {clipped(toml_value(old))}"
        rule = resume_rules()[key]
        reason = rule.note.partition(";")[0]
        if reason not in {FUNCTION, PARAMETERS}:
            reason = _REASONS[key]
        sentence = f"{path} was trained {was}, and another value {reason}"
        if reason == FUNCTION or key in _ALLOWED_WITH_FROM:
            sentence += f' (a new run can start from its weights with [model] from = "{path}")'
        elif key != "model.from":
            sentence += f" ({'leave it out' if old is None else 'expected ' + clipped(toml_value(old))})"
        yield deck.problem(key, sentence)


def _compared_keys(deck: Deck, trained_deck: Deck) -> Iterator[str]:
    """Yield the refused keys that are compared by value. Tables in both decks are compared key by key."""
    decks = deck, trained_deck
    have_experts = None not in [each.value("model.experts.count") for each in decks]
    have_adapters = None not in [each.value("model.adapters") for each in decks]
    for key in keys_of_policy("refused"):
        if key.startswith("model.experts.") and key != "model.experts.count" and not have_experts:
            continue
        if key.startswith("model.adapters") and (key == "model.adapters") == have_adapters:
            continue
        if key not in _PROGRESS_KEYS:
            yield key


def differs(deck: Deck, trained_deck: Deck, key: str) -> bool:
    """Return True if a key has different values in two decks."""
    return deck.value(key) != trained_deck.value(key)


def _source_differs(deck: Deck, trained_deck: Deck, _key: str) -> bool:
    """Return True if the deck names other weights to start from, and False without `model.from`."""
    source, old = deck.model.source, trained_deck.model.source
    return source is not None and (old is None or os.path.abspath(source) != os.path.abspath(old))  # noqa: PTH100


def _vocabulary_differs(deck: Deck, trained_deck: Deck, _key: str) -> bool:
    """Return True if both decks give a vocabulary, and the two differ."""
    return None not in {deck.model.vocabulary, trained_deck.model.vocabulary} and differs(
        deck, trained_deck, "model.vocabulary"
    )


def _module_differs(deck: Deck, trained_deck: Deck, _key: str) -> bool:
    """Return True if the function or the name of its file differs. The folder of the file does not count."""

    def name(target: str | None) -> str | None:
        return PurePath(target).name if target is not None and is_file_target(target) else target

    return name(deck.model.module) != name(trained_deck.model.module)


def _arguments_differ(deck: Deck, trained_deck: Deck, _key: str) -> bool:
    return (deck.model.arguments or {}) != (trained_deck.model.arguments or {})


def _parametrization_differs(deck: Deck, trained_deck: Deck, key: str) -> bool:
    """Return True if the scaling factors differ. At its base width, muP is the standard parametrization."""
    return differs(deck, trained_deck, key) and WidthScaling.of(deck) != WidthScaling.of(trained_deck)


def _sequence_differs(deck: Deck, trained_deck: Deck, key: str) -> bool:
    """Return True if the number of learned positions differs."""
    has_positions = deck.model.module is None and deck.model.positions == "learned"
    return has_positions and differs(deck, trained_deck, key)


def _objective_differs(deck: Deck, trained_deck: Deck, _key: str) -> bool:
    """Return True if the objective needs another head, or an additional model that the run does not have."""

    def head(each: Deck) -> bool:
        return each.objective.kind in SCORE_KINDS

    def extra_models(each: Deck) -> set[str]:
        kind = each.objective.kind
        references = {"answers"} if kind in REFERENCE_KINDS else set()
        return references | ({"critic"} if kind == "ppo" else set()) | _policy_reference(each)

    return head(deck) != head(trained_deck) or not extra_models(deck) <= extra_models(trained_deck)


def _reference_is_missing(deck: Deck, trained_deck: Deck, _key: str) -> bool:
    """Return True if the policy needs a reference model, and the run was trained without one."""
    same = deck.objective.kind in POLICY_KINDS and trained_deck.objective.kind in POLICY_KINDS
    return same and not _policy_reference(deck) <= _policy_reference(trained_deck)


def _policy_reference(deck: Deck) -> set[str]:
    return {"reference"} if deck.objective.kind in POLICY_KINDS and deck.objective.beta > 0 else set()


_CHECKS: Mapping[str, Callable[[Deck, Deck, str], bool]] = {
    "model.from": _source_differs,
    "model.vocabulary": _vocabulary_differs,
    "model.parametrization": _parametrization_differs,
    "model.base_width": _parametrization_differs,
    "model.base_head_size": _parametrization_differs,
    "model.module": _module_differs,
    "model.arguments": _arguments_differ,
    "batch.sequence": _sequence_differs,
    "objective.kind": _objective_differs,
    "objective.beta": _reference_is_missing,
}

_REASONS: Mapping[str, str] = {
    "model.from": "has no effect on a run that resumes from its own weights (leave it out)",
    "batch.sequence": "changes its learned positions, which are parameters",
    "objective.kind": "needs a head, a critic or a reference that the run does not have",
    "objective.beta": "needs a reference model, which the run does not have",
}
"""Ends of error messages about keys whose note in the table does not fit a message."""
