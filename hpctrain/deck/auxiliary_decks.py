"""Decks of the auxiliary models of a run with rewards: critic, reference and the copy that generates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.deck.read import changed_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.deck.sections.policy import PATTERN
from hpctrain.deck.sections.rank_partition import (
    CRITIC,
    REFERENCE,
    RankPartition,
    dedicated_ranks,
    without_dedicated_ranks,
)
from hpctrain.errors import HpctrainError

COPY = "writing copy"

MOST_CONCURRENT_TEXTS = 64
"""Largest number of texts that each copy of the model generates at a time, for which its cache has space."""


_CHANGEABLE_SECTIONS = (
    *("model", "layout", "optimizer", "learning_rate", "precision", "memory"),
    *("communication", "stability", "machine"),
)
_REFERENCE_SECTIONS = ("layout", "precision", "memory", "communication", "machine")
_CHANGEABLE_KEYS = ("batch.micro_size",)


def auxiliary_deck(
    deck: Deck,
    changes: Sequence[str],
    ranks: int | None,
    key: str,
    allowed_sections: Sequence[str] = _CHANGEABLE_SECTIONS,
) -> Deck:
    """Return the deck of an auxiliary model.

    Args:
        deck: Deck of the run.
        changes: Values of keys that differ from the run's, as in `--set`.
        ranks: Number of ranks that hold the model; None if it is unknown.
        key: Key of the deck that has the changes, for messages.
        allowed_sections: Sections that may be changed.

    Raises:
        HpctrainError: The changes are invalid. The error names all problems.
    """
    undivided = without_dedicated_ranks(deck)
    if not changes and not dedicated_ranks(deck):
        return deck
    for change in changes:
        name = change.partition("=")[0].strip()
        section, dot, _ = name.partition(".")
        if (
            dot
            and section in Deck.model_fields
            and section not in allowed_sections
            and name not in _CHANGEABLE_KEYS
        ):
            reason = "must be the same for all models of the run"
            if section in _CHANGEABLE_SECTIONS:
                reason = "does not apply to the reference model, which is not trained"
            raise HpctrainError(
                f"{key}: {name} {reason} (allowed: keys of {', '.join(allowed_sections)}, and "
                f"{', '.join(_CHANGEABLE_KEYS)})"
            )
    try:
        changed = changed_deck(undivided, changes, ranks)
    except HpctrainError as error:
        prefix = re.compile(f"^(--set |{re.escape(deck.sources.name)}: )")
        raise type(error)([f"{key}: {prefix.sub('', each)}" for each in error.problems]) from None
    return changed.with_runtime_choices(replace(deck.runtime_choices, split=None))


def critic_deck(deck: Deck, ranks: int | None) -> Deck | None:
    """Return the deck of the critic, which learns to predict rewards; None if the run has none.

    Args:
        deck: Deck of the run.
        ranks: Number of ranks of the run; None if it is unknown.

    Raises:
        HpctrainError: `policy.critic` has invalid changes.
    """
    if deck.objective.kind != "ppo":
        return None
    critic = auxiliary_deck(deck, deck.policy.critic, _model_ranks(deck, ranks, CRITIC), "policy.critic")
    return critic.with_keys(
        objective={"kind": "reward"}, run={"noise_scale_steps": 0}, stability={"spike": "off"}
    )


def reference_deck(deck: Deck, ranks: int | None) -> Deck | None:
    """Return the deck of the reference model; None if the run needs none, or none of its own.

    Args:
        deck: Deck of the run.
        ranks: Number of ranks of the run; None if it is unknown.

    Raises:
        HpctrainError: `policy.reference` has invalid changes.
    """
    if deck.objective.kind not in POLICY_KINDS or not deck.objective.beta or shares_reference(deck):
        return None
    reference = auxiliary_deck(
        deck,
        deck.policy.reference,
        _model_ranks(deck, ranks, REFERENCE),
        "policy.reference",
        _REFERENCE_SECTIONS,
    )
    return reference.with_keys(
        objective={"kind": "next-token"},
        memory={"optimizer": "device", "activations": "keep"},
        communication={"compress": "none"},
        run={"noise_scale_steps": 0},
        stability={"corruption": "off", "check_parameters": False},
    )


def _model_ranks(deck: Deck, ranks: int | None, model: str) -> int | None:
    """Return how many of a run's ranks hold a model, or None if it is unknown."""
    dedicated = dedicated_ranks(deck)
    if ranks is None or model in dedicated:
        return len(dedicated[model]) if model in dedicated else None
    return len(RankPartition.of(deck, ranks).policy)


def shares_reference(deck: Deck) -> bool:
    """Return True if the reference is the policy with its initial adapters, since only these are trained."""
    needs_reference = deck.objective.kind in POLICY_KINDS and deck.objective.beta > 0
    differs = deck.policy.reference or REFERENCE in dedicated_ranks(deck)
    return needs_reference and deck.model.adapters is not None and not differs


def generates_itself(deck: Deck) -> bool:
    """Return True if the trained model itself generates answers.

    That requires that each tensor group holds the whole model. Otherwise a copy with a layout of tensor ranks
    only generates them.
    """
    layout = deck.layout
    is_complete = layout.pipeline == layout.context == layout.expert == 1 and not layout.sequence_parallel
    return is_complete and layout.zero < 3 and deck.memory.parameters == "device"


def concurrent_texts(deck: Deck, copies: int) -> int:
    """Return how many answers each copy of the model generates at a time.

    Args:
        deck: Deck of the run.
        copies: Number of copies of the model, which share the answers of a rollout.
    """
    samples = deck.policy.samples or 1
    prompts = (deck.policy.rollout or deck.batch.global_size) // samples
    return min(MOST_CONCURRENT_TEXTS, -(-prompts // copies) * samples)


def is_checkpoint(text: str) -> bool:
    """Return True if a reward of a deck is a checkpoint of a model, or the folder of a run."""
    if text.startswith(PATTERN):
        return False
    return text.endswith(".h5") or "/checkpoints/" in text or Path(text).is_dir()
