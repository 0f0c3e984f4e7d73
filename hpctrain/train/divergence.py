"""Where two steps first differ, by their fingerprints, and whether rounding explains it.

On one layout bits are compared, rank by rank. On others numbers add up in another order: then a difference is
told from rounding by its size, which a sketch tells.
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
from hpctrain.train.fingerprints import AS_COMPUTED, NORM, RATE, Print, StepPrints


class Rounding(NamedTuple):
    """What counts as rounding, of the length of what differs: of activations and the loss, of gradients, and
    of weights and state.
    """

    activations: float
    gradients: float
    weights: float

    @staticmethod
    def of(*decks: Deck) -> Rounding:
        """That of the deck which rounds more, by its precision; of Muon's updates more counts as that."""
        found = [ROUNDING[deck.precision.compute] for deck in decks]
        factor = max(_AMPLIFIED.get(deck.optimizer.name, 1) for deck in decks)
        rounding = Rounding(*map(max, *found)) if len(found) > 1 else found[0]
        return rounding._replace(weights=rounding.weights * factor)


ROUNDING = {
    "fp32": Rounding(1e-5, 1e-4, 1e-4),
    "bf16": Rounding(6e-2, 1.2e-1, 1e-1),
    "fp16": Rounding(1e-2, 4e-2, 4e-2),
    "fp8": Rounding(1.5e-1, 3e-1, 3e-1),
}
"""By precision. Measured one rank beside two: over ten steps of models of two blocks on eight layouts (data,
ZeRO 1 and 3, tensor, sequence, two pipelines, context), over three steps of experts that are split, and of
gpt2 of twelve blocks and 12M parameters on two tensor ranks. The largest differences were in fp32 9e-7, 9e-6
and 5e-6, in bf16 2e-2, 4e-2 and 3e-2, in fp16 3e-3, 1e-2 and 9e-3, in fp8 3e-2, 1e-1 and 7e-2.
"""

_AMPLIFIED = {"muon": 20}
"""By how much more an update rounds; measured 1e-3 in three steps in fp32, where a root is iterated."""

GROWTH = 10
"""What a step may make of the difference of the weights that it begins with."""

FLOOR = 1e-2
"""Of the usual size of a gradient's elements: gradients that are smaller are measured by that. Adam makes
steps of full size of the rounding of a gradient that ought to be zero, as that of the keys' bias: what such a
gradient has ever changed is not looked at on another layout.
"""

_MOMENT = "/optimizer/exp_avg/"
_WEIGHTS = re.compile(r"/(replicas\.)?(model|master|optimizer/[^/]+|computed)/")


@dataclass(frozen=True)
class StepDifference:
    """How far apart a tensor is in two steps: the length of the difference over that of the tensor, infinite
    where one of them is not finite or is of other samples; what of that is rounding; whether the bits are
    the same, and on which ranks they are not, where ranks are comparable.
    """

    step: int
    phase: str
    name: str
    size: float
    allowed: float
    equal: bool
    ranks: tuple[int, ...] = ()

    @property
    def beyond(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.size <= self.allowed

    @property
    def told(self) -> str:
        """What it is, in words."""
        return tensor_text(self.phase, self.name)


@dataclass
class StepComparison:
    """Compares the steps of two trainers, one after the other, which differ by `rounding` in any case.

    `alike` says that they have one layout, so that each rank has the same piece, `exact` that they are to
    have the same bits. `quiet` will be the tensors whose gradients were rounding alone.
    """

    rounding: Rounding
    alike: bool
    exact: bool
    quiet: set[str] = field(default_factory=set)

    def of(self, one: StepPrints, other: StepPrints) -> list[StepDifference]:
        """All that both steps have, in the order of the step."""
        assert one.step == other.step
        theirs, scales = other.by_key(), _Scales(one)
        self.quiet |= scales.quiet()
        both = [
            (each, there)
            for each in one.prints
            if (there := theirs.get((each.phase, each.name))) is not None
            and (self.alike or not each.name.startswith("/") or _WEIGHTS.match(each.name))
        ]
        known = [(mine, their, scales.apart(mine, their)) for mine, their in both]
        level = max((size for mine, _, size in known if self._is_weight(mine)), default=0.0)
        return [self._apart(one.step, mine, their, size, level) for mine, their, size in known]

    def first(self, found: Sequence[StepDifference]) -> StepDifference | None:
        """The first that differs, by bits or beyond rounding, whichever tells here."""
        return first_of(found, bits=self.exact)

    def _is_weight(self, each: Print) -> bool:
        """Whether it is a weight that the step begins with: what comes of it is as far apart as these are."""
        weights = ("/model/", "/master/", "/replicas.model/", "/replicas.master/")
        return each.phase == "start" and each.name.startswith(weights) and not self._is_quiet(each)

    def _is_quiet(self, each: Print) -> bool:
        return not self.exact and each.name.startswith("/") and parameter_of(each.name) in self.quiet

    def _apart(self, step: int, mine: Print, their: Print, size: float, level: float) -> StepDifference:
        ranks = range(len(mine.bits)) if self.alike else ()
        differing = tuple(rank for rank in ranks if mine.bits[rank] != their.bits[rank])
        if self.alike:
            equal = not differing
        else:
            equal = size == 0.0 if mine.phase == "gradient" else mine.total == their.total
        rounding = self.rounding
        if mine.phase == "samples" and mine.name == REFERENCE:
            allowed = rounding.activations  # what another model made of them, computed on each layout
        elif mine.phase == "samples":
            size, allowed = 0.0 if equal else inf, 0.0
        elif mine.name == RATE:
            allowed = 1e-12
        elif mine.phase == "start":
            allowed = inf if self._is_quiet(mine) else rounding.weights
        else:
            base = {"forward": rounding.activations, "update": rounding.weights}
            allowed = max(base.get(mine.phase, rounding.gradients), GROWTH * level)
            allowed = inf if self._is_quiet(mine) else allowed
        return StepDifference(step, mine.phase, mine.name, size, allowed, equal, differing)


def first_of(found: Sequence[StepDifference], bits: bool) -> StepDifference | None:
    """The first that differs: in `bits`, or beyond rounding."""
    differing = (each for each in found if (not each.equal if bits else each.beyond))
    return next(differing, None)


def unsummed(step: StepPrints, name: str) -> float:
    """How far the sum of a gradient is from the sum of what ranks had, in the step itself."""
    known = step.by_key()
    own, summed = known.get(("gradient", name)), known.get(("reduction", name))
    if own is None or summed is None:
        return 0.0
    size = sketch_norm(own.sketch)
    return sketch_norm(own.sketch - summed.sketch) / size if size else 0.0


def changed_between(before: StepPrints, after: StepPrints) -> list[str]:
    """What of weights and state had other bits at the start of a step than after the one before."""
    left = {each.name: each.bits for each in before.prints if each.phase == "update"}
    return [
        each.name
        for each in after.prints
        if each.phase == "start" and left.get(each.name, each.bits) != each.bits
    ]


def parameter_of(name: str) -> str:
    """The parameter to which a dataset belongs."""
    return name.rpartition("/")[2]


def tensor_text(phase: str, name: str) -> str:
    """A tensor of a phase in words."""
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
    """By what differences of a step's tensors are measured."""

    def __init__(self, step: StepPrints) -> None:
        self._known, self._usual = step.by_key(), dict[str, float]()
        for phase in ("gradient", "reduction"):
            sizes = [size for _, size in self._elements(phase)]
            self._usual[phase] = median(sizes) if sizes else 0.0

    def _elements(self, phase: str, state: str = "") -> Iterator[tuple[str, float]]:
        """The usual size of the elements of each gradient, or of a state, by parameter."""
        for (where, name), each in self._known.items():
            if where == phase and name.startswith(state) and name != NORM and each.elements:
                yield parameter_of(name), sketch_norm(each.sketch) / sqrt(each.elements)

    def quiet(self) -> set[str]:
        """Tensors with hardly any gradient: now, or as moments tell, before."""
        found: set[str] = set()
        for where in (("reduction", ""), ("start", _MOMENT), ("update", _MOMENT)):
            sizes = dict(self._elements(*where))
            usual = median(sizes.values()) if sizes else 0.0
            found |= {name for name, size in sizes.items() if size < FLOOR * usual}
        return found

    def apart(self, mine: Print, their: Print) -> float:
        """The difference of two over the size of such a tensor.

        Gradients of queries and keys are measured by that of the values, too: through softmax go sums that
        nearly cancel.
        """
        gap = inf if mine.broken != their.broken else sketch_norm(mine.sketch - their.sketch)
        if not gap:
            return 0.0
        scale = max(sketch_norm(mine.sketch), sketch_norm(their.sketch))
        if mine.phase in self._usual and mine.name != NORM:
            values = self._known.get((mine.phase, re.sub(r"\.(query|key)\.", ".value.", mine.name)))
            beside = 0.0 if values is None else sketch_norm(values.sketch)
            scale = max(scale, beside, FLOOR * self._usual[mine.phase] * sqrt(mine.elements))
        return gap / scale if scale else inf
