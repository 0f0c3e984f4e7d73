"""What patterns of a deck name of its model, and what is wrong with them.

Some parameters are one matrix or vector in memory: what is done to one of these is done to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, groupby

from torch import Tensor

from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.adapters import Adapters, matches_pattern
from hpctrain.deck.sections.optimizer import MuonTable
from hpctrain.deck.sources import toml_value
from hpctrain.engine.rules import RULES
from hpctrain.errors import HpctrainError
from hpctrain.model.architecture import Architecture
from hpctrain.model.build import bare_model
from hpctrain.model.part import ModelPart, parameter_list
from hpctrain.model.precision import Precision
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.parallel.fp8_settings import names
from hpctrain.parallel.linear import SplitLinear
from hpctrain.parallel.shard import Parameter
from hpctrain.text import either

_NEVER_IN_8_BITS = ("head.weight", "score.weight", "embedding.tokens.weight", "embedding.positions.weight")
"""Names that precision.fp8_exclude may have in vain."""


@dataclass(frozen=True)
class PatternMatches:
    """What patterns name: of each group of parameters that are one in memory the names of those that they
    name, and of those that they leave; and the patterns of no parameter.
    """

    groups: Sequence[tuple[Sequence[str], Sequence[str]]]
    unknown: Sequence[str]

    @staticmethod
    def of(
        patterns: Sequence[str],
        groups: Iterable[Iterable[Parameter]],
        others: Iterable[str] = (),
        matches: Callable[[str, str], bool] = lambda pattern, name: fnmatchcase(name, pattern),
    ) -> PatternMatches:
        """What is named of groups, or of `others`; `matches` says whether a pattern is of a name."""
        known = [[parameter.shard.name for parameter in group] for group in groups]
        every = [*chain(*known), *others]
        named = {name for name in every if any(matches(pattern, name) for pattern in patterns)}
        return PatternMatches(
            [([n for n in group if n in named], [n for n in group if n not in named]) for group in known],
            [pattern for pattern in patterns if not any(matches(pattern, name) for name in named)],
        )

    def problems(self, torn: str, unknown: str, none: str = "", whole: str = "") -> list[str]:
        """Ends of sentences: `torn` of one that is named and one that is left of a group, `unknown` of each
        pattern of no parameter; else `none` where none is named, and `whole` where none is left.
        """
        told = [torn.format(named[0], left[0]) for named, left in self.groups if named and left]
        told += [unknown.format(toml_value(pattern)) for pattern in self.unknown]
        if not told and none and not any(named for named, _ in self.groups):
            told.append(none)
        if not told and whole and not any(left for _, left in self.groups):
            told.append(whole)
        return list(dict.fromkeys(told))


def check_patterns(deck: Deck, architecture: Architecture) -> None:
    """Raise HpctrainError with all `pattern_problems`."""
    if problems := [deck.problem(each.key, each.sentence) for each in pattern_problems(deck, architecture)]:
        raise HpctrainError(problems)


def pattern_problems(deck: Deck, architecture: Architecture) -> Iterator[DeckProblem]:
    """Where a deck names parameters to freeze, matrices for its optimizer, or layers to leave out of 8 bits:
    patterns of nothing, of one of several that are one in memory without the others, and such as leave
    nothing to do. The same on any layout.
    """
    updates, how = deck.optimizer.rule, Precision.of(deck).eight_bits
    if deck.model.frozen:
        frozen = _frozen(bare_model(architecture), deck.model.frozen)
        yield from (DeckProblem("model.frozen", each) for each in frozen)
    if deck.model.adapters is not None:
        adapted = _adapted(bare_model(architecture), deck.model.adapters)
        yield from (DeckProblem("model.adapters", each) for each in adapted)
    if isinstance(updates, MuonTable) and updates.matrices:
        rule = RULES["muon"](deck)
        assert isinstance(rule, MatrixRules)
        yield from (
            DeckProblem("optimizer.muon.matrices", each) for each in _matrices(bare_model(architecture), rule)
        )
    if how is not None and how.exclude:
        problems = _excluded(bare_model(architecture), how.exclude)
        yield from (DeckProblem("precision.fp8_exclude", each) for each in problems)


def _frozen(model: ModelPart, patterns: Sequence[str]) -> list[str]:
    leaves = (leaf for unit in model.units() for leaf in unit)
    alike = (list(each) for leaf in leaves for _, each in groupby(sorted(leaf, key=Tensor.dim), Tensor.dim))
    example = parameter_list(model)[0].shard.name
    return PatternMatches.of(patterns, alike).problems(
        "freezes {}, but not {}, which is fused with it (name both or neither)",
        f"no parameter matches {{}} (an example of a name is {example})",
        whole="leaves nothing to train (leave out a pattern)",
    )


def _adapted(model: ModelPart, adapters: Adapters) -> Iterator[str]:
    weights = [weight.shard for layer in _linear(model) for weight in layer.weights]
    shapes = {shard.name.removesuffix(".weight"): shard.shape for shard in weights}
    for pattern in adapters.targets:
        if not any(matches_pattern(pattern, name) for name in shapes):
            kinds = either(list(dict.fromkeys(name.rpartition(".")[2] for name in shapes)))
            yield f"targets: no matrix of a block matches {toml_value(pattern)} (expected {kinds})"
    small = [name for name, shape in shapes.items() if adapters.adapts(name) and adapters.rank > min(shape)]
    if small:
        size = " x ".join(map(str, shapes[small[0]]))
        yield f"rank = {adapters.rank}: exceeds the size of {small[0]}, {size}"


def _linear(model: ModelPart) -> list[SplitLinear]:
    modules = (module for layer in model.layers for module in layer.modules())
    return [module for module in modules if isinstance(module, SplitLinear)]


def _matrices(model: ModelPart, rule: MatrixRules) -> list[str]:
    leaves = (leaf for unit in model.units() for leaf in unit)
    matrices = ([p for p in leaf if rule.blocks.block(p.shard) is not None] for leaf in leaves)
    others = (parameter.shard.name for parameter in parameter_list(model))
    return PatternMatches.of(rule.patterns, matrices, others).problems(
        "names {}, but not {}, which is stored with it (name both or neither)",
        "no parameter matches {}",
        none="names no matrix",
    )


def _excluded(model: ModelPart, patterns: Sequence[str]) -> list[str]:
    fused = (layer.weights for layer in _linear(model))
    return PatternMatches.of(patterns, fused, _NEVER_IN_8_BITS, names).problems(
        "excludes {}, but not {}, which is fused with it (name both or neither)",
        "no linear layer matches {}",
        whole='excludes all layers (precision.compute = "bf16" is equivalent)',
    )
