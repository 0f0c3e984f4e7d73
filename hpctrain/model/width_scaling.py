"""What a model's width changes beside its shapes: multipliers, initial deviations and rates (muP).

Maximal update parametrization, Tensor Programs V (arXiv 2203.03466), table 8, relative to a base width at
which nothing is changed: what is good for narrow models, the learning rate above all, is good for wide ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import sqrt

from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.optimizer import MuonTable
from hpctrain.model.part import ModelPart, parameter_list
from hpctrain.parallel.shards import Initial

HIDDEN: frozenset[Initial] = frozenset({"normal", "residual"})
"""Matrices from width to width, and so are each expert's."""


@dataclass(frozen=True)
class WidthScaling:
    """`width` and `head` are how many times wider the model, and one of its heads, is than the base; both 1
    where the parametrization is the standard one.

    A router, from the width to a number of experts that stays, is an output whose multiplier is in its
    weights: their deviation, and for Adam their rate, are over the width (table 3 of the paper).
    """

    width: float = 1.0
    head: float = 1.0

    @staticmethod
    def of(deck: Deck) -> WidthScaling:
        """The deck's."""
        model = deck.model
        if model.parametrization == "standard":
            return STANDARD
        assert model.base_width is not None and model.base_head_size is not None
        return WidthScaling(model.hidden / model.base_width, model.head_size / model.base_head_size)

    @property
    def of_logits(self) -> float:
        """By what logits are multiplied."""
        return 1 / self.width

    @property
    def of_scores(self) -> float:
        """By what attention's scores are multiplied beside 1 / sqrt(head size): 1 / head size, and at the
        base's head size the same.
        """
        return 1 / sqrt(self.head)

    def deviation(self, initial: Initial) -> float:
        """By what the standard deviation of initial weights is multiplied."""
        if initial in HIDDEN:
            return 1 / sqrt(self.width)
        return 1 / self.width if initial == "router" else 1.0

    def rate(self, initial: Initial, optimizer: str) -> float:
        """By what the learning rate is multiplied."""
        return RATES[optimizer](self, initial)


STANDARD = WidthScaling()


def _of_adam(model: WidthScaling, initial: Initial) -> float:
    """Of steps whose elements are as large as the rate, whatever the size of gradients; by the root of their
    mean square over a cell or the tensor, as those of Adam-mini and Adafactor, or each.

    Those of a matrix go along with the values that it is multiplied with: what they add to sums of as many
    terms as the width grows with it. Sums over rows, columns or cells that get larger with the width are
    means: they leave elements their size.
    """
    return 1 / model.width if initial in HIDDEN or initial == "router" else 1.0


def _of_gradients(model: WidthScaling, initial: Initial) -> float:
    if initial in HIDDEN:
        return 1.0
    return 1 / model.width if initial == "router" else model.width


def _of_muon(model: WidthScaling, initial: Initial) -> float:
    """Of steps of one spectral norm: what they add to values of a kind is of one size, but of routers, whose
    rows get longer steps the more they add up.
    """
    return 1.0 if initial in HIDDEN else 1 / sqrt(model.width)


def _of_larger_muon(model: WidthScaling, initial: Initial) -> float:
    """Of steps that grow with the root of the width."""
    return _of_muon(model, initial) / sqrt(model.width)


RATES: Mapping[str, Callable[[WidthScaling, Initial], float]] = {
    "adamw": _of_adam,
    "adafactor": _of_adam,
    "adam-mini": _of_adam,
    "lion": _of_adam,
    "schedule-free": _of_adam,
    "sgd": _of_gradients,
    "original": _of_muon,
    "adamw-rms": _of_larger_muon,
}
"""What multiplies the rate of a parameter by its role, by optimizer, or by optimizer.match of what is Muon's:
those whose steps do not depend on the size of gradients, and those whose steps are proportional to it.
"""


def set_rates(parts: Iterable[ModelPart], deck: Deck) -> None:
    """Give the parameters of a deck's model the rates that its width asks for."""
    parametrization = WidthScaling.of(deck)
    if parametrization == STANDARD:
        return
    rule = deck.optimizer.rule
    for parameter in (parameter for part in parts for parameter in parameter_list(part)):
        name: str = deck.optimizer.name
        if isinstance(rule, MuonTable):
            named = any(fnmatchcase(parameter.shard.name, each) for each in rule.matrices)
            name = rule.match if named and parameter.dim() > 1 else "adamw"
        parameter.rate = parametrization.rate(parameter.initial, name)
