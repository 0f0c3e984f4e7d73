"""Scaling of multipliers, initial deviations and learning rates with a model's width (muP).

Maximal update parametrization, Tensor Programs V (arXiv 2203.03466), table 8, relative to a base width at
which nothing changes. Settings that are good for a narrow model, such as the learning rate, are then good for
a wide one.
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
"""Roles of matrices that map from width to width, including those of experts."""


@dataclass(frozen=True)
class WidthScaling:
    """Ratios of a model's width, and of the size of its heads, to those of the base; both 1 by default.

    A router maps from the width to a fixed number of experts, so it is an output layer. Its multiplier is in
    its weights: the deviation and, for Adam, the learning rate are divided by the width (table 3 of the
    paper).
    """

    width: float = 1.0
    head: float = 1.0

    @staticmethod
    def of(deck: Deck) -> WidthScaling:
        """Return the ratios that a deck asks for."""
        model = deck.model
        if model.parametrization == "standard":
            return STANDARD
        assert model.base_width is not None and model.base_head_size is not None
        return WidthScaling(model.hidden / model.base_width, model.head_size / model.base_head_size)

    @property
    def of_logits(self) -> float:
        """Factor of the logits."""
        return 1 / self.width

    @property
    def of_scores(self) -> float:
        """Factor of attention scores in addition to 1 / sqrt(head size).

        The product is proportional to 1 / head size, and unchanged at the base's head size.
        """
        return 1 / sqrt(self.head)

    def deviation(self, initial: Initial) -> float:
        """Return the factor of the standard deviation of initial weights with a role."""
        if initial in HIDDEN:
            return 1 / sqrt(self.width)
        return 1 / self.width if initial == "router" else 1.0

    def learning_rate_factor(self, initial: Initial, optimizer: str) -> float:
        """Return the factor of the learning rate of weights with a role."""
        return LEARNING_RATE_FACTORS[optimizer](self, initial)


STANDARD = WidthScaling()


def _adam_rate_factor(scaling: WidthScaling, initial: Initial) -> float:
    """Return the factor for updates whose elements are as large as the rate, whatever the size of gradients.

    These are updates divided by the root of the gradients' mean square: of each element, or of a row, a cell
    or the tensor as in Adam-mini and Adafactor. Updates of a matrix are correlated with the values that it
    multiplies, so that their effect grows with the number of terms, which is the width.
    """
    return 1 / scaling.width if initial in HIDDEN or initial == "router" else 1.0


def _sgd_rate_factor(scaling: WidthScaling, initial: Initial) -> float:
    if initial in HIDDEN:
        return 1.0
    return 1 / scaling.width if initial == "router" else scaling.width


def _muon_rate_factor(scaling: WidthScaling, initial: Initial) -> float:
    """Return the factor for updates whose spectral norm does not depend on the width.

    Neither does their effect on hidden values. Routers are an exception: the more values their rows sum, the
    longer are the updates of these rows.
    """
    return 1.0 if initial in HIDDEN else 1 / sqrt(scaling.width)


def _muon_rms_rate_factor(scaling: WidthScaling, initial: Initial) -> float:
    """Return the factor for updates that grow with the root of the width."""
    return _muon_rate_factor(scaling, initial) / sqrt(scaling.width)


LEARNING_RATE_FACTORS: Mapping[str, Callable[[WidthScaling, Initial], float]] = {
    "adamw": _adam_rate_factor,
    "adafactor": _adam_rate_factor,
    "adam-mini": _adam_rate_factor,
    "lion": _adam_rate_factor,
    "schedule-free": _adam_rate_factor,
    "sgd": _sgd_rate_factor,
    "original": _muon_rate_factor,
    "adamw-rms": _muon_rms_rate_factor,
}
"""Factor of the learning rate of a parameter with some role, by the name of the optimizer.

For matrices that Muon updates, the key is `optimizer.match`.
"""


def set_learning_rate_factors(parts: Iterable[ModelPart], deck: Deck) -> None:
    """Set the `learning_rate_factor` of parameters by the width (muP). Do nothing without muP."""
    width_scaling = WidthScaling.of(deck)
    if width_scaling == STANDARD:
        return
    rule = deck.optimizer.rule
    for parameter in (parameter for part in parts for parameter in parameter_list(part)):
        name: str = deck.optimizer.name
        if isinstance(rule, MuonTable):
            named = any(fnmatchcase(parameter.shard.name, each) for each in rule.matrices)
            name = rule.match if named and parameter.dim() > 1 else "adamw"
        parameter.learning_rate_factor = width_scaling.learning_rate_factor(parameter.initial, name)
