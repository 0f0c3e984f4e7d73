"""Assignment of ranks to the models of a run that trains with rewards.

A model may have dedicated ranks. All other ranks, rank 0 among them, hold the policy and the other models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator

from hpctrain.deck.objective import POLICIES
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.text import counted

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

POLICY, CRITIC, REFERENCE, REWARD = "policy", "critic", "reference", "reward"

_KEYS = {CRITIC: "critic_ranks", REFERENCE: "reference_ranks", REWARD: "reward_ranks"}


def _named(text: str) -> str:
    if text != POLICY and _range(text) is None:
        raise ValueError
    return text


def _range(text: str) -> range | None:
    """Return the ranks that a text such as "4-7" names; None if it is wrong."""
    first, dash, last = text.partition("-")
    if not all(each.isascii() and each.isdecimal() and len(each) < 8 for each in (first, last or "0")):
        return None
    found = range(int(first), int(last if dash else first) + 1) if last or not dash else range(0)
    return found if len(found) else None


RankRange = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    AfterValidator(_named),
]
"""Dedicated ranks, such as "4-7" or 4, or "policy" for the ranks of the policy."""


class SharedRanks(NamedTuple):
    """Ranks that hold the same models of a run."""

    models: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankPartition:
    """Assignment of ranks to the models of a run that trains with rewards.

    Attributes:
        own: Dedicated ranks of each model that has any.
        ranks: Number of ranks of the run, dedicated ones included.
    """

    own: Mapping[str, range]
    ranks: int

    @staticmethod
    def of(deck: Deck, ranks: int) -> RankPartition:
        """Return the partition that a deck makes of `ranks` ranks, among which its dedicated ranks are."""
        return RankPartition(dedicated_ranks(deck), ranks)

    @property
    def policy(self) -> tuple[int, ...]:
        """Ranks that hold the policy."""
        return tuple(rank for rank in range(self.ranks) if not any(rank in own for own in self.own.values()))

    @property
    def other_ranks(self) -> tuple[int, ...]:
        """Ranks that do not hold the policy."""
        return tuple(sorted({rank for own in self.own.values() for rank in own}))

    def of_model(self, model: str) -> Sequence[int]:
        """Return the ranks that hold a model."""
        return self.own.get(model, self.policy)

    @property
    def parties(self) -> list[SharedRanks]:
        """Sets of ranks, each with the models that all of its ranks hold.

        The first set holds the policy and all models without dedicated ranks, even if the run does not use
        these models. The other sets are ordered by their lowest rank.
        """
        beside = tuple(model for model in _KEYS if model not in self.own)
        found: dict[tuple[str, ...], tuple[int, ...]] = {}
        for rank in self.other_ranks:
            models = tuple(model for model, own in self.own.items() if rank in own)
            found[models] = (*found.get(models, ()), rank)
        return [SharedRanks((POLICY, *beside), self.policy), *(SharedRanks(*each) for each in found.items())]

    def party(self, rank: int) -> int:
        """Return the index of the set in `parties` that contains a rank."""
        return next(number for number, each in enumerate(self.parties) if rank in each.ranks)


def dedicated_ranks(deck: Deck) -> dict[str, range]:
    """Return the dedicated ranks of each model; empty if the deck does not train with rewards."""
    if deck.objective.kind not in POLICIES:
        return {}
    found = {model: _range(getattr(deck.policy, name)) for model, name in _KEYS.items()}
    return {model: ranks for model, ranks in found.items() if ranks is not None}


def undivided(deck: Deck) -> Deck:
    """Return the deck without dedicated ranks, so that all ranks hold all models."""
    return deck.with_keys(policy=dict.fromkeys(_KEYS.values(), POLICY))


def require_undivided(deck: Deck, why: str) -> None:
    """Raise HpctrainError if models have dedicated ranks; `why` is the reason that the message gives."""
    apart = [
        deck.problem(f"policy.{_KEYS[model]}", f'{why} ("{POLICY}" would do here)')
        for model in dedicated_ranks(deck)
    ]
    if apart:
        raise HpctrainError(apart)


def count_dedicated_ranks(deck: Deck) -> int:
    """Return the number of ranks that do not hold the policy."""
    return len(RankPartition(dedicated_ranks(deck), 0).other_ranks)


def world_division_problems(deck: Deck, ranks: int) -> Iterator[DeckProblem]:
    """Yield problems of dedicated ranks in a run of `ranks` ranks: missing ones, or none for the policy."""
    for model, own in dedicated_ranks(deck).items():
        if own[-1] >= ranks:
            there = f"there {'is' if ranks == 1 else 'are'} {counted(ranks, 'rank')}, from 0 on"
            sentence = f'names rank {own[-1]}, but {there} ("{POLICY}" would have the policy\'s)'
            yield DeckProblem(f"policy.{_KEYS[model]}", sentence)
    if dedicated_ranks(deck) and not RankPartition.of(deck, ranks).policy:
        first, *further = (f"policy.{_KEYS[model]}" for model in dedicated_ranks(deck))
        yield DeckProblem(first, f"leaves none of {counted(ranks, 'rank')} for the policy", tuple(further))


_ALONE: tuple[tuple[str, object, str], ...] = (
    ("checkpoint.memory_every", 0, "nothing goes back to copies"),
    ("model.experts.record_routing", 0, "it notes choices of all ranks"),
    ("run.trace", False, "it shows steps that all ranks make together"),
    ("stability.corruption", "off", "it compares steps that all ranks make together"),
    ("stability.verify_layout", False, "it compares a step that all ranks make together"),
)
"""Keys with the only value that dedicated ranks allow, and the reason why others are refused."""


def division_problems(deck: Deck, judged_by_models: bool, referred: bool) -> Iterator[DeckProblem]:
    """Yield the problems of dedicated ranks, and of keys that exclude them, if a deck trains with rewards.

    Args:
        deck: The deck.
        judged_by_models: True if reward models compute some of the rewards.
        referred: True if the loss depends on a reference model.
    """
    own = dedicated_ranks(deck)
    for model, ranks in own.items():
        name = f"policy.{_KEYS[model]}"
        if 0 in ranks:
            yield DeckProblem(name, "names rank 0, which has the policy (the last ranks would do)")
    vain = {
        CRITIC: (
            deck.objective.kind == "ppo",
            "objective.kind",
            'is for objective.kind = "ppo", which has a critic',
        ),
        REFERENCE: (referred, "objective.beta", "has no effect with objective.beta = 0"),
        REWARD: (judged_by_models, "policy.reward", "has no effect without the checkpoint of a reward model"),
    }
    for model, (used, key, sentence) in vain.items():
        if model in own and not used:
            yield DeckProblem(f"policy.{_KEYS[model]}", f"{sentence} (leave it out)", (key,))
    if not own:
        return
    keys = tuple(f"policy.{_KEYS[model]}" for model in own)
    for name, value, why in _ALONE:
        if deck.value(name) not in {None, value}:
            sentence = f"does not go with {keys[0]}: {why} ({toml_value(value)} would do)"
            yield DeckProblem(name, sentence, keys)
    if deck.layout.auto:
        sentence = f"does not go with {keys[0]}: ranks are not chosen for several models (leave it out)"
        yield DeckProblem("layout.auto", sentence, keys)
    if deck.stability.spike == "rollback":
        sentence = f'does not go with {keys[0]}: nothing goes back to copies ("skip" would do)'
        yield DeckProblem("stability.spike", sentence, keys)
    if deck.machine.rates is not None:
        sentence = f"has no effect with {keys[0]}, whose steps are not planned (leave it out)"
        yield DeckProblem("machine.rates", sentence, keys, no_effect=True)
