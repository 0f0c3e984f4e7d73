"""What a run that learns by rewards holds beside the model that it trains: their decks and layouts."""

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

TEXTS_AT_A_TIME = 64
"""That each copy of the model writes, at the most: which have places in its cache."""


_OWN_SECTIONS = (
    *("model", "layout", "optimizer", "learning_rate", "precision", "memory"),
    *("communication", "stability", "machine"),
)
_OF_REFERENCE = ("layout", "precision", "memory", "communication", "machine")
_OWN_KEYS = ("batch.micro_size",)


def companion_deck(
    deck: Deck,
    changes: Sequence[str],
    ranks: int | None,
    key: str,
    own_sections: Sequence[str] = _OWN_SECTIONS,
) -> Deck:
    """The deck of a model on so many ranks, which have no other; with other values of keys, as `--set` has
    them, which `key` of the deck tells. HpctrainError with all that is wrong then, under that key.
    """
    alone = without_dedicated_ranks(deck)
    if not changes and not dedicated_ranks(deck):
        return deck
    for change in changes:
        name = change.partition("=")[0].strip()
        section, dot, _ = name.partition(".")
        if dot and section in Deck.model_fields and section not in own_sections and name not in _OWN_KEYS:
            reason = "must be the same for all models of the run"
            if section in _OWN_SECTIONS:
                reason = "does not apply to the reference model, which is not trained"
            raise HpctrainError(
                f"{key}: {name} {reason} (allowed: keys of {', '.join(own_sections)}, and "
                f"{', '.join(_OWN_KEYS)})"
            )
    try:
        own = changed_deck(alone, changes, ranks)
    except HpctrainError as error:
        prefix = re.compile(f"^(--set |{re.escape(deck.sources.name)}: )")
        raise type(error)([f"{key}: {prefix.sub('', each)}" for each in error.problems]) from None
    return own.with_runtime_choices(replace(deck.runtime_choices, split=None))


def critic_deck(deck: Deck, ranks: int | None) -> Deck | None:
    """Of the engine that learns what rewards are to be expected in a run on so many ranks, if there is one;
    errors as above.
    """
    if deck.objective.kind != "ppo":
        return None
    own = companion_deck(deck, deck.policy.critic, _there(deck, ranks, CRITIC), "policy.critic")
    return own.with_keys(
        objective={"kind": "reward"}, run={"noise_scale_steps": 0}, stability={"spike": "off"}
    )


def reference_deck(deck: Deck, ranks: int | None) -> Deck | None:
    """Of the model that the run starts from, where something asks one of its own; errors as above."""
    if deck.objective.kind not in POLICY_KINDS or not deck.objective.beta or shares_reference(deck):
        return None
    own = companion_deck(
        deck, deck.policy.reference, _there(deck, ranks, REFERENCE), "policy.reference", _OF_REFERENCE
    )
    return own.with_keys(
        objective={"kind": "next-token"},
        memory={"optimizer": "device", "activations": "keep"},
        communication={"compress": "none"},
        run={"noise_scale_steps": 0},
        stability={"corruption": "off", "check_parameters": False},
    )


def _there(deck: Deck, ranks: int | None, model: str) -> int | None:
    """How many of a run's ranks have a model, where that is known."""
    own = dedicated_ranks(deck)
    if ranks is None or model in own:
        return len(own[model]) if model in own else None
    return len(RankPartition.of(deck, ranks).policy)


def shares_reference(deck: Deck) -> bool:
    """Whether the reference is the policy itself with the adapters of its start: nothing else is trained."""
    asked = deck.objective.kind in POLICY_KINDS and deck.objective.beta > 0
    own = deck.policy.reference or REFERENCE in dedicated_ranks(deck)
    return asked and deck.model.adapters is not None and not own


def writes_itself(deck: Deck) -> bool:
    """Whether the trained model's own parts write answers, as each rank of its tensor axis has all that
    takes; else a copy does, in a layout of that axis alone.
    """
    layout = deck.layout
    whole = layout.pipeline == layout.context == layout.expert == 1 and not layout.sequence_parallel
    return whole and layout.zero < 3 and deck.memory.parameters == "device"


def texts_at_a_time(deck: Deck, copies: int) -> int:
    """Answers that each of so many copies of the model writes beside each other: those of a rollout that are
    its own, or as many as there are places for.
    """
    samples = deck.policy.samples or 1
    prompts = (deck.policy.rollout or deck.batch.global_size) // samples
    return min(TEXTS_AT_A_TIME, -(-prompts // copies) * samples)


def is_checkpoint(text: str) -> bool:
    """Whether a reward is named by the checkpoint of a model, or by the folder of a run."""
    if text.startswith(PATTERN):
        return False
    return text.endswith(".h5") or "/checkpoints/" in text or Path(text).is_dir()
