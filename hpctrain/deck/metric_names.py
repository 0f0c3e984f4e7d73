"""Figures by which runs are compared: the loss of training, or what evaluations of a set tell."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.deck.check_evaluation import NOTHING_EVALUATED, set_names, unknown_set
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError

TRAINING_LOSS = "loss"
"""What the loss of training is called."""

_KINDS = ("perplexity", "bits_per_byte")


@dataclass(frozen=True)
class MetricName:
    """A figure of evaluations of a set, "loss" or another one; `of` is empty where it is that of training."""

    of: str = ""
    kind: str = "loss"

    @property
    def words(self) -> str:
        """As a table calls it."""
        return f"{self.of} {self.kind.replace('_per_', '/')}".strip()


def parse_metric_name(deck: Deck, name: str) -> MetricName:
    """The figure that a run of the deck has by this name: "loss" is that of training; a set that
    checkpoint.keep_best takes stands for its loss, followed by /perplexity or /bits_per_byte for these.

    HpctrainError where a run has none of that name.
    """
    names = set_names(deck)
    of, slash, kind = name.partition("/")
    if of in names and not slash:
        return MetricName(of)
    if of in names and kind in _KINDS:
        if deck.model.loss is None and deck.data.dataset is None:
            return MetricName(of, kind)
        raise HpctrainError(f"--figure {name}: is told of text alone ({of} would do, which is its loss)")
    if name == TRAINING_LOSS:
        return MetricName()
    if not names:
        raise HpctrainError(f"--figure {name}: {NOTHING_EVALUATED}")
    if of in names:
        known = f"{of}, {' or '.join(f'{of}/{each}' for each in _KINDS)}"
        raise HpctrainError(f"--figure {name}: is no figure of an evaluation ({known} would do)")
    raise HpctrainError(f"--figure {name}: {unknown_set(of, names)}")
