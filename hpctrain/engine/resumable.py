"""Comparison of the deck of a run that goes on with the deck that its checkpoint was trained with.

What happens with a key is in the table of `deck/at_resume.py`. A key that is refused there is refused where
its value differs, except for the keys of `_CHECKS`, which know when two values mean the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath

from hpctrain.deck.at_resume import FUNCTION, PARAMETERS, RESUME_RULES, keys_with
from hpctrain.deck.check_local_steps import in_replicas
from hpctrain.deck.objective import OF_SCORES, POLICIES, REFERRED
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import clipped, toml_value
from hpctrain.deck.target import is_file
from hpctrain.engine.companions import critic_deck
from hpctrain.engine.rules import RULES
from hpctrain.errors import HpctrainError
from hpctrain.model.parametrization import Parametrization
from hpctrain.sharding.compression.warmed import momentum_given_after

_BY_WHAT_IS_DONE = ("communication.warmup", "policy.rollout", "policy.epochs")
"""Keys that are refused by what the run has done, not by their values alone."""

_TAKEN_BY_FROM = ("model.experts", "model.adapters", "objective.kind")
"""Keys that change parameters, but in ways that [model] from of a new run takes into account."""


def require_resumable(deck: Deck, before: Deck, path: Path, updates: int, samples: int = 0) -> None:
    """Raise HpctrainError with every key that keeps a run from going on.

    Args:
        deck: The deck of the run that goes on.
        before: The deck that the checkpoint `path` was trained with.
        path: The checkpoint, for messages.
        updates: Optimizer updates that the checkpoint was trained for.
        samples: Samples that it was trained on.
    """
    problems = [
        *_model_problems(deck, before, path),
        *_critic_problems(deck, before, path),
        *_optimizer_problems(deck, before, path),
        *_warmup_problems(deck, before, updates),
        *_rollout_problems(deck, before, path, samples),
    ]
    if problems:
        raise HpctrainError(problems)


def require_same_model(deck: Deck, before: Deck, path: Path) -> None:
    """Raise HpctrainError with every key that gives `deck` another model than that of the checkpoint `path`,
    whose deck is `before`.
    """
    if problems := list(_model_problems(deck, before, path)):
        raise HpctrainError(problems)


def keep_vocabulary(deck: Deck, before: Deck) -> Deck:
    """Return the deck with the vocabulary of the run that it goes on with, where it gives none itself.

    Otherwise the vocabulary would be that of the token file, which may be another one by now.
    """
    vocabulary = before.model.vocabulary
    if vocabulary is None or deck.model.vocabulary is not None:
        return deck
    return deck.with_keys(model={"vocabulary": vocabulary})


def begins_anew(deck: Deck, before: Deck, path: Path) -> str:
    """Return in words which state `path` holds in place of what the optimizer of `deck` needs; "" where it
    holds that.

    Raises:
        HpctrainError: If `optimizer.restart` does not allow to begin with new state.
    """
    if problems := _optimizer_problems(deck, before, path):
        raise HpctrainError(problems)
    return _missing_state(deck, before)[1]


def _model_problems(deck: Deck, before: Deck, path: Path) -> Iterator[str]:
    """Yield a sentence for each key that gives the run another model.

    A key that nobody gave follows other keys. It is told only where no key that was given differs, since with
    those its value goes back, too.
    """
    changed = [key for key in _compared_keys() if _CHECKS.get(key, _differs)(deck, before, key)]
    given = [key for key in changed if key not in deck.sources.defaulted]
    for key in given or changed:
        old = before.value(key)
        was = "without it" if old is None else f"with {clipped(toml_value(old))}"
        rule = RESUME_RULES[key]
        reason = rule.note.partition(";")[0]
        if reason not in {FUNCTION, PARAMETERS}:
            reason = _REASONS[key]
        sentence = f"{path} was trained {was}, and another value {reason}"
        if reason == FUNCTION or key in _TAKEN_BY_FROM:
            sentence += f' (a run of its own can start from its weights with [model] from = "{path}")'
        elif key != "model.from":
            sentence += f" ({'leave it out' if old is None else clipped(toml_value(old)) + ' would do'})"
        yield deck.problem(key, sentence)


def _compared_keys() -> Iterator[str]:
    """Yield the keys that are refused, but for those of tables within keys, which these are compared with."""
    for key in keys_with("refused"):
        if key.count(".") == 1 and key not in _BY_WHAT_IS_DONE:
            yield key


def _differs(deck: Deck, before: Deck, key: str) -> bool:
    return deck.value(key) != before.value(key)


def _source_differs(deck: Deck, before: Deck, _key: str) -> bool:
    """Return whether the run is to start from other weights; nothing reads those where it names none."""
    source, old = deck.model.source, before.model.source
    return source is not None and (old is None or os.path.abspath(source) != os.path.abspath(old))  # noqa: PTH100


def _vocabulary_differs(deck: Deck, before: Deck, _key: str) -> bool:
    """Return whether both decks have a vocabulary, and another one."""
    return None not in {deck.model.vocabulary, before.model.vocabulary} and _differs(
        deck, before, "model.vocabulary"
    )


def _module_differs(deck: Deck, before: Deck, _key: str) -> bool:
    """Return whether functions or their files have other names; the folder of a file may be another one."""

    def name(target: str | None) -> str | None:
        return PurePath(target).name if target is not None and is_file(target) else target

    return name(deck.model.module) != name(before.model.module)


def _arguments_differ(deck: Deck, before: Deck, _key: str) -> bool:
    return (deck.model.arguments or {}) != (before.model.arguments or {})


def _parametrization_differs(deck: Deck, before: Deck, key: str) -> bool:
    """Return whether parameters are multiplied otherwise; muP at its base width is the standard form."""
    return _differs(deck, before, key) and Parametrization.of(deck) != Parametrization.of(before)


def _sequence_differs(deck: Deck, before: Deck, key: str) -> bool:
    """Return whether the model has another number of learned positions."""
    has_positions = deck.model.module is None and deck.model.family == "gpt2"
    return has_positions and _differs(deck, before, key)


def _objective_differs(deck: Deck, before: Deck, _key: str) -> bool:
    """Return whether the objective needs another head, or another model that the run does not have."""

    def head(each: Deck) -> bool:
        return each.objective.kind in OF_SCORES

    def extra_models(each: Deck) -> set[str]:
        kind = each.objective.kind
        referred = {"answers"} if kind in REFERRED else set()
        return referred | ({"critic"} if kind == "ppo" else set()) | _policy_reference(each)

    return head(deck) != head(before) or not extra_models(deck) <= extra_models(before)


def _reference_is_missing(deck: Deck, before: Deck, _key: str) -> bool:
    """Return whether rewards are to be compared with a reference that a run without one never stored."""
    same = deck.objective.kind in POLICIES and before.objective.kind in POLICIES
    return same and not _policy_reference(deck) <= _policy_reference(before)


def _policy_reference(deck: Deck) -> set[str]:
    return {"reference"} if deck.objective.kind in POLICIES and deck.objective.beta > 0 else set()


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
    "model.from": "has no effect on a run that goes on from its own weights (leave it out)",
    "batch.sequence": "changes its positions, which are parameters",
    "objective.kind": "needs what the run does not have: another head, a critic or a reference",
    "objective.beta": "needs a reference, which the run has not kept",
}
"""Ends of sentences for keys whose rule has a longer note."""


def _critic_problems(deck: Deck, before: Deck, path: Path) -> Iterator[str]:
    """Yield what `policy.critic` changes of the critic's model."""
    if deck.objective.kind != "ppo" or before.objective.kind != "ppo":
        return
    if deck.policy.critic == before.policy.critic:
        return
    critics = critic_deck(deck, None), critic_deck(before, None)
    assert critics[0] is not None and critics[1] is not None
    own = {*_model_problems(deck, before, path)}
    for problem in _model_problems(critics[0], critics[1], path):
        if problem not in own:
            yield f"policy.critic: {problem}"


def _missing_state(deck: Deck, before: Deck) -> tuple[str, str]:
    """Return the key for which the optimizer lacks state, and in words what there is instead; "" for both if
    it lacks none.
    """
    new, old = deck.optimizer, before.optimizer
    if new.name != old.name:
        return "optimizer.name", f"the state of {toml_value(old.name)}"
    if new.name == "muon" and set(new.matrices) != set(old.matrices):
        return "optimizer.matrices", f"muon's state of {toml_value(old.matrices)}"
    needed, stored = (RULES[each.optimizer.name](each).names for each in (deck, before))
    if set(needed) <= set(stored):
        return "", ""
    mean = "optimizer.beta1" if new.name == "adafactor" else "optimizer.momentum"
    return mean if _differs(deck, before, mean) else "communication.compress", "no momentum"


def _optimizer_problems(deck: Deck, before: Deck, path: Path) -> list[str]:
    """Return what keeps the optimizer from going on, or from beginning with new state."""
    key, held = _missing_state(deck, before)
    if not key:
        return []
    if not deck.optimizer.restart:
        would = "optimizer.restart = true begins with new state"
        return [deck.problem(key, f"{path} holds {held} to go on from ({would})")]
    if deck.communication.warmup and (momentum_given_after(deck) or in_replicas(deck)):
        sentence = (
            "counts updates of the whole run, but those of an optimizer that begins anew "
            f'(optimizer.restart) begin at 0; a run of its own starts from it with [model] from = "{path}"'
        )
        return [deck.problem("communication.warmup", sentence)]
    return []


def _warmup_problems(deck: Deck, before: Deck, updates: int) -> list[str]:
    """Return why replicas that have parted cannot be summed in every step again as if they had not."""
    over, warmup = before.communication.warmup, deck.communication.warmup
    if min(deck.layout.replicas, before.layout.replicas) > 1 and over < updates < warmup:
        sentence = (
            f"replicas have parted after {over}, and after {updates} have moments of their own, with which "
            f"no step sums them as one ({over} would do)"
        )
        return [deck.problem("communication.warmup", sentence)]
    return []


def _rollout_problems(deck: Deck, before: Deck, path: Path, samples: int) -> list[str]:
    """Return why rollouts of another size cannot begin after what the run has done.

    A policy would never be between two of them, which is where it looks for signals.
    """
    if deck.objective.kind not in POLICIES:
        return []
    sizes = (each.policy.rollout or each.batch.global_size for each in (deck, before))
    size, old = (rollout * each.policy.epochs for rollout, each in zip(sizes, (deck, before), strict=True))
    if size == old or samples % size == 0:
        return []
    key = "policy.epochs" if _differs(deck, before, "policy.epochs") else "policy.rollout"
    sentence = f"{path} was trained on {samples} samples, which are no whole rollouts of {size}"
    return [deck.problem(key, f"{sentence} (policy.rollout x policy.epochs must divide them)")]
