"""Names of the metrics that runs can be compared by: the training loss, or results of an evaluation set."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.deck.check_evaluation import NOTHING_EVALUATED, set_names, unknown_set
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError

TRAINING_LOSS = "loss"
"""Name of the training loss."""

_KINDS = ("perplexity", "bits_per_byte")


@dataclass(frozen=True)
class MetricName:
    """Name of a metric of training or of an evaluation set.

    Attributes:
        evaluation_set: Name of the set; "" for training.
        kind: "loss", "perplexity" or "bits_per_byte".
    """

    evaluation_set: str = ""
    kind: str = "loss"

    @property
    def title(self) -> str:
        """Name in tables, such as "val bits/byte"."""
        return f"{self.evaluation_set} {self.kind.replace('_per_', '/')}".strip()


def parse_metric_name(deck: Deck, name: str) -> MetricName:
    """Return the metric that the value of the option `--figure` names.

    Args:
        deck: Deck of the run, with its evaluation sets.
        name: "loss" for the training loss, the name of a set for its loss, or that name with "/perplexity" or
            "/bits_per_byte".

    Raises:
        HpctrainError: A run of the deck has no such metric.
    """
    names = set_names(deck)
    set_name, slash, kind = name.partition("/")
    if set_name in names and not slash:
        return MetricName(set_name)
    if set_name in names and kind in _KINDS:
        if deck.model.loss is None and deck.data.dataset is None:
            return MetricName(set_name, kind)
        raise HpctrainError(f"--figure {name}: exists only for text ({set_name} would do, which is its loss)")
    if name == TRAINING_LOSS:
        return MetricName()
    if not names:
        raise HpctrainError(f"--figure {name}: {NOTHING_EVALUATED}")
    if set_name in names:
        known = f"{set_name}, {' or '.join(f'{set_name}/{each}' for each in _KINDS)}"
        raise HpctrainError(f"--figure {name}: is not a metric of an evaluation ({known} would do)")
    raise HpctrainError(f"--figure {name}: {unknown_set(set_name, names)}")
