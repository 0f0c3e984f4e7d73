"""Comparison of two steps by their fingerprints: which tensors differ beyond rounding.

On the same layout bits are compared, rank by rank. Different layouts add numbers in different orders. Then
the size of a difference, estimated from sketches, decides whether it counts as rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median
from typing import NamedTuple

from hpctrain.deck.schema import Deck
from hpctrain.fault_checks.fingerprint import sketch_norm
from hpctrain.objective.dpo import REFERENCE
from hpctrain.train.fingerprints import AS_COMPUTED, NORM, RATE, StepFingerprints, TensorFingerprint


class Rounding(NamedTuple):
    """Largest relative differences that count as rounding, as fractions of a tensor's norm.

    Attributes:
        activations: Limit for activations and the loss.
        gradients: Limit for gradients.
        weights: Limit for weights and optimizer state.
    """

    activations: float
    gradients: float
    weights: float

    @staticmethod
    def of(*decks: Deck) -> Rounding:
        """Return the limits of the deck with the lower precision; those of weights are higher for Muon."""
        limits = [ROUNDING_LIMITS[deck.precision.compute] for deck in decks]
        factor = max(_AMPLIFIED.get(deck.optimizer.name, 1) for deck in decks)
        rounding = Rounding(*map(max, *limits)) if len(limits) > 1 else limits[0]
        return rounding._replace(weights=rounding.weights * factor)


ROUNDING_LIMITS = {
    "fp32": Rounding(1e-5, 1e-4, 1e-4),
    "bf16": Rounding(6e-2, 1.2e-1, 1e-1),
    "fp16": Rounding(1e-2, 4e-2, 4e-2),
    "fp8": Rounding(1.5e-1, 3e-1, 3e-1),
}
"""Limits by `precision.compute`. They are based on measured differences between one rank and two ranks.

Measured were ten steps of models with two blocks on eight layouts (data, ZeRO 1 and 3, tensor, sequence, two
pipelines, context), three steps with split experts, and three steps of gpt2 with twelve blocks and 12M
parameters on two tensor ranks. The largest differences were in fp32 9e-7, 9e-6 and 5e-6, in bf16 2e-2, 4e-2
and 3e-2, in fp16 3e-3, 1e-2 and 9e-3, in fp8 3e-2, 1e-1 and 7e-2.
"""

_AMPLIFIED = {"muon": 20}
"""Factor by which rounding of updates is larger, by optimizer.

Muon iterates a matrix root; its differences were 1e-3 in three steps in fp32.
"""

GROWTH = 10
"""Factor by which a step may enlarge the relative difference of the weights before it."""

FLOOR = 1e-2
"""Fraction of the median root mean square of gradients below which a gradient is negligible.

Differences of smaller gradients are measured relative to this size. Adam makes full-sized steps from the
rounding errors of a gradient that should be zero, such as that of the bias of keys. Parameters with such
gradients are not compared between different layouts.
"""

_MOMENT = "/optimizer/exp_avg/"
_WEIGHTS = re.compile(r"/(replicas\.)?(model|master|optimizer/[^/]+|computed)/")


@dataclass(frozen=True)
class StepDifference:
    """Difference of one tensor between two steps.

    Attributes:
        step: Number of the step.
        phase: Phase of the step, from `PHASES`.
        name: Name of the fingerprint.
        size: Norm of the difference relative to the norm of the tensor. It is infinite if one tensor is not
            finite, or if the samples differ.
        allowed: Largest `size` that counts as rounding.
        equal: True if the bits are equal.
        ranks: Ranks on which the bits differ; empty if ranks cannot be compared.
    """

    step: int
    phase: str
    name: str
    size: float
    allowed: float
    equal: bool
    ranks: tuple[int, ...] = ()

    @property
    def exceeds_rounding(self) -> bool:
        """True if rounding does not explain the difference."""
        return not self.size <= self.allowed

    @property
    def description(self) -> str:
        """Name of the tensor for messages."""
        return tensor_text(self.phase, self.name)


@dataclass
class StepComparison:
    """Comparison of the steps of two trainers, in their order.

    Attributes:
        rounding: Limits of differences that count as rounding.
        same_layout: True if both have the same layout, so that each rank has the same pieces.
        exact: True if the bits must be equal.
        negligible: Parameters whose gradients were only rounding errors in any step so far.
    """

    rounding: Rounding
    same_layout: bool
    exact: bool
    negligible: set[str] = field(default_factory=set)

    def of(self, one: StepFingerprints, other: StepFingerprints) -> list[StepDifference]:
        """Return the differences of all tensors that both steps have, in the order of the step."""
        assert one.step == other.step
        other_tensors, scales = other.by_key(), _Scales(one)
        self.negligible |= scales.negligible()
        pairs = [
            (first, second)
            for first in one.tensors
            if (second := other_tensors.get((first.phase, first.name))) is not None
            and (self.same_layout or not first.name.startswith("/") or _WEIGHTS.match(first.name))
        ]
        sizes = [scales.relative_difference(first, second) for first, second in pairs]
        weight_sizes = (size for (first, _), size in zip(pairs, sizes, strict=True) if self._is_weight(first))
        level = max(weight_sizes, default=0.0)
        return [
            self._difference(one.step, first, second, size, level)
            for (first, second), size in zip(pairs, sizes, strict=True)
        ]

    def first(self, differences: Sequence[StepDifference]) -> StepDifference | None:
        """Return the first tensor that differs: in bits if these must be equal, else beyond rounding."""
        return first_of(differences, bits=self.exact)

    def _is_weight(self, each: TensorFingerprint) -> bool:
        """Return True for weights before the step, whose differences determine those of later phases."""
        weights = ("/model/", "/master/", "/replicas.model/", "/replicas.master/")
        return each.phase == "start" and each.name.startswith(weights) and not self._is_negligible(each)

    def _is_negligible(self, each: TensorFingerprint) -> bool:
        return not self.exact and each.name.startswith("/") and parameter_of(each.name) in self.negligible

    def _difference(
        self, step: int, one: TensorFingerprint, other: TensorFingerprint, size: float, level: float
    ) -> StepDifference:
        ranks = range(len(one.bits)) if self.same_layout else ()
        differing = tuple(rank for rank in ranks if one.bits[rank] != other.bits[rank])
        if self.same_layout:
            equal = not differing
        else:
            equal = size == 0.0 if one.phase == "gradient" else one.total == other.total
        rounding = self.rounding
        if one.phase == "samples" and one.name == REFERENCE:
            allowed = rounding.activations  # scores of a reference model, which are computed on each layout
        elif one.phase == "samples":
            size, allowed = 0.0 if equal else inf, 0.0
        elif one.name == RATE:
            allowed = 1e-12
        elif one.phase == "start":
            allowed = inf if self._is_negligible(one) else rounding.weights
        else:
            base = {"forward": rounding.activations, "update": rounding.weights}
            allowed = max(base.get(one.phase, rounding.gradients), GROWTH * level)
            allowed = inf if self._is_negligible(one) else allowed
        return StepDifference(step, one.phase, one.name, size, allowed, equal, differing)


def first_of(differences: Sequence[StepDifference], bits: bool) -> StepDifference | None:
    """Return the first tensor that differs, in any bit if `bits` is True, else by more than rounding."""
    differing = (each for each in differences if (not each.equal if bits else each.exceeds_rounding))
    return next(differing, None)


def reduction_error(step: StepFingerprints, name: str) -> float:
    """Return the relative difference between a reduced gradient and the sum of the ranks' gradients."""
    tensors = step.by_key()
    gradient, reduced = tensors.get(("gradient", name)), tensors.get(("reduction", name))
    if gradient is None or reduced is None:
        return 0.0
    size = sketch_norm(gradient.sketch)
    return sketch_norm(gradient.sketch - reduced.sketch) / size if size else 0.0


def changed_between(before: StepFingerprints, after: StepFingerprints) -> list[str]:
    """Return the weights and states whose bits changed between the end of a step and the next step."""
    previous = {each.name: each.bits for each in before.tensors if each.phase == "update"}
    return [
        each.name
        for each in after.tensors
        if each.phase == "start" and previous.get(each.name, each.bits) != each.bits
    ]


def parameter_of(name: str) -> str:
    """Return the name of the parameter that a dataset of a checkpoint belongs to."""
    return name.rpartition("/")[2]


def tensor_text(phase: str, name: str) -> str:
    """Return the name of a tensor of a phase for messages."""
    if not name.startswith("/"):
        return f"gradient of {name}" if phase in {"gradient", "reduction"} and name != NORM else name
    kind, parameter = name[1:].rpartition("/")[::2]
    kind = kind.removeprefix("replicas.").removeprefix("optimizer/")
    if kind == "model":
        return f"parameter {parameter}"
    if name.startswith(AS_COMPUTED):
        return f"parameter {parameter} as gathered"
    return f"master weight {parameter}" if kind == "master" else f"{kind} of {parameter}"


class _Scales:
    """Sizes of a step's tensors, to which differences are relative."""

    def __init__(self, step: StepFingerprints) -> None:
        self._tensors, self._median_sizes = step.by_key(), dict[str, float]()
        for phase in ("gradient", "reduction"):
            sizes = [size for _, size in self._elements(phase)]
            self._median_sizes[phase] = median(sizes) if sizes else 0.0

    def _elements(self, phase: str, state: str = "") -> Iterator[tuple[str, float]]:
        """Yield parameters with the root mean square of their gradient, or of a state, in a phase."""
        for (where, name), each in self._tensors.items():
            if where == phase and name.startswith(state) and name != NORM and each.elements:
                yield parameter_of(name), sketch_norm(each.sketch) / sqrt(each.elements)

    def negligible(self) -> set[str]:
        """Return the parameters whose gradients or first moments are far smaller than those of the others."""
        names: set[str] = set()
        for phase, state in (("reduction", ""), ("start", _MOMENT), ("update", _MOMENT)):
            sizes = dict(self._elements(phase, state))
            limit = FLOOR * median(sizes.values()) if sizes else 0.0
            names |= {name for name, size in sizes.items() if size < limit}
        return names

    def relative_difference(self, one: TensorFingerprint, other: TensorFingerprint) -> float:
        """Return the norm of the difference of a tensor between two steps, relative to the tensor's size.

        The size of a query's or key's gradient is at least that of the value's gradient. The softmax computes
        it from sums that nearly cancel, so that its rounding errors are large.
        """
        gap = inf if one.broken != other.broken else sketch_norm(one.sketch - other.sketch)
        if not gap:
            return 0.0
        scale = max(sketch_norm(one.sketch), sketch_norm(other.sketch))
        if one.phase in self._median_sizes and one.name != NORM:
            value = self._tensors.get((one.phase, re.sub(r"\.(query|key)\.", ".value.", one.name)))
            value_norm = 0.0 if value is None else sketch_norm(value.sketch)
            scale = max(scale, value_norm, FLOOR * self._median_sizes[one.phase] * sqrt(one.elements))
        return gap / scale if scale else inf
