"""Comparison of the deck of a resumed run with the deck that its checkpoint was trained with.

The file `deck/resume_rules.toml` has the policy of each key. A key with the policy "refused" is an
error if its value differs. For the keys in `_CHECKS` a function decides instead whether two values differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath

from hpctrain.deck.code import is_file_target
from hpctrain.deck.resume_rules import FUNCTION, PARAMETERS, keys_of_policy, resume_rules
from hpctrain.deck.schema import Deck, field_of
from hpctrain.deck.sections.local_steps import has_outer_model
from hpctrain.deck.sections.objective import POLICY_KINDS, REFERENCE_KINDS, SCORE_KINDS
from hpctrain.deck.sections.optimizer import MuonTable
from hpctrain.deck.sources import clipped, toml_value
from hpctrain.engine.auxiliary_decks import critic_deck
from hpctrain.engine.update_rules import RULES, compression_settings
from hpctrain.errors import HpctrainError
from hpctrain.model.width_scaling import WidthScaling

_PROGRESS_KEYS = ("communication.warmup", "policy.rollout", "policy.epochs")
"""Keys that are refused depending on the number of steps of the checkpoint, not on their values alone."""

_ALLOWED_WITH_FROM = ("model.experts.count", "model.adapters", "objective.kind")
"""Keys that change parameters in a way that a new run with [model] from can convert."""


def require_resumable(deck: Deck, trained_deck: Deck, path: Path, updates: int, samples: int = 0) -> None:
    """Check that a run can resume from a checkpoint with another deck.

    Args:
        deck: The deck of the resumed run.
        trained_deck: The deck that the checkpoint was trained with.
        path: The checkpoint, for messages.
        updates: Number of optimizer updates that the checkpoint was trained for.
        samples: Number of samples that it was trained on.

    Raises:
        HpctrainError: The run cannot resume. The error names every key that prevents it.
    """
    problems = [
        *_model_problems(deck, trained_deck, path),
        *_critic_problems(deck, trained_deck, path),
        *_optimizer_problems(deck, trained_deck, path),
        *_warmup_problems(deck, trained_deck, updates),
        *_rollout_problems(deck, trained_deck, path, samples),
    ]
    if problems:
        raise HpctrainError(problems)


def require_same_model(deck: Deck, trained_deck: Deck, path: Path) -> None:
    """Check that a deck describes the same model as a checkpoint.

    Args:
        deck: The deck to check.
        trained_deck: The deck that the checkpoint was trained with.
        path: The checkpoint, for messages.

    Raises:
        HpctrainError: The model differs. The error names every key that changes it.
    """
    if problems := list(_model_problems(deck, trained_deck, path)):
        raise HpctrainError(problems)


def keep_vocabulary(deck: Deck, trained_deck: Deck) -> Deck:
    """Return the deck with the vocabulary of the checkpoint's deck, unless it gives one itself.

    Otherwise the vocabulary would follow the token file, which may have changed since then.
    """
    vocabulary = trained_deck.model.vocabulary
    if vocabulary is None or deck.model.vocabulary is not None:
        return deck
    return deck.with_keys(model={"vocabulary": vocabulary})


def replaced_optimizer_state(deck: Deck, trained_deck: Deck, path: Path) -> str:
    """Return a phrase for the optimizer state of a checkpoint that the deck's optimizer cannot use.

    Args:
        deck: The deck of the resumed run.
        trained_deck: The deck that the checkpoint was trained with.
        path: The checkpoint, for messages.

    Returns:
        A phrase such as 'the state of "adamw"'; "" if the checkpoint has all state that is needed.

    Raises:
        HpctrainError: State is missing, and the deck does not allow to initialize it (`optimizer.restart`).
    """
    if problems := _optimizer_problems(deck, trained_deck, path):
        raise HpctrainError(problems)
    return _missing_state(deck, trained_deck)[1]


def _model_problems(deck: Deck, trained_deck: Deck, path: Path) -> Iterator[str]:
    """Yield a sentence for each key that changes the model.

    The value of a key that the user did not give depends on other keys. Such keys are reported only if no
    given key differs, since their values change back together with the given keys.
    """
    changed = [
        key
        for key in _compared_keys(deck, trained_deck)
        if _CHECKS.get(key, _differs)(deck, trained_deck, key)
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


def _differs(deck: Deck, trained_deck: Deck, key: str) -> bool:
    return deck.value(key) != trained_deck.value(key)


def _source_differs(deck: Deck, trained_deck: Deck, _key: str) -> bool:
    """Return True if the deck names other weights to start from, and False without `model.from`."""
    source, old = deck.model.source, trained_deck.model.source
    return source is not None and (old is None or os.path.abspath(source) != os.path.abspath(old))  # noqa: PTH100


def _vocabulary_differs(deck: Deck, trained_deck: Deck, _key: str) -> bool:
    """Return True if both decks give a vocabulary, and the two differ."""
    return None not in {deck.model.vocabulary, trained_deck.model.vocabulary} and _differs(
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
    return _differs(deck, trained_deck, key) and WidthScaling.of(deck) != WidthScaling.of(trained_deck)


def _sequence_differs(deck: Deck, trained_deck: Deck, key: str) -> bool:
    """Return True if the number of learned positions differs."""
    has_positions = deck.model.module is None and deck.model.positions == "learned"
    return has_positions and _differs(deck, trained_deck, key)


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
"""Predicates of error messages about keys whose note in the table does not fit a message."""


def _critic_problems(deck: Deck, trained_deck: Deck, path: Path) -> Iterator[str]:
    """Yield a sentence for each key of `policy.critic` that changes the critic's model."""
    if deck.objective.kind != "ppo" or trained_deck.objective.kind != "ppo":
        return
    if deck.policy.critic == trained_deck.policy.critic:
        return
    critics = critic_deck(deck, None), critic_deck(trained_deck, None)
    assert critics[0] is not None and critics[1] is not None
    own = {*_model_problems(deck, trained_deck, path)}
    for problem in _model_problems(critics[0], critics[1], path):
        if problem not in own:
            yield f"policy.critic: {problem}"


def _missing_state(deck: Deck, trained_deck: Deck) -> tuple[str, str]:
    """Return the key that needs missing optimizer state, and a phrase for the state that is there instead.

    Both are "" if no state is missing.
    """
    new, old = deck.optimizer, trained_deck.optimizer
    if new.name != old.name:
        return "optimizer.name", f"the state of {toml_value(old.name)}"
    rules = new.rule, old.rule
    if isinstance(rules[0], MuonTable) and isinstance(rules[1], MuonTable):
        patterns = rules[1].matrices
        if set(rules[0].matrices) != set(patterns):
            return "optimizer.muon.matrices", f"muon's state of {toml_value(patterns)}"
    needed, stored = (RULES[each.optimizer.name](each).names for each in (deck, trained_deck))
    if set(needed) <= set(stored):
        return "", ""
    mean = f"optimizer.{new.name}.{'beta1' if new.name == 'adafactor' else 'momentum'}"
    has_changed = field_of(mean) is not None and _differs(deck, trained_deck, mean)
    return mean if has_changed else "communication.compress", "no momentum"


def _optimizer_problems(deck: Deck, trained_deck: Deck, path: Path) -> list[str]:
    """Return why the optimizer can neither continue with the stored state nor begin with new state."""
    key, stored = _missing_state(deck, trained_deck)
    if not key:
        return []
    if not deck.optimizer.restart:
        remedy = "optimizer.restart = true starts with new state"
        return [deck.problem(key, f"{path} holds {stored} ({remedy})")]
    if deck.communication.warmup and (compression_settings(deck).momentum_after or has_outer_model(deck)):
        sentence = (
            "conflicts with optimizer.restart, with which the optimizer counts updates from 0; "
            f'start a new run from its weights with [model] from = "{path}"'
        )
        return [deck.problem("communication.warmup", sentence)]
    return []


def _warmup_problems(deck: Deck, trained_deck: Deck, updates: int) -> list[str]:
    """Return why replicas that have diverged cannot sum their gradients in every step again."""
    over, warmup = trained_deck.communication.warmup, deck.communication.warmup
    if min(deck.layout.replicas, trained_deck.layout.replicas) > 1 and over < updates < warmup:
        sentence = (
            f"replicas diverged after update {over}; after {updates} updates their optimizer states differ, "
            f"so gradients cannot be reduced in every step again (expected {over})"
        )
        return [deck.problem("communication.warmup", sentence)]
    return []


def _rollout_problems(deck: Deck, trained_deck: Deck, path: Path, samples: int) -> list[str]:
    """Return why rollouts of another size cannot begin at the step of the checkpoint.

    The checkpoint must be between two rollouts of the new size: the run handles signals only there.
    """
    if deck.objective.kind not in POLICY_KINDS:
        return []
    sizes = (each.policy.rollout or each.batch.global_size for each in (deck, trained_deck))
    size, old = (
        rollout * each.policy.epochs for rollout, each in zip(sizes, (deck, trained_deck), strict=True)
    )
    if size == old or samples % size == 0:
        return []
    key = "policy.epochs" if _differs(deck, trained_deck, "policy.epochs") else "policy.rollout"
    sentence = (
        f"{path} was trained on {samples} samples, which is not a multiple of {size}, the samples per rollout"
    )
    return [deck.problem(key, f"{sentence} (policy.rollout x policy.epochs must divide them)")]
