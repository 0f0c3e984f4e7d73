"""Settings of compressed reductions, which come from several sections of a deck."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.communication import Communication, OneBitTable, TopKTable
from hpctrain.deck.sections.optimizer import OptimizerTable, SgdTable


@dataclass(frozen=True)
class CompressionSettings:
    """Settings from which a compressed reduction is made.

    Attributes:
        keys: Section [communication], which names the method.
        rule: Table of the optimizer, whose momentum some methods apply before they reduce.
        seed: Seed of the run.
    """

    keys: Communication
    rule: OptimizerTable
    seed: int

    @staticmethod
    def of(deck: Deck) -> CompressionSettings:
        """Return the settings of a deck."""
        return CompressionSettings(deck.communication, deck.optimizer.rule, deck.run.seed)


def updates_before_reduced_momentum(deck: Deck) -> int | None:
    """Return the number of updates after which reductions return gradients that include momentum.

    From then on the optimizer applies no momentum of its own. None means never.
    """
    form, rule = deck.communication.compression, deck.optimizer.rule
    has_momentum = isinstance(rule, SgdTable) and rule.momentum > 0
    is_reduced = isinstance(form, OneBitTable) or (
        isinstance(form, TopKTable) and form.ratio < 1 and has_momentum
    )
    return deck.communication.warmup if is_reduced else None
