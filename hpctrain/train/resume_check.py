"""Checks whether a run can resume from a checkpoint with another deck, and with which optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpctrain.checkpoint.same_model import differs, model_problems
from hpctrain.deck.auxiliary_decks import critic_deck
from hpctrain.deck.schema import Deck, field_of
from hpctrain.deck.sections.local_steps import has_outer_model
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.deck.sections.optimizer import MuonTable
from hpctrain.deck.sources import toml_value
from hpctrain.engine.stages.update_rules import RULES, compression_settings
from hpctrain.errors import HpctrainError


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
        *model_problems(deck, trained_deck, path),
        *_critic_problems(deck, trained_deck, path),
        *_optimizer_problems(deck, trained_deck, path),
        *_warmup_problems(deck, trained_deck, updates),
        *_rollout_problems(deck, trained_deck, path, samples),
    ]
    if problems:
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


def _critic_problems(deck: Deck, trained_deck: Deck, path: Path) -> Iterator[str]:
    """Yield a sentence for each key of `policy.critic` that changes the critic's model."""
    if deck.objective.kind != "ppo" or trained_deck.objective.kind != "ppo":
        return
    if deck.policy.critic == trained_deck.policy.critic:
        return
    critics = critic_deck(deck, None), critic_deck(trained_deck, None)
    assert critics[0] is not None and critics[1] is not None
    own = {*model_problems(deck, trained_deck, path)}
    for problem in model_problems(critics[0], critics[1], path):
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
    has_changed = field_of(mean) is not None and differs(deck, trained_deck, mean)
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
    key = "policy.epochs" if differs(deck, trained_deck, "policy.epochs") else "policy.rollout"
    sentence = (
        f"{path} was trained on {samples} samples, which is not a multiple of {size}, the samples per rollout"
    )
    return [deck.problem(key, f"{sentence} (policy.rollout x policy.epochs must divide them)")]
