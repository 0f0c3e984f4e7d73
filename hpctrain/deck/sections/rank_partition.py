"""Assignment of ranks to the models of a run that trains with rewards.

A model may have dedicated ranks. All other ranks, rank 0 among them, hold the policy and the other models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator

from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

POLICY, CRITIC, REFERENCE, REWARD = "policy", "critic", "reference", "reward"
"""Names of the models of a run that trains with rewards. `REWARD` stands for all reward models."""


RANK_KEYS = {CRITIC: "critic_ranks", REFERENCE: "reference_ranks", REWARD: "reward_ranks"}
"""Key of [policy] with the dedicated ranks of each model that may have any."""


def _validate_ranks(text: str) -> str:
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
    AfterValidator(_validate_ranks),
]
"""Dedicated ranks, such as "4-7" or 4, or "policy" for the ranks of the policy."""


class SharedRanks(NamedTuple):
    """Ranks that hold the same models of a run.

    Attributes:
        models: Names of these models, such as `POLICY`.
        ranks: Numbers of the ranks in ascending order.
    """

    models: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankPartition:
    """Assignment of ranks to the models of a run that trains with rewards.

    Attributes:
        dedicated: Dedicated ranks of each model that has any.
        ranks: Number of ranks of the run, dedicated ones included.
    """

    dedicated: Mapping[str, range]
    ranks: int

    @staticmethod
    def of(deck: Deck, ranks: int) -> RankPartition:
        """Return the partition that a deck makes of a number of ranks. Local; no groups are made.

        Args:
            deck: The deck, whose dedicated ranks should be below `ranks`; this is not checked.
            ranks: Number of ranks of the run, dedicated ones included.
        """
        return RankPartition(dedicated_ranks(deck), ranks)

    @property
    def policy(self) -> tuple[int, ...]:
        """Ranks that hold the policy, in ascending order: all that are not dedicated to another model."""
        return tuple(
            rank for rank in range(self.ranks) if not any(rank in own for own in self.dedicated.values())
        )

    @property
    def other_ranks(self) -> tuple[int, ...]:
        """Ranks that do not hold the policy, in ascending order; empty if no model has dedicated ranks."""
        return tuple(sorted({rank for own in self.dedicated.values() for rank in own}))

    def of_model(self, model: str) -> Sequence[int]:
        """Return the ranks that hold a model in ascending order: its dedicated ranks, or those of the policy.

        Args:
            model: Name of the model: `POLICY`, `CRITIC`, `REFERENCE` or `REWARD`.
        """
        return self.dedicated.get(model, self.policy)

    @property
    def rank_sets(self) -> list[SharedRanks]:
        """Sets of ranks, each with the models that all of its ranks hold.

        The first set holds the policy and all models without dedicated ranks. It lists these models even if
        the run does not use them. The other sets are ordered by their lowest rank. A rank is in exactly one
        set.
        """
        with_policy = tuple(model for model in RANK_KEYS if model not in self.dedicated)
        other_sets: dict[tuple[str, ...], tuple[int, ...]] = {}
        for rank in self.other_ranks:
            models = tuple(model for model, ranks in self.dedicated.items() if rank in ranks)
            other_sets[models] = (*other_sets.get(models, ()), rank)
        policy_set = SharedRanks((POLICY, *with_policy), self.policy)
        return [policy_set, *(SharedRanks(*each) for each in other_sets.items())]

    def rank_set_index(self, rank: int) -> int:
        """Return the index in `rank_sets` of the one set that contains a rank. Local.

        The property `rank_sets` lists the ranks by the models that they hold. The ranks that hold the policy
        are its first set, so the result is 0 for them.

        Args:
            rank: Number of the rank among all ranks of the run.

        Raises:
            ValueError: The run has no such rank.
        """
        for number, each in enumerate(self.rank_sets):
            if rank in each.ranks:
                return number
        raise ValueError(f"rank {rank} is not one of the {self.ranks} ranks of the run")


def dedicated_ranks(deck: Deck) -> dict[str, range]:
    """Return the dedicated ranks of each model that has any, by the name of the model.

    Names are `CRITIC`, `REFERENCE` and `REWARD`; ranks are numbers among all ranks of the run. The result is
    empty if the deck does not train with rewards.
    """
    if deck.objective.kind not in POLICY_KINDS:
        return {}
    found = {model: _range(getattr(deck.policy, name)) for model, name in RANK_KEYS.items()}
    return {model: ranks for model, ranks in found.items() if ranks is not None}


def without_dedicated_ranks(deck: Deck) -> Deck:
    """Return a copy of the deck without dedicated ranks, so that all ranks hold all models."""
    return deck.with_keys(policy=dict.fromkeys(RANK_KEYS.values(), POLICY))


def require_no_dedicated_ranks(deck: Deck, why: str) -> None:
    """Raise an error if models have dedicated ranks; otherwise do nothing. Local.

    Keys of dedicated ranks in a deck that does not train a policy are no error here.

    Args:
        deck: The deck.
        why: Reason in the message, as the end of a sentence about a key such as policy.critic_ranks: "is for
            `hpctrain run` and `resume`".

    Raises:
        HpctrainError: The deck trains a policy, and a model has dedicated ranks.
    """
    apart = [
        deck.problem(f"policy.{RANK_KEYS[model]}", f'{why} (use "{POLICY}")')
        for model in dedicated_ranks(deck)
    ]
    if apart:
        raise HpctrainError(apart)


def count_dedicated_ranks(deck: Deck) -> int:
    """Return the number of ranks that do not hold the policy; 0 if no model has dedicated ranks."""
    return len(RankPartition(dedicated_ranks(deck), 0).other_ranks)
